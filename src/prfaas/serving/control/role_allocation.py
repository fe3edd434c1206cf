"""The slow side of the roles: which PD instance should do what, and the change of one at a time."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prfaas.core.deployment import ControlConfig, Role
from prfaas.core.planner import PlanError
from prfaas.core.planner.role_latency import QueueingModel, RoleLatency
from prfaas.core.scheduling.allocation import (
    COOL_DOWN_PERIODS,
    DRAIN_CHECK_S,
    DRAIN_LIMIT_S,
    Allocator,
    DrainResult,
    RoleDrain,
)
from prfaas.core.scheduling.forecast import Outlook, foresight_of
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.scheduling.policy import Policy
from prfaas.core.scheduling.role_choice import ExpectedLoad, RoleOutlook
from prfaas.core.scheduling.stage_utilisation import InstanceWork, StageUtilisation
from prfaas.core.workload import WorkloadError
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter
from prfaas.serving.control.guarded_policy import prefills_shortest_first
from prfaas.serving.control.planning_inputs import OUTPUT_AGE_S, LiveFacts

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
    is still there then goes on beside the new. An instance that fails while it drains keeps its role.
    """

    def __init__(
        self,
        cluster_state: ClusterState,
        *,
        clock: Clock,
        on_end: Callable[[RoleChange], None],
        on_begin: Callable[[str], None] = lambda _instance: None,
    ) -> None:
        """`on_begin` is called with every instance that starts to drain, `on_end` with every conversion that ends."""
        self.knows_all: Callable[[], bool] = lambda: True
        """Whether every gateway of a fleet knows of the conversion under way: then nothing more can come."""
        self._cluster_state = cluster_state
        self._clock = clock
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

    @property
    def drain_s(self) -> float:
        """How long the last drain took; the longest that is waited for before the first."""
        drains = [change.drained_s for change in self.history if change.drained_s is not None]
        return drains[-1] if drains else DRAIN_LIMIT_S

    def begin(self, instance: str, to_role: Role, reason: str) -> bool:
        """Start to convert; False if another conversion is under way, or the instance has that role or has left."""
        if instance not in self._cluster_state.names:
            return False
        view = self._cluster_state.instance(instance)
        has_role = (view.prefills, view.decodes) == (to_role == "prefill", to_role == "decode")
        if self._current is not None or has_role:
            return False
        now_s = self._clock()
        drain = RoleDrain.begin(view, to_role, now_s)
        from_role: Role = "decode" if to_role == "prefill" else "prefill"
        change = RoleChange(instance, view.cluster, from_role, to_role, reason, now_s)
        self._current = change, drain
        self.history.append(change)
        logger.info("%s is to %s instead of %s: %s", instance, to_role, from_role, reason)
        self._on_begin(instance)
        return True

    def tick(self) -> None:
        """Conclude the conversion under way if its drain is over."""
        if self._current is None:
            return
        change, drain = self._current
        now_s = self._clock()
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
            self._cluster_state.set_role(change.instance, change.to_role)
        self._on_end(change)

    def hand_over(self) -> None:
        """Another gateway sees the conversion under way through."""
        if self._current is not None:
            self._current[0].outcome, self._current = "handed-over", None

    def give_up(self, name: str) -> None:
        """An instance is not converted any more, if it is: it leaves, or an operator has given it its role."""
        if self._current is None or self._current[0].instance != name:
            return
        change, drain = self._current
        self._current = None
        drain.instance.draining = False
        change.outcome, change.drained_s = "abandoned", self._clock() - drain.since_s

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
    clock: Clock,
) -> StageUtilisation:
    """The live stages: utilisation by what is open here, waiting by what engines report.

    `pooled(cluster)`: prefills that wait for any instance of a cluster, of which no engine knows yet.
    """

    def work_of(name: str) -> InstanceWork:
        waiting = engines[name].waiting
        return InstanceWork(
            busy_s=cluster_state.prefill_busy_s(name),
            decoding_s=cluster_state.decoding_s(name),
            open_prefills=cluster_state.open_prefills(name),
            waiting_prefills=waiting,
            waiting_decodes=waiting,
        )

    return StageUtilisation(cluster_state.view, work_of, pooled, clock())


