"""What the daemons of pools say of themselves, asked at their KV ports; and how fast their tiers are."""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.scheduling import PoolView
from prfaas.core.units import BITS_PER_BYTE
from prfaas.serving.control.cluster_state import Clock
from prfaas.serving.control.engine_monitor import EngineMeter, period_s
from prfaas.serving.control.pulse import KvPort

logger = logging.getLogger(__name__)

WANTED_S = 1.0
MOST_ASKED_PER_S = 24.0
_ANSWER_S = 2.0
# After so long without an answer a pool counts as down.
SILENCE_S = 5.0
# Smaller loads say little of a tier's bandwidth.
_LEAST_LOADED_BYTES = 1 << 20
_LEAST_PROMOTED_BYTES = 16 << 20
_LEAST_BITS_PER_S = 1e6

TIERS = ("memory", "ssd")


@dataclass(frozen=True, slots=True)
class PoolReading:
    """A daemon's figures at one moment. Totals are since its start; what it does not say is 0."""

    at_s: float
    parts: Mapping[str, Mapping[str, Any]]
    """As `LatestFigures` makes them: `store`, `copies`, `events`."""

    def number(self, part: str, name: str) -> float:
        """One figure."""
        return _number(self.parts.get(part, {}).get(name))

    def pages(self, tier: str) -> dict[str, int]:
        """KV group → pages that a tier holds."""
        told = self.parts.get("store", {}).get(f"{tier}_pages")
        return (
            {str(group): int(_number(count)) for group, count in told.items()}
            if isinstance(told, dict)
            else {}
        )


class PoolMonitor:
    """Asks every pool for its figures once a second. What is known of a silent one stays, with its age."""

    def __init__(
        self,
        deployment: Deployment,
        ports: Mapping[str, KvPort],
        pools: Mapping[str, PoolView],
        *,
        clock: Clock,
    ) -> None:
        """Nobody is asked before `run`.

        Args:
            deployment: whose pools.
            ports: how each pool's KV port is asked, by name; whoever made them closes them.
            pools: what policies see of them; they get the bandwidths that engines and daemons measure.
            clock: seconds that never go back.
        """
        self._ports = ports
        self._views = pools
        self._promoted: dict[str, tuple[float, float]] = {}
        self._pool_of: dict[str, PoolView] = {}
        self.adopt(deployment)
        self._clock = clock
        self._newest: dict[str, PoolReading] = {}
        self.period_s = period_s(WANTED_S, len(self.nodes), MOST_ASKED_PER_S)
        self.failures = 0

    def adopt(self, deployment: Deployment) -> None:
        """The pools have these engines from now on; they are the same pools."""
        self.nodes = deployment.pools
        for node in self.nodes:
            self._views[node.name].instances = node.instances
        self._pool_of = {name: self._views[node.name] for node in self.nodes for name in node.instances}

    async def run(self) -> None:
        """Until cancelled."""
        while self.nodes:
            await asyncio.gather(*(self.ask(node.name) for node in self.nodes), asyncio.sleep(self.period_s))

    async def ask(self, name: str) -> None:
        """One look at one pool; without an answer nothing changes."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._ports[name].stats()
            told = answer.get("pool")
            parts = (
                {str(part): dict(figures) for part, figures in told.items()} if isinstance(told, dict) else {}
            )
        except (OSError, TimeoutError, TypeError, ValueError, AttributeError) as error:
            logger.debug("pool %s does not say what it holds: %s", name, error)
            self.failures += 1
            return
        self._newest[name] = reading = PoolReading(self._clock(), parts)
        self._learn_ssd(name, reading)

    def newest(self, name: str) -> PoolReading | None:
        """The last figures of a pool; None as long as it has not answered."""
        return self._newest.get(name)

    def _learn_ssd(self, name: str, reading: PoolReading) -> None:
        """Take how fast pages came from SSD since enough of them had come for the bandwidth of that tier."""
        told = (reading.number("store", "ssd_promoted_bytes"), reading.number("store", "ssd_promoting_s"))
        before = self._promoted.setdefault(name, told)
        promoted_bytes, took_s = told[0] - before[0], told[1] - before[1]
        if promoted_bytes < 0 or took_s < 0:
            # Another daemon.
            self._promoted[name] = told
        elif promoted_bytes >= _LEAST_PROMOTED_BYTES and took_s > 0:
            self._promoted[name] = told
            self._views[name].ssd_bits_per_s = max(BITS_PER_BYTE * promoted_bytes / took_s, _LEAST_BITS_PER_S)

    def learn(self, instance: Instance, meter: EngineMeter) -> None:
        """Take the bandwidth of an engine's loads of the last minute for that of its pool's memory."""
        pool = self._pool_of.get(instance.name)
        if pool is None or meter.pool_loaded_bytes < _LEAST_LOADED_BYTES or not meter.pool_load_bytes_per_s:
            return
        # Ranks load at the same time, and each counts its own seconds.
        measured = BITS_PER_BYTE * meter.pool_load_bytes_per_s * instance.tensor_parallel
        pool.memory_bits_per_s = max(measured, _LEAST_BITS_PER_S)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
