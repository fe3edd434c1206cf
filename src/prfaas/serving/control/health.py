"""Which instances answer: suspicion from failed requests, and probes of /health."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.core.deployment import Deployment
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.engine_monitor import EngineAccess

logger = logging.getLogger(__name__)

PROBE_SUSPECT_S = 1.0
PROBE_HEALTHY_S = 5.0
PROBE_TIMEOUT_S = 2.0
# An engine that has just failed a request may still answer its /health.
SUSPECT_AT_LEAST_S = 3.0


@dataclass(slots=True)
class _Suspicion:
    until_s: float
    reason: str
    dead: bool


class HealthWatch:
    """An instance that failed leaves routing at once. A good probe brings it back, 3 s later at the earliest.

    Suspects are probed every second, the others every five. A probe without an answer in time changes nothing, since
    the engine may be busy. One that is refused, or answered with an error, makes the instance a suspect.
    """

    def __init__(
        self,
        deployment: Deployment,
        http: EngineAccess,
        cluster_state: ClusterState,
        *,
        clock: Clock,
        on_lost_cache: Callable[[str], None],
        on_change: Callable[[str, bool], None],
    ) -> None:
        """`on_lost_cache(name)`: the engine died or was restarted, so its cache is gone.
        `on_change(name, healthy)`: it left routing or came back."""
        self._instances = {instance.name: instance for instance in deployment.instances}
        self._http = http
        self._cluster_state = cluster_state
        self._clock = clock
        self._on_lost_cache = on_lost_cache
        self._on_change = on_change
        self._suspects: dict[str, _Suspicion] = {}
        self._next_s = dict.fromkeys(self._instances, clock() + PROBE_HEALTHY_S)

    def suspect(self, name: str, reason: str, *, lost_cache: bool = False) -> None:
        """A request or a probe failed at `name`."""
        now_s = self._clock()
        before = self._suspects.get(name)
        dead = lost_cache or (before is not None and before.dead)
        self._suspects[name] = _Suspicion(now_s + SUSPECT_AT_LEAST_S, reason, dead)
        self._cluster_state.instance(name).healthy = False
        if lost_cache:
            self._on_lost_cache(name)
        if before is None:
            logger.warning("%s is out of routing until /health answers: %s", name, reason)
            self._on_change(name, False)

    def is_suspect(self, name: str) -> bool:
        """Out of routing."""
        return name in self._suspects

    def is_dead(self, name: str) -> bool:
        """Out of routing, and not for a request that failed while the engine lived."""
        suspicion = self._suspects.get(name)
        return suspicion is not None and suspicion.dead

    def reason(self, name: str) -> str | None:
        """Why an instance is out of routing; None if it isn't."""
        suspicion = self._suspects.get(name)
        return suspicion.reason if suspicion is not None else None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PROBE_SUSPECT_S)
            await self.probe_due()

    async def probe_due(self) -> None:
        """Probe the instances that are due."""
        now_s = self._clock()
        due = [name for name, next_s in self._next_s.items() if name in self._suspects or now_s >= next_s]
        for name in due:
            self._next_s[name] = now_s + PROBE_HEALTHY_S
        await asyncio.gather(*(self._probe(name) for name in due))

    async def _probe(self, name: str) -> None:
        healthy = await self._http.is_healthy(self._instances[name], PROBE_TIMEOUT_S)
        suspicion = self._suspects.get(name)
        if healthy is False and suspicion is None:
            self.suspect(name, "its /health failed", lost_cache=True)
        elif healthy and suspicion is not None and self._clock() >= suspicion.until_s:
            del self._suspects[name]
            self._cluster_state.instance(name).healthy = True
            logger.info("%s answers again", name)
            self._on_change(name, True)
