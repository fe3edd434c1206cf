"""The slow side of the roles: which PD instance should do what, and the change of one at a time."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from prfaas.core.deployment import AppliedDeployment, ControlConfig, Role
from prfaas.core.planner import PlanError
from prfaas.core.scheduling.allocation import (
    COOL_DOWN_PERIODS,
    DRAIN_CHECK_S,
    DRAIN_LIMIT_S,
    Allocator,
    DrainResult,
    RoleDrain,
)
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.scheduling.stage_utilisation import InstanceWork, StageUtilisation
from prfaas.core.workload.lengths import WorkloadError
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.part import Json, Part
from prfaas.serving.control.planning_inputs import LiveFacts
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)

_HISTORY = 20


@dataclass(slots=True)
class RoleChange:
    """One conversion of an instance."""

    instance: str
    cluster: str
    from_role: Role
    to_role: Role
    reason: str
    at_s: float
    outcome: DrainResult | Literal["draining", "handed-over"] = "draining"
    drained_s: float | None = None


class RoleChanges:
    """At most one conversion at a time.

    A converting instance gets nothing new. When its old work is done, or after 60 s, it has its new role. Old work that
    is still there then goes on beside the new. An instance that fails while it drains keeps its role. All ranks of a
    data-parallel group are converted with it.
    """

    def __init__(
        self,
        cluster_state: ClusterState,
        *,
        on_end: Callable[[RoleChange], None],
        on_begin: Callable[[str], None] = lambda _instance: None,
    ) -> None:
        """`on_begin` is called with every instance that starts to drain, `on_end` with every conversion that ends."""
        self.knows_all: Callable[[], bool] = lambda: True
        """Whether every gateway of a fleet knows of the conversion under way: then nothing more can come."""
        self.cluster_state = cluster_state
        self.clock = cluster_state.clock
        self._on_begin = on_begin
        self._on_end = on_end
        self._current: tuple[RoleChange, RoleDrain] | None = None
        self.history: deque[RoleChange] = deque(maxlen=_HISTORY)

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    @property
    def converting(self) -> tuple[str, Role] | None:
        """The instance that drains, and for which role; None if none does."""
        return None if self._current is None else (self._current[0].instance, self._current[0].to_role)

    def begin(self, instance: str, to_role: Role, reason: str) -> bool:
        """Start to convert; False if another conversion is under way, or the instance has that role or has left."""
        if instance not in self.cluster_state.names:
            return False
        view = self.cluster_state.instance(instance)
        has_role = (view.prefills, view.decodes) == (to_role == "prefill", to_role == "decode")
        if self._current is not None or has_role:
            return False
        now_s = self.clock()
        together = self.cluster_state.together(instance)
        drain = RoleDrain.begin([self.cluster_state.instance(each) for each in together], to_role, now_s)
        from_role: Role = "decode" if to_role == "prefill" else "prefill"
        change = RoleChange(
            instance=instance,
            cluster=view.cluster,
            from_role=from_role,
            to_role=to_role,
            reason=reason,
            at_s=now_s,
        )
        self._current = change, drain
        self.history.append(change)
        logger.info("%s is to %s instead of %s: %s", ", ".join(together), to_role, from_role, reason)
        for each in together:
            self._on_begin(each)
        return True

    def tick(self) -> None:
        """Conclude the conversion under way if its drain is over."""
        if self._current is None:
            return
        change, drain = self._current
        now_s = self.clock()
        if now_s - drain.since_s < DRAIN_LIMIT_S and not self.knows_all():
            return
        result = drain.conclude(now_s)
        if result is None:
            return
        self._current = None
        change.outcome, change.drained_s = result, now_s - drain.since_s
        logger.info(
            "conversion of %s to %s: %s after %.1f s",
            change.instance,
            change.to_role,
            result,
            change.drained_s,
        )
        if result != "abandoned":
            for view in drain.instances:
                self.cluster_state.set_roles(view.name, [change.to_role])
        self._on_end(change)

    def hand_over(self) -> None:
        """Another gateway sees the conversion under way through."""
        if self._current is not None:
            self._current[0].outcome, self._current = "handed-over", None

    def give_up(self, name: str) -> None:
        """An instance is not converted any more, if it is: it leaves, or an operator has given it its role."""
        if self._current is None or name not in [view.name for view in self._current[1].instances]:
            return
        change, drain = self._current
        self._current = None
        drain.end()
        change.outcome, change.drained_s = "abandoned", self.clock() - drain.since_s

    def state(self, now_s: float) -> list[dict[str, Any]]:
        """The last conversions, newest last, `age_s` instead of times."""
        return [
            {key: value for key, value in asdict(change).items() if key != "at_s"}
            | {"age_s": round(now_s - change.at_s, 3)}
            for change in self.history
        ]


def stage_utilisation(
    cluster_state: ClusterState,
    engines: Mapping[str, EngineMeter],
    pooled: Callable[[str], int],
) -> StageUtilisation:
    """The live stages: utilisation by what is open here, waiting by what engines report.

    `pooled(cluster)`: prefills that wait for any instance of a cluster, of which no engine knows yet.
    """

    def work_of(name: str) -> InstanceWork:
        view, waiting = cluster_state.instance(name), engines[name].waiting
        # An engine has one queue. Of one that does both, those wait for a decode slot that are beyond its slots.
        beyond = max(view.decoding - view.decode_slots, 0) if view.prefills else waiting
        waiting_decodes = min(waiting, beyond)
        return InstanceWork(
            busy_s=cluster_state.prefill_busy_s(name),
            decoding_s=cluster_state.decoding_s(name),
            open_prefills=cluster_state.open_prefills(name),
            waiting_prefills=waiting - waiting_decodes,
            waiting_decodes=waiting_decodes,
        )

    return StageUtilisation(cluster_state.view, work_of, pooled, cluster_state.clock())


class RoleAllocation(Part):
    """Evaluates the roles every `allocation_period_s` and sees conversions through."""

    def __init__(
        self,
        running: RunningDeployment,
        facts: LiveFacts,
        utilisation: StageUtilisation,
        window: LengthWindow,
        changes: RoleChanges,
    ) -> None:
        control = running.current.control
        self._running = running
        self._facts = facts
        self._utilisation = utilisation
        self.changes = changes
        self._clock = changes.clock
        self._window = window
        self._allocator = Allocator(cool_down_s=COOL_DOWN_PERIODS * control.allocation_period_s)
        self.paused = False
        """Whether another gateway decides. After a pause the first evaluation comes a period later."""
        self.last: dict[str, Any] = {}

    @property
    def _control(self) -> ControlConfig:
        return self._running.current.control

    def follow(self, before: AppliedDeployment, now: AppliedDeployment) -> None:
        """Roles that the file has changed. What was converted here stays, and who leaves is not converted."""
        for instance in now.leaving:
            self.changes.give_up(instance.name)
        roles = {instance.name: instance.roles for instance in before.running.instances}
        for instance in now.running.instances:
            if roles.get(instance.name, instance.roles) != instance.roles:
                self.changes.give_up(instance.name)
                self.changes.cluster_state.set_roles(instance.name, instance.roles)

    def leave(self, name: str) -> None:
        """It is not converted any more."""
        self.changes.give_up(name)

    def state(self, now_s: float) -> Json:
        """The last conversions, and the last evaluation."""
        return {"roles": {"conversions": self.changes.state(now_s), "last_evaluation": self.last}}

    async def run(self) -> None:
        """Until cancelled."""
        next_s = self._clock() + self._control.allocation_period_s
        while True:
            await asyncio.sleep(DRAIN_CHECK_S)
            self.changes.tick()
            if self.paused:
                next_s = self._clock() + self._control.allocation_period_s
            elif self._clock() >= next_s:
                next_s = self._clock() + self._control.allocation_period_s
                if self._control.allocation:
                    await self.evaluate()

    async def evaluate(self) -> None:
        """One evaluation; the planner works in a thread. At most one conversion is begun."""
        now_s = self._clock()
        loads = self._utilisation.loads(now_s)
        self.last = {
            "loads": {
                load.cluster: {"prefill": asdict(load.prefill), "decode": asdict(load.decode)}
                for load in loads
            }
        }
        self._allocator.cool_down_s = COOL_DOWN_PERIODS * self._control.allocation_period_s
        lengths, output_tokens = self._window.lengths(now_s), self._facts.output_tokens
        if lengths is None or self.changes.is_busy:
            self.last["result"] = "converting" if self.changes.is_busy else "too few requests"
            return
        try:
            problem = self._facts.problem(lengths, output_tokens)
            decide = partial(self._allocator.decide, sample_count=self._window.count(now_s))
            conversion = await asyncio.to_thread(decide, loads, problem, now_s)
        except (PlanError, WorkloadError) as error:
            self.last["result"] = str(error)
            return
        self.last |= {
            "result": "kept" if conversion is None else "conversion",
            "traffic": {"uncached_tokens": lengths.mean(), "output_tokens": output_tokens},
        }
        if conversion is not None and self.paused:
            self.last["result"] = "another gateway decides now"
        elif conversion is not None:
            self.last |= {
                "reason": conversion.reason,
                "rate_before": conversion.rate_before,
                "rate_after": conversion.rate_after,
                "rate_best": conversion.rate_best,
            }
            self.changes.begin(conversion.instance, conversion.to_role, conversion.reason)
