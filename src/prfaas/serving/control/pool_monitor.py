"""Telemetry of pools: their daemons' STATS, and the bandwidth of their tiers."""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.core.deployment import Instance, PoolNode
from prfaas.core.scheduling import PoolView
from prfaas.core.units import BITS_PER_BYTE
from prfaas.serving.control.cluster_state import Clock
from prfaas.serving.control.engine_monitor import EngineMeter, period_s
from prfaas.serving.control.metrics import POOL_BYTES, POOL_LOSSES, TIERS, ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.observer import Observer

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


class PoolMonitor(Part):
    """Asks every pool for its figures once a second. What is known of a silent one stays, with its age."""

    def __init__(
        self,
        running: RunningDeployment,
        ports: Mapping[str, Observer],
        pools: Mapping[str, PoolView],
        meters: Mapping[str, EngineMeter],
        *,
        clock: Clock,
    ) -> None:
        """Nobody is asked before `run`.

        Args:
            running: whose pools. They stay the same, and may get other engines.
            ports: how each pool's KV port is asked, by name; whoever made them closes them.
            pools: what policies see of them; they get the bandwidths that engines and daemons measure.
            meters: of the engines, by instance.
            clock: seconds that never go back.
        """
        self._meters = meters
        self._running = running
        self._ports = ports
        self._views = pools
        self._promoted: dict[str, tuple[float, float]] = {}
        self._clock = clock
        self._newest: dict[str, PoolReading] = {}
        self.failures = self._counted = 0

    async def run(self) -> None:
        """Until cancelled."""
        while nodes := self._running.current.pools:
            pause_s = period_s(WANTED_S, len(nodes), MOST_ASKED_PER_S)
            await asyncio.gather(*(self.ask(node.name) for node in nodes), asyncio.sleep(pause_s))

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

    def state(self, now_s: float) -> Json:
        """All pools. Totals are since the daemon's start."""
        return {"pools": {node.name: self._state(node, now_s) for node in self._running.current.pools}}

    def write_gauges(self, metrics: ControlMetrics, now_s: float) -> None:
        """Write the gauges of pools."""
        for name, pool in self.state(now_s)["pools"].items():
            metrics.pool_up.labels(name).set(pool["up"])
            metrics.pool_load_bits_per_s.labels(name).set(pool["memory_bits_per_s"])
            for tier, tokens in pool["hit_tokens"].items():
                metrics.pool_hit_tokens.labels(name, tier).set(tokens)
            daemon = pool["daemon"]
            if daemon is None:
                continue
            metrics.pool_epoch.labels(name).set(daemon["epoch"])
            metrics.pool_sessions.labels(name).set(daemon["sessions"])
            metrics.pool_pinned_pages.labels(name).set(daemon["pinned_pages"])
            metrics.pool_ssd_queued_bytes.labels(name).set(daemon["ssd_queued_bytes"])
            for tier in TIERS:
                metrics.pool_bytes.labels(name, tier).set(daemon["bytes"][tier])
                metrics.pool_capacity_bytes.labels(name, tier).set(daemon["capacity_bytes"][tier])
                for group, pages in daemon["pages"][tier].items():
                    metrics.pool_pages.labels(name, tier, group).set(pages)
            for what in POOL_BYTES:
                metrics.pool_moved_bytes.labels(name, what).set(daemon[f"{what}_bytes"])
            for why in POOL_LOSSES:
                metrics.pool_lost_pages.labels(name, why).set(daemon[f"{why}_pages"])
        metrics.telemetry_failures.labels("pools").inc(self.failures - self._counted)
        self._counted = self.failures

    def _state(self, node: PoolNode, now_s: float) -> Json:
        newest = self._newest.get(node.name)
        engines = [self._meters[name].newest for name in node.instances]
        return {
            "cluster": node.cluster,
            "instances": list(node.instances),
            "up": newest is not None and now_s - newest.at_s < SILENCE_S,
            "age_s": None if newest is None else round(now_s - newest.at_s, 3),
            "memory_bits_per_s": round(self._views[node.name].memory_bits_per_s),
            "hit_tokens": {
                "memory": round(sum(each.pool_memory_tokens for each in engines if each is not None)),
                "ssd": round(sum(each.pool_ssd_tokens for each in engines if each is not None)),
            },
            "daemon": None if newest is None else _daemon(newest, node),
        }

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
        pool = next((each for each in self._views.values() if instance.name in each.instances), None)
        if pool is None or meter.pool_loaded_bytes < _LEAST_LOADED_BYTES or not meter.pool_load_bytes_per_s:
            return
        # Ranks load at the same time, and each counts its own seconds.
        measured = BITS_PER_BYTE * meter.pool_load_bytes_per_s * instance.tensor_parallel
        pool.memory_bits_per_s = max(measured, _LEAST_BITS_PER_S)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _daemon(newest: PoolReading, node: PoolNode) -> Json:
    store = newest.parts.get("store", {})

    def number(part: str, name: str) -> int:
        return round(newest.number(part, name))

    return {
        "epoch": number("store", "epoch"),
        "sessions": number("store", "engine_sessions"),
        "bytes": {"memory": number("store", "used_bytes"), "ssd": number("store", "ssd_bytes")},
        "capacity_bytes": {"memory": number("store", "memory_bytes"), "ssd": node.ssd_bytes},
        "pages": {tier: newest.pages(tier) for tier in TIERS},
        "pinned_pages": number("store", "pinned_pages"),
        "writing_pages": number("store", "writing_pages"),
        "stored_bytes": number("store", "stored_bytes"),
        "refused_pages": number("store", "refused_pages"),
        "evicted_pages": number("store", "evicted_pages"),
        "evicted_bytes": number("store", "evicted_bytes"),
        "promoted_bytes": number("store", "promoted_bytes"),
        "wrong_pages": number("store", "wrong_pages"),
        "ssd_state": str(store.get("ssd_state", "")),
        "ssd_queued_bytes": number("store", "ssd_queued_bytes"),
        "ssd_written_bytes": number("store", "ssd_written_bytes"),
        "ssd_read_bytes": number("store", "ssd_read_bytes"),
        "copied_bytes": number("copies", "copied_bytes"),
        "lent_bytes": number("copies", "lent_bytes"),
        "failed_copies": number("copies", "failed_copies"),
    }
