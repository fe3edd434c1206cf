"""Store of a pool's pages in memory and on SSD: look-up, pins, reservations and promotion.

One event loop owns a store; no method waits.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, get_args

import numpy as np

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.announced import Medium
from prfaas.core.pool.depth import needed_blocks, usable_end
from prfaas.core.pool.geometry import PageGroup, PageIdentity
from prfaas.core.pool.keys import KEY_BYTES, TENANT_BYTES
from prfaas.core.pool.quota import TenantEviction
from prfaas.serving.pool.arena import Arena
from prfaas.serving.pool.events import PoolEventPublisher
from prfaas.serving.pool.memory_tier import NO_SLOT, MemoryTier, PoolPage, ReadablePages
from prfaas.serving.pool.page_table import PageState, row_of
from prfaas.serving.pool.processes import Owner
from prfaas.serving.pool.protocol import Match, Matched, PageRef, SessionKind, packed
from prfaas.serving.pool.reservations import Reservations
from prfaas.serving.pool.ssd_tier import FileTier, SsdEntry

_DAEMON = Owner(0, 0, bytes(8))
_TOUCHES_AT_ONCE = 256


@dataclass(slots=True)
class PoolCounters:
    """Counters of a store since its start."""

    lookups: int = 0
    pinned_matches: int = 0
    hit_memory_tokens: int = 0
    hit_ssd_tokens: int = 0
    stored_pages: int = 0
    stored_bytes: int = 0
    refused_pages: int = 0
    """For lack of room: all slots were in use."""
    aborted_pages: int = 0
    evicted_pages: int = 0
    evicted_bytes: int = 0
    promoted_pages: int = 0
    promoted_bytes: int = 0
    failed_promotions: int = 0
    recovered_pages: int = 0
    wrong_pages: int = 0
    """Their bytes did not have their checksums."""


NeededPages: TypeAlias = tuple[int, int, list[PoolPage]]
"""Group, first block, and its pages from there on."""


class StoreSession:
    """Pins and reservations of one connection."""

    def __init__(self, kind: SessionKind, rank: int, owner: Owner) -> None:
        self.kind = kind
        self.rank = rank
        self.owner = owner
        self.pins: dict[int, list[PoolPage]] = {}
        self.reserved: set[PoolPage] = set()


_MOST_OUTDATED = 1024
# More than an engine has requests; each costs memory, and its pages stay.
_MOST_PINS = 1 << 14


class Spilling:
    """Gives pages to the SSD tier in the order in which they became ready, and only as many as it takes.

    Waiting pages can be evicted, so neither a burst of pages nor a failing disk fills the memory with pages that must
    stay.

    Args:
        ssd: The tier.
        memory: Has the pages.
        page_of: Finds the held page of an id.
        ended: Called with each page that was given to the tier, its identity, and whether it is on SSD now.
    """

    def __init__(
        self,
        ssd: FileTier,
        memory: MemoryTier,
        page_of: Callable[[bytes], PoolPage | None],
        ended: Callable[[PoolPage, PageIdentity | None, bool], None],
    ) -> None:
        self._ssd = ssd
        self._memory = memory
        self._page_of = page_of
        self._ended = ended
        self._waiting: dict[bytes, None] = {}
        self._is_giving = False

    def add(self, page: PoolPage) -> None:
        """Queue a READY page."""
        self._waiting[page.page_id] = None
        if len(self._waiting) > 2 * len(self._memory.rows) + _MOST_OUTDATED:
            self._waiting = dict.fromkeys(each for each in self._waiting if self._wants(self._page_of(each)))
        self._give()

    def _give(self) -> None:
        # The tier may call back at once.
        if self._is_giving:
            return
        self._is_giving = True
        while self._waiting and self._ssd.takes_more:
            page_id = next(iter(self._waiting))
            del self._waiting[page_id]
            page = self._page_of(page_id)
            if page is None or not self._wants(page):
                continue
            identity = self._memory.identity(page)
            self._memory.set_state(page, PageState.SPILLING)
            entry = SsdEntry(page_id, identity, tuple(page.checksums), page.tenant)
            self._ssd.write(entry, page.offset, partial(self._was_given, page, identity))
        self._is_giving = False

    def _was_given(self, page: PoolPage, identity: PageIdentity | None, is_written: bool) -> None:
        self._memory.set_state(page, PageState.READY)
        if not is_written and not self._ssd.takes_more:
            self._waiting[page.page_id] = None
        self._ended(page, identity, is_written)
        self._give()

    @staticmethod
    def _wants(page: PoolPage | None) -> bool:
        return page is not None and page.state is PageState.READY and not page.on_ssd


class PageStore:
    """All pages of one geometry.

    1. Engines' requests come with their session: `match` and `unpin_match`, `reserve`, then `commit` or `abort` of
       `reservations`, `discard`. The daemon's own copies use `pin`, `unpin`, `commit_all` and `abort`.
    2. A page is WRITING until all ranks have committed, then READY and `held`; `_spilling` writes it to SSD.
    3. A match of pages that are on SSD only gives them slots and reads them (PROMOTING).
    4. `MemoryTier` evicts pages for others; a page that is nowhere any more is forgotten.
    """

    def __init__(
        self,
        arena: Arena,
        eviction: TenantEviction,
        *,
        events: PoolEventPublisher | None = None,
        ssd: FileTier | None = None,
        time_s: Callable[[], float] = time.time,
    ) -> None:
        """Make a store without room, until `memory.add_slab`."""
        self.geometry = arena.layout.geometry
        self.epoch = arena.epoch
        self.counters = PoolCounters()
        self.memory = MemoryTier(arena, eviction, self._evicted)
        self.reservations = Reservations(self.memory, self.geometry.ranks, self._ready, self._aborted)
        self.sessions: set[StoreSession] = set()
        self.held: dict[int, dict[bytes, PoolPage]] = {group.index: {} for group in self.geometry.groups}
        """By group: key → page in memory or on SSD, without those that are WRITING."""
        self.tier_pages: dict[Medium, dict[int, int]] = {
            tier: dict.fromkeys(self.held, 0) for tier in get_args(Medium)
        }
        """By tier and group: pages that can be read there."""
        self.events = events
        self.ssd = ssd
        self._spilling = None if ssd is None else Spilling(ssd, self.memory, self._page, self._spilled)
        self._time_s = time_s
        self._lead = self.geometry.lead
        self._full = [group for group in self.geometry.groups if group.kind is GroupKind.FULL]
        self._step_tokens = self.geometry.step_tokens
        self._page_bytes = {each.index: self.geometry.page_bytes(each.index) for each in self.geometry.groups}
        self._identity_room = self.geometry.identity_bytes(self._lead.index)
        self._pin_numbers = itertools.count(1)
        self._touches: deque[list[PoolPage]] = deque()

    def open_session(self, kind: SessionKind, rank: int, owner: Owner) -> StoreSession:
        """Open a connection's session."""
        session = StoreSession(kind, rank, owner)
        self.sessions.add(session)
        if kind == "worker":
            self.reservations.worker_began(owner, rank, session)
        return session

    def close_session(self, session: StoreSession, *, writes_no_more: bool) -> None:
        """Drop the pins and reservations of a connection that ended.

        Args:
            writes_no_more: its process ended, or said goodbye. Otherwise `reservations.worker_ended` follows.
        """
        self.sessions.discard(session)
        for number in list(session.pins):
            self.unpin_match(session, number)
        for page in list(session.reserved):
            self.reservations.disown(page)
        if session.kind == "worker" and writes_no_more:
            self.reservations.worker_ended(session.owner, session.rank, session)

    def match(self, session: StoreSession, asked: Match) -> Matched:
        """Look up a prompt, as `PoolClient.match`. With `pin`, pages that are on SSD only are read into memory.

        Raises:
            ValueError: a field makes no sense.
        """
        chain, start_tokens, limit_tokens = asked.chain, asked.start_tokens, asked.limit_tokens
        if len(chain) % KEY_BYTES or start_tokens < 0:
            raise ValueError(f"a chain of {len(chain)} bytes from token {start_tokens} on is not possible")
        self.counters.lookups += 1
        keys: list[bytes] = np.frombuffer(chain, f"V{KEY_BYTES}").tolist()
        groups = self.geometry.groups if asked.whole else self._full
        if start_tokens >= min(limit_tokens, len(keys) * self._step_tokens):
            return Matched(0, 0, start_tokens // self._step_tokens * self._step_tokens, 0, [])
        if asked.pin and len(session.pins) >= _MOST_PINS:
            raise ValueError(f"{_MOST_PINS} matches of this session are pinned, and none is given back")
        # Of what is on SSD only, where there is room for it in memory; else of what is in memory.
        in_memory = {group: ReadablePages(pages) for group, pages in self.held.items()}
        tiers: tuple[Mapping[int, Container[bytes]], ...] = (self.held, in_memory)
        for held in tiers:
            found = usable_end(groups, keys, self._step_tokens, held, start_tokens, limit_tokens)
            if not asked.pin or not found.usable_tokens:
                return Matched(0, found.usable_tokens, found.attention_tokens, 0, [])
            needed = self._needed(groups, keys, start_tokens, found.usable_tokens)
            pinned = [page for _, _, pages in needed for page in pages]
            if self._pin_all(pinned):
                break
        number = next(self._pin_numbers)
        session.pins[number] = pinned
        memory_tokens = self._count_hit(needed, start_tokens, found.usable_tokens)
        pages = [
            (group, first, packed([page.slot for page in pages]), packed([page.offset for page in pages]))
            for group, first, pages in needed
        ]
        return Matched(number, found.usable_tokens, found.attention_tokens, memory_tokens, pages)

    def unpin_match(self, session: StoreSession, number: int) -> None:
        """Release the pages of a match; an unknown number is ignored."""
        for page in session.pins.pop(number, ()):
            self._unpin(page)

    def reserve(
        self,
        tenant: bytes,
        pages: Sequence[tuple[bytes, PageIdentity | None]],
        session: StoreSession | None = None,
    ) -> list[PageRef | None]:
        """Reserve room for pages, as `PoolClient.reserve`.

        `session`: the engine's. None: they are the daemon's own, each to be ended by `commit_all` or `abort`.

        Raises:
            ValueError: an argument makes no sense.
        """
        return [self._reserve(session, tenant, *each) for each in pages]

    def commit_all(self, page: PageRef, checksums: Sequence[int]) -> None:
        """Commit all ranks' shares of a page, with these checksums."""
        for rank, checksum in enumerate(checksums):
            self.reservations.commit(page.slot, rank, checksum)

    def abort(self, pages: Iterable[PageRef]) -> None:
        """Give up reserved pages."""
        for page in pages:
            self.reservations.abort_all(page.slot)

    def pin(self, page_ids: Sequence[bytes]) -> list[PageRef | None]:
        """Pin each held page, reading it into memory if it is on SSD only. None for the others."""
        refs: list[PageRef | None] = []
        for page_id in page_ids:
            page = self._page(page_id)
            pinned = page is not None and self._pin_all([page])
            refs.append(PageRef(page.slot, page.offset) if page is not None and pinned else None)
        return refs

    def unpin(self, pages: Iterable[PageRef]) -> None:
        """Release pages that `pin` gave."""
        for ref in pages:
            page = self.memory.page_in(ref.slot)
            if page is not None:
                self._unpin(page)

    def discard(self, page_ids: Iterable[bytes]) -> None:
        """Drop those of these pages that are unused and were never hit."""
        for page_id in page_ids:
            page = self._page(page_id)
            if page is None or page.was_hit or page.pins:
                continue
            if page.state is PageState.SPILLING:
                page.discarded = True
            elif not page.in_use:
                self.drop(page)

    def clear(self) -> int:
        """Drop every unused page from memory, and all pages from SSD. Returns how many went."""
        pages = [page for pages in self.held.values() for page in pages.values()]
        if self.ssd is not None:
            self.ssd.clear()
        for page in pages:
            if page.on_ssd:
                self.dropped_by_ssd(page.page_id)
            if page.state is PageState.SPILLING:
                page.discarded, page.was_hit = True, False
            elif page.slot != NO_SLOT and not page.in_use:
                self.drop(page)
        return sum(page.slot == NO_SLOT for page in pages)

    def drop(self, page: PoolPage) -> None:
        """Forget a held, unused page."""
        if page.slot != NO_SLOT:
            self.memory.free(page)
            self._removed(page, "memory")
        self._forget_on_ssd(page)

    def drop_wrong(self, page: PoolPage) -> None:
        """Drop a page in memory whose bytes are wrong. Its copy on SSD is verified when it is read."""
        self.counters.wrong_pages += 1
        self.memory.disown(page)
        self.memory.set_state(page, PageState.FAILED)
        left = PoolPage(page.page_id, page.tenant)
        left.on_ssd, page.on_ssd = page.on_ssd, False
        self.held[page.group][page.key] = left
        self._removed(left, "memory")
        if not page.pins:
            self.memory.free(page)

    def settle(self) -> bool:
        """Do a bounded portion of the work deferred behind answers. Returns whether some is left."""
        if self._touches:
            self.memory.touch(self._touches.popleft(), self._time_s())
        return bool(self._touches)

    def dropped_by_ssd(self, page_id: bytes) -> None:
        """Note that the SSD tier has dropped a page."""
        page = self._page(page_id)
        if page is not None and page.on_ssd:
            page.on_ssd = False
            self._removed(page, "ssd")

    def report_stored(self, page: PoolPage, identity: PageIdentity | None, medium: Medium) -> None:
        """Count and publish that a tier has the page."""
        self.tier_pages[medium][page.group] += 1
        if self.events is not None:
            self.events.stored(page.page_id, identity, medium)

    def write_to_ssd(self, page: PoolPage) -> None:
        """Write a READY page in the background."""
        if self._spilling is not None:
            self._spilling.add(page)

    def _page(self, page_id: bytes) -> PoolPage | None:
        pages = self.held.get(page_id[KEY_BYTES]) if len(page_id) == KEY_BYTES + 1 else None
        return None if pages is None else pages.get(page_id[:KEY_BYTES])

    def _needed(
        self, groups: Sequence[PageGroup], keys: list[bytes], start_tokens: int, end_tokens: int
    ) -> list[NeededPages]:
        """The pages that a load reads, by group."""
        needed: list[NeededPages] = []
        for group, (index, blocks) in zip(
            groups, needed_blocks(groups, start_tokens, end_tokens), strict=True
        ):
            steps = group.block_tokens // self._step_tokens
            ends = keys[blocks.start * steps + steps - 1 : blocks.stop * steps : steps]
            needed.append((index, blocks.start, list(map(self.held[index].__getitem__, ends))))
        return needed

    def _pin_all(self, pages: Sequence[PoolPage]) -> bool:
        """Pin all these pages, or none if one of them has no slot and there is no room for it."""
        for page in pages:
            page.pins += 1
            page.was_hit = True
        absent = [page for page in pages if page.slot == NO_SLOT]
        if absent and not self._promote_all(absent):
            for page in pages:
                page.pins -= 1
            return False
        for at in range(len(pages), 0, -_TOUCHES_AT_ONCE):
            self._touches.append(list(pages[max(at - _TOUCHES_AT_ONCE, 0) : at]))
        return True

    def _promote_all(self, pages: Sequence[PoolPage]) -> bool:
        assert self.ssd is not None
        self._settle_all()
        placed: list[PoolPage] = []
        for page in pages:
            entry = self.ssd.entry(page.page_id)
            if entry is None or not self.memory.place(page, PageState.PROMOTING, _DAEMON, entry.identity):
                for each in placed:
                    self.memory.free(each)
                    each.state = PageState.ON_SSD
                return False
            page.checksums = list(entry.checksums)
            placed.append(page)
        for page in pages:
            self.ssd.read(page.page_id, page.offset, partial(self._promoted, page))
        return True

    def _unpin(self, page: PoolPage) -> None:
        page.pins -= 1
        if not page.pins and page.state is PageState.FAILED:
            self.memory.free(page)

    def _count_hit(self, needed: Sequence[NeededPages], start_tokens: int, end_tokens: int) -> int:
        """Count a hit by tier. Returns the leading tokens that are in memory."""
        block_tokens, promoting = self._lead.block_tokens, PageState.PROMOTING
        first, pages = next((first, pages) for group, first, pages in needed if group == self._lead.index)
        absent = [first + place for place, page in enumerate(pages) if page.state is promoting]
        ssd_tokens = sum(
            (block + 1) * block_tokens - max(block * block_tokens, start_tokens) for block in absent
        )
        self.counters.pinned_matches += 1
        self.counters.hit_ssd_tokens += ssd_tokens
        self.counters.hit_memory_tokens += end_tokens - start_tokens - ssd_tokens
        return max(absent[0] * block_tokens, start_tokens) if absent else end_tokens

    def _reserve(
        self, session: StoreSession | None, tenant: bytes, page_id: bytes, identity: PageIdentity | None
    ) -> PageRef | None:
        if len(page_id) != KEY_BYTES + 1 or page_id[KEY_BYTES] not in self.held or len(tenant) > TENANT_BYTES:
            raise ValueError(f"there is no page {page_id.hex()} of tenant {tenant.hex()} in this pool")
        leads = page_id[KEY_BYTES] == self._lead.index
        if leads != (identity is not None) or (identity is not None and not identity.describes(self._lead)):
            raise ValueError(f"page {page_id.hex()} has no identity as the pages of its group have it")
        if page_id in self.reservations or page_id[:KEY_BYTES] in self.held[page_id[KEY_BYTES]]:
            return None
        if identity is not None and not identity.fits(self._identity_room):
            return None
        self._settle_all()
        page = PoolPage(page_id, tenant.ljust(TENANT_BYTES, b"\0"))
        if not self.reservations.begin(page, _DAEMON if session is None else session.owner, identity):
            self.counters.refused_pages += 1
            return None
        if session is not None:
            page.reserved_in = session.reserved
            page.reserved_in.add(page)
        return PageRef(page.slot, page.offset)

    def _settle_all(self) -> None:
        while self.settle():
            pass

    def _ready(self, page: PoolPage) -> None:
        """All ranks have committed."""
        self.held[page.group][page.key] = page
        self.memory.table.set_checksums(row_of(page.slot), page.checksums)
        self.memory.table.set_last_use(row_of(page.slot), self._time_s())
        self.memory.set_state(page, PageState.READY)
        self.counters.stored_pages += 1
        self.counters.stored_bytes += self._page_bytes[page.group]
        self.report_stored(page, page.identity, "memory")
        page.identity = None
        self.write_to_ssd(page)

    def _aborted(self, _page: PoolPage) -> None:
        self.counters.aborted_pages += 1

    def _spilled(self, page: PoolPage, identity: PageIdentity | None, is_written: bool) -> None:
        if is_written:
            page.on_ssd = True
            self.report_stored(page, identity, "ssd")
        if page.discarded and not page.was_hit and not page.pins:
            self.drop(page)

    def _promoted(self, page: PoolPage, right: bool) -> None:
        if right:
            self.memory.table.set_checksums(row_of(page.slot), page.checksums)
            self.memory.set_state(page, PageState.READY)
            self.counters.promoted_pages += 1
            self.counters.promoted_bytes += self._page_bytes[page.group]
            self.report_stored(page, page.identity, "memory")
            page.identity = None
            return
        self.counters.failed_promotions += 1
        self.memory.set_state(page, PageState.FAILED)
        self.memory.disown(page)
        del self.held[page.group][page.key]
        self._forget_on_ssd(page)
        if not page.pins:
            self.memory.free(page)

    def _evicted(self, page: PoolPage) -> None:
        self.counters.evicted_pages += 1
        self.counters.evicted_bytes += self._page_bytes[page.group]
        page.state = PageState.ON_SSD
        self._removed(page, "memory")
        if page.on_ssd and self.ssd is not None:
            self.ssd.touched(page.page_id)

    def _forget_on_ssd(self, page: PoolPage) -> None:
        if page.on_ssd:
            assert self.ssd is not None
            page.on_ssd = False
            self.ssd.forget(page.page_id)
            self._removed(page, "ssd")

    def _removed(self, page: PoolPage, medium: Medium) -> None:
        """A tier has the page no longer; one that no tier has is forgotten."""
        if page.slot == NO_SLOT and not page.on_ssd:
            del self.held[page.group][page.key]
        self.tier_pages[medium][page.group] -= 1
        if self.events is not None:
            self.events.removed(page.page_id, medium)
