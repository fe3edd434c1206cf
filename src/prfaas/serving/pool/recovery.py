"""Recovery at a daemon's start: pages in the last daemon's arena, and pages on SSD; and whether pages are right."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import xxhash

from prfaas.core.pool.geometry import PoolGeometry
from prfaas.serving.pool.memory_tier import NO_SLOT, PoolPage
from prfaas.serving.pool.page_table import PageRow, PageState, row_of
from prfaas.serving.pool.processes import Owner
from prfaas.serving.pool.protocol import PageRef
from prfaas.serving.pool.store import PageStore

logger = logging.getLogger(__name__)

_BATCH_BYTES = 64 << 20


def recover(store: PageStore, may_write: Callable[[Owner], bool]) -> list[PoolPage]:
    """Fill a new store from its arena and its SSD tier, and publish all of it.

    Readers verify pages from the arena until the daemon has. Slots that a process may still write into stay unused.

    Args:
        store: without any page so far.
        may_write: true if a process of that owner lives.

    Returns:
        The pages from the arena.
    """
    table = store.memory.table
    recovered: list[PoolPage] = []
    for row in sorted(table.used_rows(), key=lambda each: each.last_use_s):
        page = _taken_back(store, row, may_write)
        if page is None:
            table.set_state(row.row, PageState.FREE)
        elif page.state is PageState.READY:
            recovered.append(page)
    if store.ssd is not None:
        store.ssd.attach(store.dropped_by_ssd)
        for entry in store.ssd.entries():
            if entry.group in store.held:
                fresh = PoolPage(entry.page_id, entry.tenant)
                page = store.held[entry.group].setdefault(fresh.key, fresh)
                page.on_ssd = True
                store.report_stored(page, entry.identity, "ssd")
    store.counters.recovered_pages = len(recovered)
    logger.info(
        "the pool has %d pages in memory and %d on SSD from before, and %d slots wait for their writers",
        len(recovered), sum(store.tier_pages["ssd"].values()), len(store.reservations),
    )  # fmt: skip
    for page in recovered:
        store.write_to_ssd(page)
    return recovered


def _taken_back(store: PageStore, row: PageRow, may_write: Callable[[Owner], bool]) -> PoolPage | None:
    """Recover the page of a row; None if it is of no use, and its slot free."""
    memory = store.memory
    writing = row.state is PageState.WRITING
    if not (may_write(row.owner) if writing else row.state.is_readable):
        return None
    page = memory.take_back(row)
    if page is None:
        return None
    if writing:
        store.reservations.take_back(page, row.owner, row.ranks_left)
        return page
    known = store.held[page.group]
    try:
        if page.key in known:
            raise ValueError("the page is there twice")
        identity = memory.entered(page)
    except ValueError:
        memory.free(page)
        return None
    known[page.key] = page
    memory.table.set_must_verify(row.row, True)
    memory.set_state(page, PageState.READY)
    store.report_stored(page, identity, "memory")
    return page


async def verify_recovered(store: PageStore, recovered: Sequence[PoolPage]) -> None:
    """Verify recovered pages, so that readers need not."""
    right, wrong = await verify_pages(store, recovered)
    logger.info("%d pages of the last daemon were verified, %d were wrong", right, wrong)


async def verify_pages(store: PageStore, pages: Sequence[PoolPage]) -> tuple[int, int]:
    """Hash these pages, a bounded number of bytes at a time, in a thread. Wrong ones are dropped.

    Returns:
        How many pages were in memory and right, and how many wrong.
    """
    largest = max(store.geometry.page_bytes(group.index) for group in store.geometry.groups)
    at_once = max(_BATCH_BYTES // largest, 1)
    rights: list[bool] = []
    for at in range(0, len(pages), at_once):
        rights += await _verify(store, pages[at : at + at_once])
    return rights.count(True), rights.count(False)


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
