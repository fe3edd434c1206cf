"""The slow side of the roles: which PD instance should do what, and the change of one at a time.

Changing an instance's role without losing or slowing a request: drain, then relabel.

How busy the instances were between two evaluations of the roles.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prfaas.core.deployment import ControlConfig, Deployment, Role
from prfaas.core.planner import PlanError
from prfaas.core.scheduling import InstanceView
from prfaas.core.scheduling.allocation import Allocator, PdInstance, PdLoad, StageLoad
from prfaas.core.scheduling.threshold import LengthWindow
from prfaas.core.workload import WorkloadError
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.engine_metrics import EngineMeter
from prfaas.serving.control.planning_inputs import LiveFacts

logger = logging.getLogger(__name__)

DRAIN_LIMIT_S = 60.0
_HISTORY = 20


@dataclass(slots=True)
class RoleChange:
    """One conversion. `outcome`: draining, done, done-with-old-work (the drain took too long; both kinds of work
    are there for a while) or abandoned (the instance failed meanwhile)."""

    instance: str
    cluster: str
    from_role: Role
    to_role: Role
    reason: str
    at_s: float
    outcome: str = "draining"
    drained_s: float | None = None


class RoleChanges:
    """At most one conversion at a time.

    A converting instance gets nothing new. When its old work is done, or after 60 s, it has its new role; work that
    is still there then goes on to its end beside the new. An instance that fails while it drains keeps its role.
    """

    def __init__(
        self,
        board: ClusterState,
        *,
        clock: Clock,
        on_end: Callable[[RoleChange], None],
        on_begin: Callable[[str], None] = lambda _instance: None,
    ) -> None:
        """`on_begin` is told of every instance that gets nothing new any more, `on_end` of every conversion that
        ends, however."""
        self._board = board
        self._clock = clock
        self._on_begin = on_begin
        self._on_end = on_end
        self._current: RoleChange | None = None
        self.history: deque[RoleChange] = deque(maxlen=_HISTORY)

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    def begin(self, instance: str, to_role: Role, reason: str) -> bool:
        """Start to convert; False if another conversion is under way or the instance has that role already."""
        view = self._board.instance(instance)
        has_role = (view.prefills, view.decodes) == (to_role == "prefill", to_role == "decode")
        if self._current is not None or has_role:
            return False
        view.draining = True
        from_role: Role = "decode" if to_role == "prefill" else "prefill"
        self._current = RoleChange(instance, view.cluster, from_role, to_role, reason, self._clock())
        self.history.append(self._current)
        logger.info("%s is to %s instead of %s: %s", instance, to_role, from_role, reason)
        self._on_begin(instance)
        return True

    def tick(self) -> None:
        """Look whether the conversion under way can be concluded."""
        change = self._current
        if change is None:
            return
        view = self._board.instance(change.instance)
        waited_s = self._clock() - change.at_s
        if not view.healthy:
            self._conclude(change, "abandoned", waited_s)
        elif view.in_flight == 0:
            self._conclude(change, "done", waited_s)
        elif waited_s >= DRAIN_LIMIT_S:
            self._conclude(change, "done-with-old-work", waited_s)

    def state(self, now_s: float) -> list[dict[str, Any]]:
        """The last conversions, newest last, `age_s` instead of times."""
        return [
            {key: value for key, value in asdict(change).items() if key != "at_s"}
            | {"age_s": round(now_s - change.at_s, 3)}
            for change in self.history
        ]

    def _conclude(self, change: RoleChange, outcome: str, waited_s: float) -> None:
        change.outcome, change.drained_s = outcome, waited_s
        self._current = None
        self._board.instance(change.instance).draining = False
        logger.info(
            "conversion of %s to %s: %s after %.1f s", change.instance, change.to_role, outcome, waited_s
        )
        if outcome != "abandoned":
            self._board.set_role(change.instance, change.to_role)
        self._on_end(change)


class StageUtilisation:
    """Loads since the last call of `loads`. Utilisation is by what is open here, waiting by what engines say."""

    def __init__(
        self,
        deployment: Deployment,
        board: ClusterState,
        engines: Mapping[str, EngineMeter],
        *,
        clock: Clock,
        pooled: Callable[[str], int] = lambda _cluster: 0,
    ) -> None:
        """`pooled(cluster)`: prefills that wait for any instance of a cluster and that no engine knows of yet."""
        self._deployment = deployment
        self._board = board
        self._engines = engines
        self._clock = clock
        self._pooled = pooled
        self._since_s = clock()
        self._busy_s = dict.fromkeys(board.names, 0.0)
        self._decoding_s = dict.fromkeys(board.names, 0.0)
        self._prefill_share = dict.fromkeys(board.names, 0.0)
        self._decoding = dict.fromkeys(board.names, 0.0)

    def loads(self) -> list[PdLoad]:
        """Every PD cluster with a healthy instance, as busy as it was since the last call."""
        self._advance()
        clusters = self._board.view.clusters
        loads = []
        for cluster in self._deployment.pd_clusters:
            instances = clusters[cluster.name].instances
            if not any(instance.healthy for instance in instances):
                continue
            remote = [
                instance
                for (source, target), link in self._board.view.links.items()
                if target == cluster.name and link.up and clusters[source].kind == "prfaas"
                for instance in clusters[source].instances
                if instance.healthy and instance.prefills
            ]
            loads.append(
                PdLoad(
                    cluster.name,
                    tuple(self._instance(instance) for instance in instances),
                    self._prefill(i for i in instances if i.healthy and i.prefills),
                    self._decode(i for i in instances if i.healthy and i.decodes),
                    self._prefill(remote) if remote else None,
                    len(remote),
                )
            )
        return loads

    def _advance(self) -> None:
        now_s = self._clock()
        elapsed_s = max(now_s - self._since_s, 1e-9)
        self._since_s = now_s
        for name in self._board.names:
            busy_s, decoding_s = self._board.prefill_busy_s(name), self._board.decoding_s(name)
            self._prefill_share[name] = (busy_s - self._busy_s[name]) / elapsed_s
            self._decoding[name] = (decoding_s - self._decoding_s[name]) / elapsed_s
            self._busy_s[name], self._decoding_s[name] = busy_s, decoding_s

    def _prefill(self, instances: Iterable[InstanceView]) -> StageLoad:
        some = list(instances)
        names = [instance.name for instance in some]
        pooled = sum(self._pooled(cluster) for cluster in {instance.cluster for instance in some})
        share = sum(self._prefill_share[name] for name in names) / max(len(names), 1)
        return StageLoad(share, self._waiting(names) + pooled)

    def _decode(self, instances: Iterable[InstanceView]) -> StageLoad:
        some = list(instances)
        slots = sum(instance.decode_slots for instance in some)
        batch = sum(self._decoding[instance.name] for instance in some)
        return StageLoad(batch / max(slots, 1), self._waiting([instance.name for instance in some]))

    def _waiting(self, names: Iterable[str]) -> float:
        return sum(self._engines[name].waiting for name in names)

    def _instance(self, view: InstanceView) -> PdInstance:
        busy = float(self._board.prefill_waiting(view.name) if view.prefills else view.decoding)
        return PdInstance(view.name, view.prefills, view.decodes, view.healthy, view.draining, busy)


_TICK_S = 0.25
# After a conversion the queues need this many evaluations to show what it did.
_COOL_DOWN_PERIODS = 2


class RoleAllocation:
    """Evaluates the roles every `allocation_period_s` and sees conversions through."""

    def __init__(
        self,
        config: ControlConfig,
        facts: LiveFacts,
        usage: StageUtilisation,
        window: LengthWindow,
        changes: RoleChanges,
        *,
        clock: Clock,
    ) -> None:
        self._config = config
        self._facts = facts
        self._usage = usage
        self._window = window
        self._changes = changes
        self._clock = clock
        self._allocator = Allocator(cool_down_s=_COOL_DOWN_PERIODS * config.allocation_period_s)
        self.last: dict[str, Any] = {}

    async def run(self) -> None:
        """Until cancelled."""
        next_s = self._clock() + self._config.allocation_period_s
        while True:
            await asyncio.sleep(_TICK_S)
            self._changes.tick()
            if self._clock() >= next_s:
                next_s = self._clock() + self._config.allocation_period_s
                if self._config.allocation:
                    await self.evaluate()

    async def evaluate(self) -> None:
        """One evaluation; the planner works in a thread. At most one conversion is begun."""
        now_s = self._clock()
        loads = self._usage.loads()
        self.last = {
            "loads": {
                load.cluster: {"prefill": asdict(load.prefill), "decode": asdict(load.decode)}
                for load in loads
            }
        }
        lengths = self._window.lengths(now_s)
        if lengths is None or self._changes.is_busy:
            self.last["result"] = "converting" if self._changes.is_busy else "too few requests"
            return
        try:
            problem = self._facts.problem(lengths)
            conversion = await asyncio.to_thread(self._allocator.decide, loads, problem, now_s)
        except (PlanError, WorkloadError) as error:
            self.last["result"] = str(error)
            return
        self.last["result"] = "kept" if conversion is None else "conversion"
        if conversion is not None:
            self.last |= {
                "rate_before": conversion.rate_before,
                "rate_after": conversion.rate_after,
                "rate_best": conversion.rate_best,
            }
            self._changes.begin(conversion.instance, conversion.to_role, conversion.reason)
