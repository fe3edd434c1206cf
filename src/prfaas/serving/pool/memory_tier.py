"""Pages of a pool that have a slot in the arena, and their eviction when others need the room."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prfaas.core.pool.geometry import PageIdentity
from prfaas.core.pool.keys import KEY_BYTES, page_id
from prfaas.core.pool.quota import TenantEviction
from prfaas.core.pool.slabs import SlabAllocator
from prfaas.serving.pool.arena import Arena
from prfaas.serving.pool.page_table import PageRow, PageState, row_of
from prfaas.serving.pool.processes import Owner

NO_SLOT = -1
_TOUCHED_AGAIN_S = 1.0
_IN_USE = frozenset({PageState.WRITING, PageState.SPILLING, PageState.PROMOTING, PageState.FAILED})


@dataclass(slots=True, eq=False, repr=False)
class PoolPage:
    """The store's record of a page, in memory or on SSD."""

    page_id: bytes
    tenant: bytes
    key: bytes = field(init=False)
    group: int = field(init=False)
    state: PageState = field(init=False, default=PageState.ON_SSD)
    slot: int = field(init=False, default=NO_SLOT)
    offset: int = field(init=False, default=0)
    pins: int = field(init=False, default=0)
    on_ssd: bool = field(init=False, default=False)
    was_hit: bool = field(init=False, default=False)
    discarded: bool = field(init=False, default=False)
    checksums: list[int] = field(init=False, default_factory=list)
    identity: PageIdentity | None = field(init=False, default=None)
    """Its identity while it is WRITING or PROMOTING; for other pages see `MemoryTier.identity`."""
    owner: Owner | None = field(init=False, default=None)
    """Its writer, while it is WRITING."""
    reserved_in: "set[PoolPage] | None" = field(init=False, default=None)
    """All pages reserved by its writer's session, while it is WRITING."""
    touched_s: float = field(init=False, default=-math.inf)
    """Time of the use that the eviction policy last learned of."""
    ranks_left: int = field(init=False, default=0)
    """Bit r: rank r has not finished its share."""
    left_behind: bool = field(init=False, default=False)
    """It was WRITING when the last daemon ended."""
    failed: bool = field(init=False, default=False)
    """It will not become READY: a rank gave up, or its session ended."""

    def __post_init__(self) -> None:
        self.key, self.group = self.page_id[:KEY_BYTES], self.page_id[KEY_BYTES]

    @property
    def in_use(self) -> bool:
        """True if its slot must not be reused."""
        return self.pins > 0 or self.state in _IN_USE


class ReadablePages:
    """View of a group's pages that can be read without the SSD."""

    def __init__(self, pages: Mapping[bytes, PoolPage]) -> None:
        self._pages = pages

    def __contains__(self, key: object) -> bool:
        page = self._pages.get(key)  # type: ignore[call-overload]
        return page is not None and page.state.is_readable


