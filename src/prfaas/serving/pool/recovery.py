"""Recovery at a daemon's start: pages in the last daemon's arena, and pages on SSD."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from prfaas.core.pool.announced import Medium
from prfaas.core.pool.geometry import PageIdentity
from prfaas.serving.pool.memory_tier import NO_SLOT, PoolPage
from prfaas.serving.pool.page_table import Owner, PageRow, PageState
from prfaas.serving.pool.store import PageStore

logger = logging.getLogger(__name__)


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
    on_ssd = 0
    identities: dict[bytes, PageIdentity | None] = {}
    if store.ssd is not None:
        store.ssd.attach(store.dropped_by_ssd)
        for entry in store.ssd.entries():
            if entry.group in store.held:
                key = entry.page_id[:-1]
                page = store.held[entry.group].setdefault(key, PoolPage(entry.page_id, entry.tenant))
                page.on_ssd = True
                on_ssd += 1
                identities[key] = entry.identity or identities.get(key)
    store.counters.recovered_pages = len(recovered)
    logger.info(
        "the pool has %d pages in memory and %d on SSD from before, and %d slots wait for their writers",
        len(recovered), on_ssd, len(store.reservations),
    )  # fmt: skip
    for page, identity in _parents_first(store, identities):
        for medium in _media(page):
            store.report_stored(page, identity, medium)
    for page in recovered:
        store.write_to_ssd(page)
    return recovered


def _taken_back(store: PageStore, row: PageRow, may_write: Callable[[Owner], bool]) -> PoolPage | None:
    """Recover the page of a row; None if it is of no use, and its slot free."""
    memory = store.memory
    writing = row.state is PageState.WRITING
    if writing and not may_write(row.owner):
        return None
    if not writing and not row.state.is_readable:
        return None
    page = memory.take_back(row)
    if page is None:
        return None
    if writing:
        store.reservations.take_back(page, row.owner, row.ranks_left)
        return page
    try:
        known = store.held[page.group].setdefault(page.key, page)
        if known is not page:
            raise ValueError("the page is there twice")
        memory.entered(page)
    except ValueError:
        if store.held[page.group][page.key] is page:
            del store.held[page.group][page.key]
        memory.free(page)
        return None
    memory.table.set_must_verify(row.row, True)
    memory.set_state(page, PageState.READY)
    return page


def _parents_first(
    store: PageStore, on_ssd: Mapping[bytes, PageIdentity | None]
) -> Iterator[tuple[PoolPage, PageIdentity | None]]:
    """Every page that is held, lead pages after those that they follow, and before other groups' pages."""
    lead = store.geometry.lead.index
    identities = {}
    children: dict[bytes, list[bytes]] = defaultdict(list)
    for key, page in store.held[lead].items():
        identity = on_ssd.get(key) if page.slot == NO_SLOT else store.memory.identity(page)
        identities[key] = identity
        parent = identity.parent if identity is not None else b""
        children[parent if parent in store.held[lead] else b""].append(key)
    left = children[b""]
    while left:
        key = left.pop()
        yield store.held[lead][key], identities[key]
        left += children.get(key, ())
    for group, pages in store.held.items():
        if group != lead:
            for page in pages.values():
                yield page, None


def _media(page: PoolPage) -> Iterator[Medium]:
    if page.slot != NO_SLOT:
        yield "memory"
    if page.on_ssd:
        yield "ssd"
