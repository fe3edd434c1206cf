"""What a pool holds and did, as numbers for metrics and tools."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from prfaas.serving.pool.store import PageStore

_PERIOD_S = 1.0

PoolFigures: TypeAlias = dict[str, int | float | str | dict[str, int]]


def pool_figures(store: PageStore) -> PoolFigures:
    """Everything that a store counts, and what it holds now.

    The keys of inner dictionaries are numbers of KV groups.
    """
    geometry, memory = store.geometry, store.memory
    in_memory, on_ssd = store.tier_pages["memory"], store.tier_pages["ssd"]
    pinned = {page for session in store.sessions for match in session.pins.values() for page in match}
    layout = memory.arena.layout
    of_tier = {} if store.ssd is None else store.ssd.figures()
    return {
        **{f"ssd_{name}": figure for name, figure in of_tier.items()},
        "epoch": store.epoch,
        "fingerprint": geometry.fingerprint,
        "engine_sessions": sum(session.kind != "tool" for session in store.sessions),
        "memory_bytes": layout.pages_bytes,
        "provided_bytes": memory.provided_slabs * layout.slab_bytes,
        "used_bytes": memory.used_bytes(),
        "ssd_bytes": sum(count * geometry.page_bytes(group) for group, count in on_ssd.items()),
        "memory_pages": {str(group): count for group, count in in_memory.items()},
        "ssd_pages": {str(group): count for group, count in on_ssd.items()},
        "pinned_pages": len(pinned),
        "writing_pages": len(store.reservations),
        **asdict(store.counters),
    }


class LatestFigures:
    """A pool's figures for threads that must not touch the store: made in its loop once a second."""

    def __init__(self, sources: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
        """`sources`: part of the figures → what makes them; called in the loop."""
        self._sources = sources
        self._latest: dict[str, Any] = {}

    def told(self) -> dict[str, Any]:
        """The newest of them, as STATS tells them. In any thread."""
        return {"pool": self._latest}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._latest = {name: dict(make()) for name, make in self._sources.items()}
            await asyncio.sleep(_PERIOD_S)
