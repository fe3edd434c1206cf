"""Long-term allocation (section 3.4.3): one PD instance at a time changes between prefill and decode."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prfaas.core.deployment import Role
from prfaas.core.planner import PlanProblem
from prfaas.core.planner.fixed_roles import best_roles, rate_with_roles
from prfaas.core.scheduling.known_problem import KnownProblem
from prfaas.core.scheduling.view import InstanceView

COOL_DOWN_PERIODS = 2
"""After a conversion the queues need this many evaluations to show what it did."""

DRAIN_LIMIT_S = 60.0
"""After so long an instance has its new role, even if old work is still there."""
DRAIN_CHECK_S = 0.25
"""How often a drain should be looked at."""

DrainResult = Literal["done", "done-with-old-work", "abandoned"]
"""How a drain ended: the old work is done; it took too long, and both kinds of work are there for a while; the
instance failed and keeps its role."""

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
    group: tuple[str, ...] = ()
    """The ranks that change their role with it, itself among them; empty: it changes alone."""


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
    """`instance` of a PD cluster goes to `to_role` once its present work is done, with all ranks of its group.

    Rates are Λ_max of the whole deployment in requests per second, for the traffic seen and the best thresholds.
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
    """Restores Eq. 7 and 8 (section 3.4.3) where planner and measurements agree on it.

    An instance of a PD cluster changes its role if, at `persist` evaluations in a row,
    - the planner's best roles for the traffic that was seen have more instances in that role, and Λ_max would rise by
      more than `margin` with them, or they are at least two instances away and it would rise at all; the single
      conversion may not lower it;
    - what was measured says the same: the side that gets the instance is the busier one, by `lead` of utilisation
      and at least `least` busy. A full decode side is the limit however long the queue before prefill is, since
      everything comes through it; and prefill gives no instance away while the PrfaaS clusters that help it are busier
      than decode.
    Then nothing for `cool_down_s`, and never while an instance is still draining. Both roles keep at least one
    instance. Of the giving role the least busy healthy instance goes, ties by name. A data-parallel group goes as a
    whole, where no more than its ranks are wanted. Clusters where some instance has both roles at once, or none has one
    of them, have nothing to convert, and stay; the others are planned beside them.
    Costs some milliseconds for two clusters, up to seconds for many (a mixed-integer programme), less while the problem
    stays what it was: run it beside an event loop.
    """

    persist: int = 3
    cool_down_s: float = 120.0
    margin: float = 0.05
    lead: float = 0.05
    least: float = 0.3
    _agreed: dict[tuple[str, Role], int] = field(default_factory=dict, init=False)
    _last_s: float = field(default=float("-inf"), init=False)
    _known: KnownProblem = field(default_factory=KnownProblem, init=False)
    _best: dict[str, int] = field(default_factory=dict, init=False)
    _rates: dict[tuple[tuple[str, int], ...], float] = field(default_factory=dict, init=False)

    def decide(
        self, loads: Sequence[PdLoad], problem: PlanProblem, now_s: float, *, sample_count: int = 0
    ) -> Conversion | None:
        """One evaluation; call it periodically, with the loads since the call before.

        Args:
            loads: as measured.
            problem: the deployment now with the traffic that was seen, its PD clusters with as many instances as are
                healthy. PD clusters that it does not have are left alone.
            now_s: of any one clock.
            sample_count: how many requests the problem's lengths were taken from; 0: the problem is always a new one.
        """
        planned = {pd.name: pd.instances for pd in problem.pd}
        known = [load for load in loads if planned.get(load.cluster) == _healthy(load)]
        if len(known) < len(planned) or _is_changing(loads):
            self._agreed.clear()
            return None
        wanted = self._wanted(known, problem, sample_count)
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

    def _wanted(
        self, loads: Sequence[PdLoad], problem: PlanProblem, sample_count: int
    ) -> dict[tuple[str, Role], Conversion]:
        """What planner and measurements agree on now, for throughput."""
        divided = [load for load in loads if _is_divided(load)]
        busier = {load.cluster: self._busier(load) for load in divided}
        if not any(busier.values()):
            return {}
        if not sample_count or self._known.is_new(problem, None, sample_count):
            self._best, self._rates = best_roles(problem), {}
        now = {load.cluster: _prefilling(load, self._best[load.cluster]) for load in loads}
        best = now | {load.cluster: _inside(self._best[load.cluster], load) for load in divided}
        if best == now:
            return {}
        before, rate_best = self._rate(problem, now), self._rate(problem, best)
        wanted: dict[tuple[str, Role], Conversion] = {}
        for load in divided:
            missing = best[load.cluster] - now[load.cluster]
            role: Role = "prefill" if missing > 0 else "decode"
            needed = _EQUAL if abs(missing) >= 2 else self.margin
            if missing == 0 or busier[load.cluster] != role or rate_best <= before * (1 + needed):
                continue
            spare = _spare(load, role, abs(missing))
            if spare is None:
                continue
            step = now[load.cluster] + (len(spare) if missing > 0 else -len(spare))
            after = self._rate(problem, {**now, load.cluster: step})
            if after < before * (1 - _EQUAL):
                continue
            reason = f"{role} is the limit: {now[load.cluster]} prefill, best {best[load.cluster]}"
            wanted[load.cluster, role] = Conversion(
                load.cluster, spare[0].name, role, reason, before, rate_after=after, rate_best=rate_best
            )
        return wanted

    def _rate(self, problem: PlanProblem, roles: dict[str, int]) -> float:
        """Λ_max with these roles."""
        key = tuple(sorted(roles.items()))
        if key not in self._rates:
            self._rates[key] = rate_with_roles(problem, roles)
        return self._rates[key]

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


