"""Health of instances: suspicion from failed requests, from probes, and from silence."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any

from prfaas.core.deployment import Instance
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.engine_liveness import EngineLiveness
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.members import Members
from prfaas.serving.control.part import Json, Part
from prfaas.serving.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

LOOK_S = 0.2
# A way is asked so often before its silence counts; at least every second.
_ASKED_IN_SILENCE = 4
_ASK_S = 1.0
# An engine that has just failed a request may still answer its /health.
SUSPECT_AT_LEAST_S = 3.0


class _Kind(Enum):
    FAILED = "failed"
    FROZEN = "frozen"
    DEAD = "dead"


@dataclass(slots=True)
class _Suspicion:
    kind: _Kind
    reason: str
    until_s: float
    """Not back in routing before."""
    frozen_s: float = 0.0
    """When it was judged frozen, by the loop's clock."""
    answers: bool = False
    """Of a dead one: it has answered again."""
    is_mute: bool = False
    """Of a dead one: it has not answered since, and what hung at its server has been ended."""

    @property
    def ends_calls(self) -> bool:
        """What is open there is ended, and so is what comes."""
        return self.kind is _Kind.FROZEN or self.is_mute


class HealthWatch(Part):
    """The one judge of who is in routing. It says three things of an instance that is not.

    - Failed: a request went wrong there. A good /health brings it back, 3 s later at the earliest.
    - Dead: it refused or reset a connection, or its /health says so. Its cache is gone. The same brings it back.
    - Frozen: a way to it has not answered for `control.silence_s`, or it gets on with none of its running requests for
      `control.stall_s`. It keeps its cache. What is open there is ended (`Listeners.frozen`). It is back once every way
      has answered again. Where one rank of a data-parallel group is frozen or dead, the others are frozen: none gets on
      without it.
    """

    def __init__(
        self,
        members: Members,
        cluster_state: ClusterState,
        listeners: Listeners,
        *,
        loop_clock: Clock,
        stuck_s: Callable[[str], float],
    ) -> None:
        """Everybody is in routing at first.

        Args:
            members: how instances are asked, and the limits of their silence.
            cluster_state: whose instances become healthy or not.
            listeners: are told who is frozen, who has lost its cache, and who is in routing now.
            loop_clock: seconds that never go back, less the time in which the event loop was late.
            stuck_s: for how long an instance has had running requests and made no progress.
        """
        self._running = members.running
        self._kv_ports = members.kv_ports
        self._cluster_state = cluster_state
        self._clock = cluster_state.clock
        self._listeners = listeners
        self._loop_clock = loop_clock
        self._stuck_s = stuck_s
        self._suspects: dict[str, _Suspicion] = {}
        self.liveness = EngineLiveness(
            members.http, ask_s=self._ask_s, clock=loop_clock, on_health=self._probed
        )
        for instance in members.running.current.instances:
            self.liveness.join(instance, self._kv_ports.get(instance.name, ()))

    def _ask_s(self) -> float:
        return min(_ASK_S, self._running.current.control.silence_s / _ASKED_IN_SILENCE)

    def join(self, instance: Instance) -> None:
        """Watch an instance too, which is out of routing until it answers."""
        self.liveness.join(instance, self._kv_ports.get(instance.name, ()))
        self._suspects[instance.name] = _Suspicion(
            _Kind.FAILED, "it has joined and has not answered yet", 0.0
        )

    def leave(self, name: str) -> None:
        """Watch an instance no longer."""
        self.liveness.leave(name)
        gone = self._suspects.pop(name, None)
        if gone is not None and gone.ends_calls:
            # Its name, or its address, may be another engine's next.
            self._listeners.frozen.tell(name, None)

    def state_of(self, name: str, _now_s: float) -> Json:
        """Why an instance is out of routing."""
        return {"suspicion": self.reason(name)} if name in self._cluster_state.names else {}

    def suspect(self, name: str, reason: str, *, lost_cache: bool = False) -> None:
        """A request or a probe failed at `name`; nothing happens where it has left."""
        if name not in self._cluster_state.names:
            return
        before = self._suspects.get(name)
        if lost_cache or (before is not None and before.kind is _Kind.DEAD):
            self._accuse(name, _Suspicion(_Kind.DEAD, reason, self._clock() + SUSPECT_AT_LEAST_S))
        elif before is None or before.kind is _Kind.FAILED:
            self._accuse(name, _Suspicion(_Kind.FAILED, reason, self._clock() + SUSPECT_AT_LEAST_S))
        if lost_cache:
            self._listeners.lost_cache.tell(name)

    def is_suspect(self, name: str) -> bool:
        """Out of routing."""
        return name in self._suspects

    def has_failed(self, name: str) -> bool:
        """Out of routing for a request that failed while the engine lived and answered."""
        suspicion = self._suspects.get(name)
        return suspicion is not None and suspicion.kind is _Kind.FAILED

    def reason(self, name: str) -> str | None:
        """Why an instance is out of routing; None if it isn't."""
        suspicion = self._suspects.get(name)
        return suspicion.reason if suspicion is not None else None

    async def run(self) -> None:
        """Until cancelled."""
        asked = BackgroundTasks()
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                for question in self.due():
                    asked.start(question)
                self.judge()
        finally:
            await asked.cancel()

    def due(self) -> list[Coroutine[Any, Any, None]]:
        """The questions that are to be asked now: suspects again and again, the others where nothing is heard."""
        return self.liveness.due(self._cluster_state.names, self.is_suspect)

    def judge(self) -> None:
        """Take the silent and the stuck out of routing, and those back in that answer again."""
        for name in self._cluster_state.names:
            trouble = self._trouble(name)
            suspicion = self._suspects.get(name)
            if trouble is not None and (suspicion is None or suspicion.kind is _Kind.FAILED):
                self._accuse(name, _Suspicion(_Kind.FROZEN, trouble, 0.0, self._loop_clock()))
            elif suspicion is None:
                continue
            elif suspicion.kind is _Kind.DEAD:
                self._end_calls(name, suspicion)
            elif (
                trouble is None
                and suspicion.kind is _Kind.FROZEN
                and self.liveness.heard_since(name, suspicion.frozen_s)
            ):
                self._acquit(name)

    def _end_calls(self, name: str, suspicion: _Suspicion) -> None:
        """End what hangs at a dead one: a server that ends waits for its connections, and vLLM's lost its engine."""
        if not suspicion.answers and not suspicion.is_mute and self._clock() >= suspicion.until_s:
            suspicion.is_mute = True
            self._listeners.frozen.tell(name, f"gone: {suspicion.reason}")

    def _trouble(self, name: str) -> str | None:
        own = self._own_trouble(name)
        for rank in () if own is not None else self._cluster_state.together(name):
            suspicion = self._suspects.get(rank)
            if rank == name:
                continue
            if suspicion is not None and suspicion.kind is _Kind.DEAD and not suspicion.answers:
                return f"frozen: {rank}, a rank of its group, has ended"
            trouble = self._own_trouble(rank)
            if trouble is not None:
                return f"frozen with a rank of its group; {rank} is {trouble}"
        return own

    def _own_trouble(self, name: str) -> str | None:
        limits = self._running.current.control
        silent = self.liveness.silence(name, limits.silence_s)
        if silent is not None:
            return f"frozen: its {silent} has not answered for {limits.silence_s:g} s"
        if self._stuck_s(name) > limits.stall_s:
            return f"stalled: its running requests have made no progress for {limits.stall_s:g} s"
        return None

    def _probed(self, name: str, healthy: bool) -> None:
        """Its HTTP server has answered /health, or its HTTP port refused."""
        suspicion = self._suspects.get(name)
        if not healthy:
            if suspicion is None or suspicion.kind is not _Kind.DEAD:
                self.suspect(name, "its /health failed", lost_cache=True)
            else:
                suspicion.answers = False
        elif suspicion is not None and suspicion.kind is not _Kind.FROZEN:
            suspicion.answers = True
            if self._clock() >= suspicion.until_s and self._trouble(name) is None:
                self._acquit(name)

    def _accuse(self, name: str, suspicion: _Suspicion) -> None:
        before, self._suspects[name] = self._suspects.get(name), suspicion
        self._cluster_state.instance(name).healthy = False
        if before is None:
            logger.warning("%s is out of routing until it answers: %s", name, suspicion.reason)
            self._listeners.healthy.tell(name, False)
        if suspicion.kind is _Kind.FROZEN:
            self._listeners.frozen.tell(name, suspicion.reason)
        elif before is not None and before.ends_calls:
            self._listeners.frozen.tell(name, None)

    def _acquit(self, name: str) -> None:
        suspicion = self._suspects.pop(name)
        self._cluster_state.instance(name).healthy = True
        logger.info("%s answers again", name)
        if suspicion.ends_calls:
            self._listeners.frozen.tell(name, None)
        self._listeners.healthy.tell(name, True)