class MemoryTier:
    """Gives slots to pages. `evicted` is called with each page that loses its slot to another.

    `place` finds a slot of the page's size, evicting others if none is free; `touch` keeps the order of eviction;
    `free` takes the slot back. At a daemon's start `take_back` and `entered` recover pages. The page table and the
    identities in the arena are written here.
    """

    def __init__(
        self,
        arena: Arena,
        eviction: TenantEviction,
        evicted: Callable[[PoolPage], None],
    ) -> None:
        layout = arena.layout
        self.arena = arena
        self.table = arena.table
        geometry = layout.geometry
        self._eviction = eviction
        self._evicted = evicted
        self._slot_bytes = layout.slot_bytes
        self._slabs = SlabAllocator(layout.slab_bytes, set(layout.slot_bytes.values()))
        self._lead = geometry.lead.index
        self._identity_at = geometry.identity_offset(self._lead)
        self._identity_room = geometry.identity_bytes(self._lead)
        self.rows: dict[int, PoolPage] = {}
        """Every page with a slot, by the slot's row."""
        self._by_id: dict[bytes, PoolPage] = {}

    def add_slab(self, slab: int) -> None:
        """Use a slab whose memory was provided."""
        self._slabs.add(slab)

    @property
    def provided_slabs(self) -> int:
        """Slabs that can be used."""
        return self._slabs.known_slabs

    def used_bytes(self) -> int:
        """Bytes of all slots with pages."""
        return self._slabs.taken_bytes()

    def place(self, page: PoolPage, state: PageState, owner: Owner, identity: PageIdentity | None) -> bool:
        """Give the page a slot and a row, evicting others if need be. False: all slots are in use."""
        row = self._free_row(self._slot_bytes[page.group], page.tenant)
        if row is None:
            return False
        self.rows[row] = page
        page.offset = self.arena.layout.slabs_at + self._slabs.offset(row)
        page.state = state
        page.slot = self.table.begin(row, state, page.page_id, owner, page.tenant, page.ranks_left)
        page.identity = identity
        if identity is not None:
            encoded = identity.encode()
            at = page.offset + self._identity_at
            self.arena.view[at : at + len(encoded)] = encoded
        self._enter(page, identity)
        return True

    def take_back(self, row: PageRow) -> PoolPage | None:
        """Recover the page that an earlier daemon left in a row; None if the row makes no sense."""
        slot_bytes = self._slot_bytes.get(row.group)
        if slot_bytes is None or row.page_id[KEY_BYTES] != row.group:
            return None
        self._slabs.add(row.row // self._slabs.most_slots)
        if not self._slabs.claim(row.row, slot_bytes):
            return None
        page = PoolPage(row.page_id, row.tenant)
        page.state, page.checksums = row.state, list(row.checksums)
        page.slot = self.table.slot(row.row)
        page.offset = self.arena.layout.slabs_at + self._slabs.offset(row.row)
        self.rows[row.row] = page
        return page

    def entered(self, page: PoolPage) -> PageIdentity | None:
        """Let a recovered page count for eviction. Returns its identity, as `identity` does.

        Raises:
            ValueError: its trailer is damaged.
        """
        identity = self.identity(page)
        self._enter(page, identity)
        return identity

    def disown(self, page: PoolPage) -> None:
        """Free the page's name for another page; it keeps its slot."""
        if self._by_id.get(page.page_id) is page:
            del self._by_id[page.page_id]
            self._eviction.removed(page.page_id)

    def free(self, page: PoolPage) -> None:
        """Take the page's slot back."""
        self.disown(page)
        row = row_of(page.slot)
        self.table.set_state(row, PageState.FREE)
        self._slabs.give_back(row)
        del self.rows[row]
        page.slot = NO_SLOT

    def page_in(self, slot: int) -> PoolPage | None:
        """The page that a `PageRef` of this slot names, if it is still there."""
        page = self.rows.get(row_of(slot))
        return page if page is not None and page.slot == slot else None

    def set_state(self, page: PoolPage, state: PageState) -> None:
        """Set the state of a page with a slot, here and in shared memory."""
        page.state = state
        self.table.set_state(row_of(page.slot), state)

    def touch(self, pages: Sequence[PoolPage], now_s: float) -> None:
        """Note the use of pages, the first of them last, so that a prefix's head outlives its tail.

        Pages touched within the last second are skipped: a hot prefix would cost more than all others together.
        """
        for page in reversed(pages):
            if page.slot != NO_SLOT and not 0 <= now_s - page.touched_s < _TOUCHED_AGAIN_S:
                page.touched_s = now_s
                self._eviction.touched(page.page_id)
                self.table.set_last_use(row_of(page.slot), now_s)

    def identity(self, page: PoolPage) -> PageIdentity | None:
        """Identity of a page with a slot; None for other groups than the lead.

        Raises:
            ValueError: its trailer is damaged.
        """
        if page.group != self._lead:
            return None
        at = page.offset + self._identity_at
        return PageIdentity.decode(self.arena.view[at : at + self._identity_room])

    def _enter(self, page: PoolPage, identity: PageIdentity | None) -> None:
        lead = self._lead
        if page.group != lead:
            parent: bytes | None = page_id(page.key, lead)
        else:
            parent = page_id(identity.parent, lead) if identity is not None and identity.parent else None
        self._by_id[page.page_id] = page
        self._eviction.added(page.page_id, self._slot_bytes[page.group], page.group, parent, page.tenant)

    def _free_row(self, slot_bytes: int, tenant: bytes) -> int | None:
        """A free slot of that size for a page of a tenant. Pages go until there is one.

        If the next page to go has another size, its whole slab goes: only a slab that is empty can be cut anew.
        """
        row = self._slabs.take(slot_bytes)
        if row is not None:
            return row
        stuck: set[int] = set()
        most_slots = self._slabs.most_slots

        def may_go(page_id: bytes) -> bool:
            page = self._by_id[page_id]
            return not page.in_use and row_of(page.slot) // most_slots not in stuck

        while (row := self._slabs.take(slot_bytes)) is None:
            victim = self._eviction.victim(tenant, slot_bytes, may_go)
            if victim is None:
                return None
            going = [self._by_id[victim]]
            taken = row_of(going[0].slot)
            if self._slabs.size_of(taken) != slot_bytes:
                going = [self.rows[each] for each in self._slabs.neighbours(taken)]
                ids = [page.page_id for page in going]
                if any(page.in_use for page in going) or not self._eviction.may_lose(tenant, slot_bytes, ids):
                    stuck.add(taken // most_slots)
                    continue
            for page in going:
                self.free(page)
                self._evicted(page)
        return row
