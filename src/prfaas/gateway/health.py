"""Which instances answer: a probe loop over /health, and suspicion from failed requests."""

import asyncio
import logging

from prfaas.deployment import Instance
from prfaas.gateway.engine_client import EngineClient
from prfaas.gateway.instances import InstancePool
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.options import GatewayOptions
from prfaas.gateway.prefixes import Prefixes

logger = logging.getLogger(__name__)


class HealthWatch:
    """Keeps the pool's suspicion up to date. Suspects are probed every second, the others more rarely."""

    def __init__(
        self,
        pool: InstancePool,
        client: EngineClient,
        prefixes: Prefixes,
        metrics: Metrics,
        options: GatewayOptions,
    ) -> None:
        self._pool = pool
        self._client = client
        self._prefixes = prefixes
        self._metrics = metrics
        self._options = options
        for instance in pool:
            metrics.instance_up.labels(instance.name).set(1)

    def suspect(self, name: str, reason: str, *, lost_cache: bool = False) -> None:
        """A request failed at `name`. `lost_cache`: the engine died or restarted, so its prefixes are
        gone."""
        if not self._pool.is_suspect(name):
            logger.warning("%s is out of routing until /health answers: %s", name, reason)
        now_s = asyncio.get_running_loop().time()
        self._pool.suspect(name, now_s + self._options.suspect_s)
        self._metrics.instance_up.labels(name).set(0)
        if lost_cache:
            self._prefixes.forget(name)

    async def run(self) -> None:
        """Probe until cancelled."""
        loop = asyncio.get_running_loop()
        next_s = {
            instance.name: loop.time() + self._options.probe_healthy_interval_s for instance in self._pool
        }
        while True:
            await asyncio.sleep(self._options.probe_interval_s)
            due = [i for i in self._pool if self._pool.is_suspect(i.name) or loop.time() >= next_s[i.name]]
            await asyncio.gather(*(self._probe(instance) for instance in due))
            for instance in due:
                next_s[instance.name] = loop.time() + self._options.probe_healthy_interval_s

    async def _probe(self, instance: Instance) -> None:
        healthy = await self._client.is_healthy(instance, self._options.probe_timeout_s)
        if healthy:
            if self._pool.absolve(instance.name, asyncio.get_running_loop().time()):
                logger.info("%s answers again", instance.name)
                self._metrics.instance_up.labels(instance.name).set(1)
        elif healthy is False and not self._pool.is_suspect(instance.name):
            self.suspect(instance.name, "its /health failed", lost_cache=True)
