"""Long-term allocation (section 3.4.3): one PD instance at a time changes between prefill and decode."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prfaas.core.deployment import Role
from prfaas.core.planner import PlanProblem
from prfaas.core.planner.fixed_roles import best_roles, rate_with_roles
from prfaas.core.planner.role_latency import RoleLatency
from prfaas.core.scheduling.role_choice import (
    ExpectedLoad,
    RoleChoice,
    RoleOutlook,
    RolePrediction,
    latencies_of,
)
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

    Rates are Λ_max of the whole deployment in requests per second, for the expected traffic and the best thresholds.
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
    """Chooses the roles with the shortest predicted TTFT, and restores Eq. 7 and 8 under overload.

    At the traffic that is expected, roles are compared by their predicted mean TTFT. Eligible are those that leave no
    stage fuller than `limit` and give away no more than `reserve` of the highest rate that others could carry. Those
    next to the present ones are looked at; with one PD cluster all. An instance of a PD cluster changes its role
    towards the best if, at `persist` evaluations in a row,
    - the TTFT with the best roles is shorter by more than `gain_now`; or by more than `gain` on average of the last
      `memory` evaluations, which noise of single samples moves little; or the present roles are short of twice the
      reserve. To take back the cluster's last conversion a gain must be twice as large;
    - the conversion itself makes the TTFT no longer;
    - the giving side is not the full one by what is measured.

    Where no roles are within the limit, or nothing is known of the rate, throughput decides:
    - the planner's best roles for the expected traffic have more instances in that role, and Λ_max would rise by
      more than `margin` with them, or they are at least two instances away and it would rise at all; the single
      conversion may not lower it;
    - what was measured says the same: the side that gets the instance is the busier one, by `lead` of utilisation
      and at least `least` busy. A full decode side is the limit however long the queue before prefill is, since
      everything comes through it; and prefill gives no instance away while the PrfaaS clusters that help it are busier
      than decode.
    Then nothing for `cool_down_s`, and never while an instance is still draining. Both roles keep at least one
    instance. Of the giving role the least busy healthy instance goes, ties by name. A data-parallel group goes as a
    whole, where no more than its ranks are wanted. Clusters where some instance has both roles at once have nothing to
    convert, and stay.
    Costs some milliseconds for two clusters, up to seconds for many (a mixed-integer programme): run it beside an
    event loop.
    """

    persist: int = 3
    cool_down_s: float = 120.0
    margin: float = 0.05
    lead: float = 0.05
    least: float = 0.3
    limit: float = 0.95
    gain: float = 0.1
    gain_now: float = 0.2
    reserve: float = 0.1
    memory: int = 20
    outlook: RoleOutlook | None = field(default=None, init=False)
    """Of the last evaluation; None while there was nothing to choose."""
    _agreed: dict[tuple[str, Role], int] = field(default_factory=dict, init=False)
    _last_s: float = field(default=float("-inf"), init=False)
    _last: dict[str, Role] = field(default_factory=dict, init=False)
    _averages: dict[tuple[tuple[str, int], ...], RolePrediction] = field(default_factory=dict, init=False)

    def lead_s(self, period_s: float, drain_s: float) -> float:
        """From an evaluation until a role that it is the first to want is there."""
        return (self.persist - 1) * period_s + drain_s

    def decide(
        self,
        loads: Sequence[PdLoad],
        problem: PlanProblem,
        now_s: float,
        expected: ExpectedLoad | None = None,
    ) -> Conversion | None:
        """One evaluation; call it periodically, with the loads since the call before.

        `problem`: the deployment now with the traffic that is expected, its PD clusters with as many instances as are
        healthy. PD clusters that it does not have are left alone. `expected`: None leaves only throughput.
        """
        self.outlook = None
        planned = {pd.name: pd.instances for pd in problem.pd}
        known = [load for load in loads if _is_divided(load) and planned.get(load.cluster) == _healthy(load)]
        if len(known) < len(planned) or _is_changing(loads):
            self._agreed.clear()
            return None
        wanted = self._sooner(known, problem, expected)
        if wanted is None:
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
        self._last[best.cluster] = best.to_role
        return best

    def _sooner(
        self, loads: Sequence[PdLoad], problem: PlanProblem, expected: ExpectedLoad | None
    ) -> dict[tuple[str, Role], Conversion] | None:
        """What would shorten the TTFT; None where throughput is to decide."""
        roles = {load.cluster: len(load.able("prefill")) for load in loads}
        self.outlook = RoleOutlook("throughput")
        if expected is None or expected.requests_per_s <= 0:
            return None
        found = latencies_of(problem, [roles, *_options(loads, roles)], expected)
        predictions = [RolePrediction.of(each) for each in found]
        quick, steady = self._chosen(predictions), self._chosen(self._averaged(predictions))
        best = quick.best or steady.best
        self.outlook = RoleOutlook(
            "throughput" if best is None else "latency",
            found[0],
            None if best is None else best.latency,
            expected.is_forecast,
        )
        if best is None:
            return None
        wanted: dict[tuple[str, Role], Conversion] = {}
        for load in loads:
            choice = quick if self._is_worth(load, quick, is_steady=False) else steady
            if choice.best is None or not self._is_worth(load, choice, is_steady=choice is steady):
                continue
            role = choice.role(load.cluster)
            if role is None or self._is_full(load, role):
                continue
            spare = _spare(load, role, choice.missing(load.cluster))
            if spare is None:
                continue
            moved = len(spare) if role == "prefill" else -len(spare)
            step = {**roles, load.cluster: roles[load.cluster] + moved}
            # One step away was looked at with the others.
            after = next(each for each in found if each.prefill == step)
            if not _is_no_worse(after, found[0]):
                continue
            wanted[load.cluster, role] = self._conversion(
                load, spare[0].name, role, problem, step, choice, expected
            )
        return wanted

    def _chosen(self, found: Sequence[RolePrediction]) -> RoleChoice:
        """Of these, the present roles first, the best."""
        now, least = found[0], min(each.utilisation for each in found)
        within = [each for each in found if each.utilisation <= min(self.limit, least / (1 - self.reserve))]
        # The present roles win ties.
        best = min(within, key=lambda each: each.ttft_s, default=None)
        is_short = now.utilisation > least / (1 - 2 * self.reserve)
        return RoleChoice(now, best, is_short)

    def _is_worth(self, load: PdLoad, choice: RoleChoice, *, is_steady: bool) -> bool:
        """Whether the gain is worth a drain in this cluster."""
        role = choice.role(load.cluster)
        if role is None:
            return False
        is_back = self._last.get(load.cluster, role) != role
        needed = (self.gain if is_steady else self.gain_now) * (2 if is_back else 1)
        if is_steady and choice.now.count < self.memory:
            return False
        return choice.is_short or choice.gain > needed

    def _averaged(self, found: Sequence[RolePrediction]) -> list[RolePrediction]:
        """Each with its average over the evaluations in which these roles were looked at."""
        known, self._averages = self._averages, {}
        for prediction in found:
            key = tuple(sorted(prediction.latency.prefill.items()))
            self._averages[key] = prediction.after(known.get(key), self.memory)
        return list(self._averages.values())

    def _conversion(
        self,
        load: PdLoad,
        instance: str,
        role: Role,
        problem: PlanProblem,
        step: Mapping[str, int],
        choice: RoleChoice,
        expected: ExpectedLoad,
    ) -> Conversion:
        now, best = choice.now, choice.best
        assert best is not None  # there was one to go to
        roles, wanted = now.latency.prefill, best.latency.prefill
        why = "forecast" if expected.is_forecast else "measured"
        reason = (
            f"mean TTFT {best.ttft_s:.3g} s in place of {now.ttft_s:.3g} s at {expected.requests_per_s:.3g} req/s "
            f"({why}): {roles[load.cluster]} prefill, best {wanted[load.cluster]}"
        )
        rates = [rate_with_roles(problem, each) for each in (roles, step, wanted)]
        return Conversion(
            load.cluster,
            instance,
            role,
            reason,
            rates[0],
            rate_after=rates[1],
            rate_best=rates[2],
        )

    def _is_full(self, load: PdLoad, role: Role) -> bool:
        """Whether the side that would give an instance to `role` is the full one by what is measured."""
        prefill = load.prefill.pressure(len(load.able("prefill")))
        decode = load.decode.pressure(len(load.able("decode")))
        return decode >= _FULL if role == "prefill" else prefill >= _FULL > decode

    def _wanted(self, loads: Sequence[PdLoad], problem: PlanProblem) -> dict[tuple[str, Role], Conversion]:
        """What planner and measurements agree on now, for throughput."""
        busier = {load.cluster: self._busier(load) for load in loads}
        if not any(busier.values()):
            return {}
        now = {load.cluster: len(load.able("prefill")) for load in loads}
        best = best_roles(problem)
        best = {load.cluster: _inside(best[load.cluster], load) for load in loads}
        if best == now:
            return {}
        before = rate_with_roles(problem, now)
        rate_best = rate_with_roles(problem, best)
        wanted: dict[tuple[str, Role], Conversion] = {}
        for load in loads:
            missing = best[load.cluster] - now[load.cluster]
            role: Role = "prefill" if missing > 0 else "decode"
            needed = _EQUAL if abs(missing) >= 2 else self.margin
            if missing == 0 or busier[load.cluster] != role or rate_best <= before * (1 + needed):
                continue
            spare = _spare(load, role, abs(missing))
            if spare is None:
                continue
            step = now[load.cluster] + (len(spare) if missing > 0 else -len(spare))
            after = rate_with_roles(problem, {**now, load.cluster: step})
            if after < before * (1 - _EQUAL):
                continue
            reason = f"{role} is the limit: {now[load.cluster]} prefill, best {best[load.cluster]}"
            wanted[load.cluster, role] = Conversion(
                load.cluster, spare[0].name, role, reason, before, rate_after=after, rate_best=rate_best
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


def _options(loads: Sequence[PdLoad], roles: Mapping[str, int]) -> list[dict[str, int]]:
    """Other roles: one instance or group away, or any where there is one PD cluster."""
    if len(loads) == 1:
        (load,) = loads
        counts = {0}
        for unit in (*_units(load, "prefill"), *_units(load, "decode")):
            counts |= {count + len(unit) for count in counts}
        return [{load.cluster: n} for n in range(1, _healthy(load)) if n in counts - {roles[load.cluster]}]
    return [
        {**roles, load.cluster: n}
        for load in loads
        for n in (
            *(roles[load.cluster] - size for size in sorted({len(unit) for unit in _units(load, "prefill")})),
            *(roles[load.cluster] + size for size in sorted({len(unit) for unit in _units(load, "decode")})),
        )
        if 1 <= n < _healthy(load)
    ]


def _is_no_worse(after: RoleLatency, now: RoleLatency) -> bool:
    if now.ttft_s == math.inf:
        return after.utilisation < now.utilisation
    return after.ttft_s <= now.ttft_s


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
