"""Comparing pages in memory with their checksums, without holding the daemon up."""

import asyncio
from collections.abc import Sequence

import xxhash

from prfaas.core.pool.geometry import PoolGeometry
from prfaas.serving.pool.memory_tier import NO_SLOT, PoolPage
from prfaas.serving.pool.page_table import row_of
from prfaas.serving.pool.protocol import PageRef
from prfaas.serving.pool.store import PageStore

_BATCH_BYTES = 64 << 20


async def verify_pages(store: PageStore, pages: Sequence[PoolPage]) -> tuple[int, int]:
    """Hash these pages, a bounded number of bytes at a time, in a thread. Wrong ones are dropped.

    Returns:
        How many pages were in memory and right, and how many wrong.
    """
    right = wrong = 0
    batch: list[PoolPage] = []
    batch_bytes = 0
    for page in pages:
        batch.append(page)
        batch_bytes += store.geometry.page_bytes(page.group)
        if batch_bytes >= _BATCH_BYTES or page is pages[-1]:
            rights = await _verify(store, batch)
            right, wrong = right + rights.count(True), wrong + rights.count(False)
            batch, batch_bytes = [], 0
    return right, wrong


async def _verify(store: PageStore, pages: Sequence[PoolPage]) -> list[bool]:
    present = [page for page in pages if page.slot != NO_SLOT and page.state.is_readable]
    refs = [PageRef(page.slot, page.offset) for page in present]
    for page in present:
        page.pins += 1
    parts = [(page.offset, page.group, tuple(page.checksums)) for page in present]
    try:
        rights = await asyncio.to_thread(_are_right, store.geometry, store.memory.arena.view, parts)
    finally:
        store.unpin(refs)
    for page, right in zip(present, rights, strict=True):
        if right:
            store.memory.table.set_must_verify(row_of(page.slot), False)
        else:
            store.drop_wrong(page)
    return rights


def _are_right(
    geometry: PoolGeometry, view: memoryview, pages: Sequence[tuple[int, int, tuple[int, ...]]]
) -> list[bool]:
    return [
        all(
            xxhash.xxh3_64_intdigest(view[begin : begin + geometry.group(group).rank_bytes]) == checksum
            for rank, checksum in enumerate(checksums)
            for begin in [offset + geometry.rank_offset(group, rank)]
        )
        for offset, group, checksums in pages
    ]
