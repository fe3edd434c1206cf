"""What a pool holds and did, as numbers for metrics and tools."""

from dataclasses import asdict
from typing import TypeAlias

from prfaas.serving.pool.memory_tier import NO_SLOT
from prfaas.serving.pool.store import PageStore

PoolFigures: TypeAlias = dict[str, int | float | str | dict[str, int]]


def pool_figures(store: PageStore) -> PoolFigures:
    """Everything that a store counts, and what it holds now.

    The keys of inner dictionaries are numbers of KV groups.
    """
    geometry, memory = store.geometry, store.memory
    in_memory = {group.index: 0 for group in geometry.groups}
    on_ssd = dict(in_memory)
    pinned = 0
    for group, pages in store.held.items():
        for page in pages.values():
            in_memory[group] += page.slot != NO_SLOT
            on_ssd[group] += page.on_ssd
            pinned += page.pins > 0
    layout = memory.arena.layout
    return {
        "epoch": store.epoch,
        "fingerprint": geometry.fingerprint,
        "engine_sessions": sum(session.kind != "tool" for session in store.sessions),
        "memory_bytes": layout.pages_bytes,
        "provided_bytes": memory.provided_slabs * layout.slab_bytes,
        "used_bytes": memory.used_bytes(),
        "ssd_bytes": sum(count * geometry.page_bytes(group) for group, count in on_ssd.items()),
        "memory_pages": {str(group): count for group, count in in_memory.items()},
        "ssd_pages": {str(group): count for group, count in on_ssd.items()},
        "pinned_pages": pinned,
        "writing_pages": len(store.reservations),
        **asdict(store.counters),
        **(
            {}
            if store.ssd is None
            else {f"ssd_{name}": figure for name, figure in store.ssd.figures().items()}
        ),
    }
