"""Long-term allocation (section 3.4.3): one PD instance at a time changes between prefill and decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.core.deployment import Role
from prfaas.core.planner import PlanProblem, ServiceModel
from prfaas.core.planner.fixed_roles import best_roles, rate_with_roles

COOL_DOWN_PERIODS = 2
"""After a conversion the queues need this many evaluations to show what it did."""

# A stage this busy, or with a request waiting for every instance, is taken as full.
_FULL = 0.95
# Rates closer than this, in proportion, are equal: the planner's own accuracy over several clusters.
_EQUAL = 1e-3


@dataclass(frozen=True, slots=True)
class StageLoad:
    """How busy the instances of one role were since the last evaluation."""

    utilisation: float
    """The part of their time (prefill) or of their decode slots that was in use, from 0."""
    waiting: float = 0.0
    """Requests that waited for one of them, on average."""

    def pressure(self, instances: int) -> float:
        """Utilisation, and at least 1 with one request waiting per instance."""
        return max(self.utilisation, 1.0) if self.waiting >= max(instances, 1) else self.utilisation


@dataclass(frozen=True, slots=True)
class PdInstance:
    """One instance of a PD cluster with its present roles."""

    name: str
    prefills: bool
    decodes: bool
    healthy: bool = True
    draining: bool = False
    busy: float = 0.0
    """The work it has, in any unit common to a role."""


@dataclass(frozen=True, slots=True)
class PdLoad:
    """One PD cluster as measured."""

    cluster: str
    instances: tuple[PdInstance, ...]
    prefill: StageLoad
    decode: StageLoad
    remote: StageLoad | None = None
    """The load of the PrfaaS clusters that are linked to it; None without any."""
    remote_instances: int = 0

    def able(self, role: Role) -> list[PdInstance]:
        """Healthy instances that have this role."""
        return [i for i in self.instances if i.healthy and (i.prefills if role == "prefill" else i.decodes)]


@dataclass(frozen=True, slots=True)
class Conversion:
    """`instance` of a PD cluster goes to `to_role` once its present work is done.

    Rates are Λ_max of the whole deployment in requests per second, for the observed traffic and the best thresholds.
    """

    cluster: str
    instance: str
    to_role: Role
    reason: str
    rate_before: float
    """With the roles as they are."""
    rate_after: float
    """After this conversion."""
    rate_best: float
    """With the best roles of all."""


@dataclass(slots=True)
class Allocator:
    """Restores Eq. 7 and 8 when the traffic has changed for long.

    An instance of a PD cluster changes its role if, at `persist` evaluations in a row,
    - the planner's best roles for the observed traffic have more instances in that role, and Λ_max would rise by
      more than `margin` with them, or they are at least two instances away and it would rise at all; the single
      conversion may not lower it;
    - what was measured says the same: the side that gets the instance is the busier one, by `lead` of utilisation
      and at least `least` busy. A full decode side is the limit however long the queue before prefill is, since
      everything comes through it; and prefill gives no instance away while the PrfaaS clusters that help it are busier
      than decode.
    Then nothing for `cool_down_s`, and never while an instance is still draining. Both roles keep at least one
    instance. Of the giving role the least busy healthy instance goes, ties by name. Clusters where some instance has
    both roles at once have nothing to convert, and stay.
    Costs under 1 ms for two clusters, up to a second for many (a mixed-integer programme): run it beside an event
    loop.
    """

    persist: int = 3
    cool_down_s: float = 120.0
    margin: float = 0.05
    lead: float = 0.05
    least: float = 0.3
    service: ServiceModel = "mean length"
    _agreed: dict[tuple[str, Role], int] = field(default_factory=dict, init=False)
    _last_s: float = field(default=float("-inf"), init=False)

    def decide(self, loads: Sequence[PdLoad], problem: PlanProblem, now_s: float) -> Conversion | None:
        """One evaluation; call it periodically, with the loads since the call before.

        `problem`: the deployment now, its PD clusters with as many instances as are healthy. PD clusters that it does
        not have are left alone.
        """
        planned = {pd.name: pd.instances for pd in problem.pd}
        known = [load for load in loads if _is_divided(load) and planned.get(load.cluster) == _healthy(load)]
        if len(known) < len(planned) or _is_changing(loads):
            self._agreed.clear()
            return None
        wanted = self._wanted(known, problem)
        self._agreed = {key: self._agreed.get(key, 0) + 1 for key in wanted}
        if now_s - self._last_s < self.cool_down_s:
            return None
        ready = [conversion for key, conversion in wanted.items() if self._agreed[key] >= self.persist]
        if not ready:
            return None
        best = max(ready, key=lambda conversion: conversion.rate_after)
        self._agreed.clear()
        self._last_s = now_s
        return best

    def _wanted(self, loads: Sequence[PdLoad], problem: PlanProblem) -> dict[tuple[str, Role], Conversion]:
        """What planner and measurements agree on now."""
        busier = {load.cluster: self._busier(load) for load in loads}
        if not any(busier.values()):
            return {}
        now = {load.cluster: len(load.able("prefill")) for load in loads}
        best = best_roles(problem, self.service)
        best = {load.cluster: _inside(best[load.cluster], load) for load in loads}
        if best == now:
            return {}
        before = rate_with_roles(problem, now, self.service)
        rate_best = rate_with_roles(problem, best, self.service)
        wanted: dict[tuple[str, Role], Conversion] = {}
        for load in loads:
            missing = best[load.cluster] - now[load.cluster]
            role: Role = "prefill" if missing > 0 else "decode"
            needed = _EQUAL if abs(missing) >= 2 else self.margin
            if missing == 0 or busier[load.cluster] != role or rate_best <= before * (1 + needed):
                continue
            step = now[load.cluster] + (1 if missing > 0 else -1)
            after = rate_with_roles(problem, {**now, load.cluster: step}, self.service)
            if after < before * (1 - _EQUAL):
                continue
            giving = load.able("decode" if role == "prefill" else "prefill")
            instance = min(giving, key=lambda i: (i.busy, i.name))
            reason = f"{role} is the limit: {now[load.cluster]} prefill, best {best[load.cluster]}"
            wanted[load.cluster, role] = Conversion(
                load.cluster, instance.name, role, reason, before, after, rate_best
            )
        return wanted

    def _busier(self, load: PdLoad) -> Role | None:
        """The side that holds the other up, by measurement; None if neither clearly does."""
        prefill = load.prefill.pressure(len(load.able("prefill")))
        decode = load.decode.pressure(len(load.able("decode")))
        remote = load.remote.pressure(load.remote_instances) if load.remote is not None else 0.0
        if decode >= self.least and (decode >= _FULL or decode >= prefill + self.lead):
            return "decode" if decode >= _FULL or decode >= remote else None
        if prefill >= self.least and prefill >= decode + self.lead:
            return "prefill"
        return None


def _is_divided(load: PdLoad) -> bool:
    """Whether every healthy instance has exactly one role, and each role at least one instance."""
    healthy = [instance for instance in load.instances if instance.healthy]
    return (
        all(instance.prefills != instance.decodes for instance in healthy)
        and bool(load.able("prefill"))
        and bool(load.able("decode"))
    )


def _is_changing(loads: Sequence[PdLoad]) -> bool:
    return any(instance.draining for load in loads for instance in load.instances)


def _healthy(load: PdLoad) -> int:
    return sum(instance.healthy for instance in load.instances)


def _inside(prefill: int, load: PdLoad) -> int:
    """At least one instance of each role."""
    return min(max(prefill, 1), _healthy(load) - 1)