class RoleAllocation:
    """Evaluates the roles every `allocation_period_s` and sees conversions through."""

    def __init__(
        self,
        config: ControlConfig,
        facts: LiveFacts,
        utilisation: StageUtilisation,
        window: LengthWindow,
        changes: RoleChanges,
        *,
        clock: Clock,
        policy: Policy,
    ) -> None:
        """`policy`: the one that routes; it is asked in which order prefills wait."""
        self._config = config
        self._facts = facts
        self._utilisation = utilisation
        self._changes = changes
        self._clock = clock
        self._policy = policy
        self._outlook = Outlook(window, foresight_of(config.forecast_period_s))
        self._allocator = Allocator(cool_down_s=COOL_DOWN_PERIODS * config.allocation_period_s)
        self.paused = False
        """Whether another gateway decides. After a pause the first evaluation comes a period later."""
        self.last: dict[str, Any] = {}

    def adopt(self, config: ControlConfig, policy: Policy) -> None:
        """Evaluate as this file says from now on."""
        self._config, self._policy = config, policy
        self._allocator.cool_down_s = COOL_DOWN_PERIODS * config.allocation_period_s

    async def run(self) -> None:
        """Until cancelled."""
        next_s = self._clock() + self._config.allocation_period_s
        while True:
            await asyncio.sleep(DRAIN_CHECK_S)
            self._changes.tick()
            if self.paused:
                next_s = self._clock() + self._config.allocation_period_s
            elif self._clock() >= next_s:
                next_s = self._clock() + self._config.allocation_period_s
                if self._config.allocation:
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
        period_s = self._config.allocation_period_s
        expected = self._outlook.expect(
            self._facts.output_tokens,
            OUTPUT_AGE_S,
            now_s,
            self._allocator.lead_s(period_s, self._changes.drain_s),
        )
        if expected is None or self._changes.is_busy:
            self.last["result"] = "converting" if self._changes.is_busy else "too few requests"
            return
        means = expected.means
        # Asked anew each time: at the start hardly any instance is there.
        queues = QueueingModel(prefills_shortest_first(self._policy, self._facts.view))
        load = ExpectedLoad(means.requests_per_s, queues, expected.is_forecast)
        try:
            problem = self._facts.problem(expected.lengths, means.output_tokens)
            conversion = await asyncio.to_thread(self._allocator.decide, loads, problem, now_s, load)
        except (PlanError, WorkloadError) as error:
            self.last["result"] = str(error)
            return
        self.last |= {
            "result": "kept" if conversion is None else "conversion",
            "expected": asdict(means) | {"is_forecast": expected.is_forecast},
            "predicted": _told(self._allocator.outlook),
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
            self._changes.begin(conversion.instance, conversion.to_role, conversion.reason)


def _told(outlook: RoleOutlook | None) -> dict[str, Any] | None:
    """What was predicted, for JSON."""
    if outlook is None:
        return None
    return {
        "aim": outlook.aim,
        "now": None if outlook.now is None else _latency(outlook.now),
        "best": None if outlook.best is None else _latency(outlook.best),
    }


def _latency(found: RoleLatency) -> dict[str, Any]:
    """Times in seconds; None where they are infinite."""
    times = {
        "ttft_s": found.ttft_s,
        "prefill_wait_s": found.prefill_wait_s,
        "decode_wait_s": found.decode_wait_s,
        "utilisation": found.utilisation,
    }
    finite = {name: value if math.isfinite(value) else None for name, value in times.items()}
    return {"prefill_instances": dict(found.prefill)} | finite
