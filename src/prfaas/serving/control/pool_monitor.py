"""Telemetry of pools: their daemons' STATS, and the bandwidth of their tiers."""

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prfaas.core.deployment import Instance, PoolNode
from prfaas.core.units import BITS_PER_BYTE
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_monitor import EngineMeter, period_s
from prfaas.serving.control.metrics import POOL_BYTES, POOL_LOSSES, TIERS, ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol.sentences import legible
from prfaas.serving.transport.protocol.wire import read_body

logger = logging.getLogger(__name__)

WANTED_S = 1.0
MOST_ASKED_PER_S = 24.0
_ANSWER_S = 2.0
# After so long without an answer a pool counts as down.
SILENCE_S = 5.0
# Smaller loads say little of a tier's bandwidth.
_LEAST_LOADED_BYTES = 1 << 20
_LEAST_PROMOTED_BYTES = 16 << 20
_LEAST_BITS_PER_S, _MOST_BITS_PER_S = 1e6, 1e15
# What other programs read exactly, and the numbers of KV groups: each is a label of its own.
_MOST_NUMBER = 1 << 53
_GROUP = re.compile(r"[0-9]{1,2}")
_MOST_STATE_CHARS = 64


@dataclass(frozen=True, slots=True)
class _PoolStats:
    """The part of a STATS answer that only pools give."""

    pool: dict[str, dict[str, Any]] = field(default_factory=dict)


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
            {group: int(_number(count)) for group, count in told.items() if _GROUP.fullmatch(group)}
            if isinstance(told, dict)
            else {}
        )


class PoolMonitor(Part):
    """Asks every pool for its figures once a second. What is known of a silent one stays, with its age."""

    def __init__(
        self,
        running: RunningDeployment,
        ports: Mapping[str, Observer],
        cluster_state: ClusterState,
        meters: Mapping[str, EngineMeter],
    ) -> None:
        """Nobody is asked before `run`.

        Args:
            running: whose pools. They stay the same, and may get other engines.
            ports: how each pool's KV port is asked, by name; whoever made them closes them.
            cluster_state: its pools get the bandwidths that engines and daemons measure.
            meters: of the engines, by instance.
        """
        self._meters = meters
        self._running = running
        self._ports = ports
        self._views = cluster_state.view.pools
        self._promoted: dict[str, tuple[float, float]] = {}
        self._clock = cluster_state.clock
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
            parts = read_body(_PoolStats, answer).pool
        except (OSError, ValueError) as error:
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
            self._views[name].ssd_bits_per_s = _bandwidth(promoted_bytes / took_s)

    def learn(self, instance: Instance, meter: EngineMeter) -> None:
        """Take the bandwidth of an engine's loads of the last minute for that of its pool's memory."""
        pool = next((each for each in self._views.values() if instance.name in each.instances), None)
        if pool is None or meter.pool_loaded_bytes < _LEAST_LOADED_BYTES or not meter.pool_load_bytes_per_s:
            return
        # Ranks load at the same time, and each counts its own seconds.
        pool.memory_bits_per_s = _bandwidth(meter.pool_load_bytes_per_s * instance.tensor_parallel)


def _bandwidth(bytes_per_s: float) -> float:
    return min(max(BITS_PER_BYTE * bytes_per_s, _LEAST_BITS_PER_S), _MOST_BITS_PER_S)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MOST_NUMBER else 0.0


# Shown as the daemon calls them.
_TOLD = {
    "store": (
        *("epoch", "pinned_pages", "writing_pages", "stored_bytes", "refused_pages", "evicted_pages"),
        *("evicted_bytes", "promoted_bytes", "wrong_pages"),
        *("ssd_queued_bytes", "ssd_written_bytes", "ssd_read_bytes"),
    ),
    "copies": ("copied_bytes", "lent_bytes", "failed_copies"),
}


def _daemon(newest: PoolReading, node: PoolNode) -> Json:
    def number(part: str, name: str) -> int:
        return round(newest.number(part, name))

    state = str(newest.parts.get("store", {}).get("ssd_state", ""))
    return {
        "sessions": number("store", "engine_sessions"),
        "bytes": {"memory": number("store", "used_bytes"), "ssd": number("store", "ssd_bytes")},
        "capacity_bytes": {"memory": number("store", "memory_bytes"), "ssd": node.ssd_bytes},
        "pages": {tier: newest.pages(tier) for tier in TIERS},
        "ssd_state": legible(state, _MOST_STATE_CHARS),
    } | {name: number(part, name) for part, names in _TOLD.items() for name in names}