def _units(load: PdLoad, role: Role) -> list[list[PdInstance]]:
    """The healthy instances of a role, those together that change it together."""
    units: dict[str, list[PdInstance]] = {}
    for each in load.able(role):
        units.setdefault(each.group[0] if each.group else each.name, []).append(each)
    return list(units.values())


def _spare(load: PdLoad, role: Role, wanted: int) -> list[PdInstance] | None:
    """The least busy of the other role that change together, ties by name; None: all are more than are `wanted`."""
    giving: Role = "decode" if role == "prefill" else "prefill"
    fitting = [unit for unit in _units(load, giving) if len(unit) <= wanted]
    return min(
        fitting, key=lambda unit: (sum(each.busy for each in unit) / len(unit), unit[0].name), default=None
    )


def _is_divided(load: PdLoad) -> bool:
    """Whether every healthy instance has exactly one role, and each role at least one instance."""
    healthy = [instance for instance in load.instances if instance.healthy]
    return (
        all(instance.prefills != instance.decodes for instance in healthy)
        and bool(load.able("prefill"))
        and bool(load.able("decode"))
    )


def _prefilling(load: PdLoad, best: int) -> int:
    """How many healthy instances prefill; of those with both roles as many as would be `best`."""
    able = load.able("prefill")
    return min(max(best, sum(not each.decodes for each in able)), len(able))


def _is_changing(loads: Sequence[PdLoad]) -> bool:
    return any(instance.draining for load in loads for instance in load.instances)


def _healthy(load: PdLoad) -> int:
    return sum(instance.healthy for instance in load.instances)


def _inside(prefill: int, load: PdLoad) -> int:
    """At least one instance of each role."""
    return min(max(prefill, 1), _healthy(load) - 1)


@dataclass(frozen=True, slots=True)
class RoleDrain:
    """Instances that finish their old work and get nothing new, so that no request is lost or slowed."""

    instances: Sequence[InstanceView]
    to_role: Role
    since_s: float

    @classmethod
    def begin(cls, instances: Sequence[InstanceView], to_role: Role, now_s: float) -> "RoleDrain":
        """Let nothing new go to one instance, or to the ranks of a group: they are draining from now on."""
        for instance in instances:
            instance.draining = True
        return cls(instances, to_role, now_s)

    def conclude(self, now_s: float) -> DrainResult | None:
        """End the drain if it is over; None if it is not. The caller gives the role, unless it was abandoned."""
        if not all(instance.healthy for instance in self.instances):
            result: DrainResult = "abandoned"
        elif not any(instance.in_flight for instance in self.instances):
            result = "done"
        elif now_s - self.since_s >= DRAIN_LIMIT_S:
            result = "done-with-old-work"
        else:
            return None
        self.end()
        return result

    def end(self) -> None:
        """They are draining no more, whatever has come of it."""
        for instance in self.instances:
            instance.draining = False
