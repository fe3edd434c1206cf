"""The store against a model, over random requests, ends of sessions, reads and writes."""

import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.eviction import LruEviction
from prfaas.core.pool.geometry import PageGroup, PoolGeometry
from prfaas.core.pool.keys import page_id, tenant_id
from prfaas.core.pool.quota import TenantEviction
from prfaas.serving.pool.arena import ArenaLayout, create_arena, open_arena
from prfaas.serving.pool.memory_tier import NO_SLOT
from prfaas.serving.pool.page_table import PageState, row_of
from prfaas.serving.pool.processes import Owner
from prfaas.serving.pool.protocol import Match as Question
from prfaas.serving.pool.protocol import Matched, PageRef, page_refs
from prfaas.serving.pool.recovery import recover
from prfaas.serving.pool.store import PageStore, StoreSession

from .pool_daemon import TENANT, chain_of, packed_chain, pages_of, part_of
from .stepped_ssd import RecordedEvents, SteppedSsd

RANKS = 2
GEOMETRY = PoolGeometry(
    "model",
    RANKS,
    (
        PageGroup(0, GroupKind.FULL, 32, 0, 1024),
        PageGroup(1, GroupKind.STATE, 32, 0, 4096),
        PageGroup(2, GroupKind.WINDOW, 16, 40, 256),
        PageGroup(5, GroupKind.FULL, 16, 0, 512),
    ),
)
# Prompts that share beginnings; of each, every salt has its own pages.
PROMPTS = [
    [*range(160)],
    [*range(96), *range(1000, 1100)],
    [*range(64), *range(2000, 2030)],
    [*range(5000, 5128)],
]
SALTS = ("", "tenant a", "tenant b")
ENGINES = [Owner(100, 1, b"engine 1"), Owner(100, 1, b"engine 2"), Owner(200, 7, b"engine 1")]
prompts = st.sampled_from(range(len(PROMPTS)))
salts = st.sampled_from(SALTS)
numbers = st.integers(0, 1 << 20)
Match = tuple[StoreSession, Matched, list[tuple[bytes, PageRef]]]


class Copy:
    """A worker that has the order to write its part of a page, and may do so until it has ended."""

    def __init__(self, owner: Owner, rank: int, page: bytes, ref: PageRef, epoch: int) -> None:
        self.owner, self.rank, self.page, self.ref, self.epoch = owner, rank, page, ref, epoch


class StoreMachine(RuleBasedStateMachine):
    """`copies`: every process that may still write somewhere, whatever became of its order."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "arena"
        self.time_s = 0.0
        self.copies: list[Copy] = []
        self.matches: list[Match] = []
        self.own_pins: list[tuple[bytes, PageRef]] = []
        self.own_writes: list[tuple[bytes, PageRef]] = []
        self.schedulers: list[StoreSession] = []
        self.workers: dict[tuple[Owner, int], StoreSession] = {}
        self.events = RecordedEvents()
        self.ssd: SteppedSsd | None = None

    @initialize(has_ssd=st.sampled_from([True, True, False]), slabs=st.integers(4, 30))
    def begin(self, has_ssd: bool, slabs: int) -> None:
        self.memory_bytes = 30_000 + slabs * 8192
        layout = ArenaLayout.of(GEOMETRY, self.memory_bytes)
        self.arena = create_arena(self.path, layout, 1)
        if has_ssd:
            self.ssd = SteppedSsd(GEOMETRY, self.arena.view)
        self.open_store()

    def open_store(self) -> None:
        self.events.opened(GEOMETRY, self.arena.epoch)
        self.store = PageStore(
            self.arena,
            TenantEviction(self.arena.layout.pages_bytes, LruEviction),
            events=self.events,
            ssd=self.ssd,
            time_s=lambda: self.time_s,
        )
        lives = {copy.owner for copy in self.copies}
        recover(self.store, lambda owner: owner in lives)
        for slab in range(self.arena.layout.slabs):
            self.store.memory.add_slab(slab)

    def scheduler(self, number: int) -> StoreSession:
        if not self.schedulers:
            self.schedulers.append(self.store.open_session("scheduler", 0, ENGINES[number % len(ENGINES)]))
        return self.schedulers[number % len(self.schedulers)]

    @rule(
        what=st.integers(0, 11), engine=st.sampled_from(ENGINES), number=numbers, prompt=prompts, salt=salts
    )
    def disturb(self, what: int, engine: Owner, number: int, prompt: int, salt: str) -> None:
        """One of what happens seldom."""
        match what:
            case 0:
                self.open_scheduler(engine)
            case 1:
                self.open_worker(engine, number % RANKS)
            case 2 if self.schedulers:
                self.close_scheduler(number)
            case 3 if self.workers:
                self.close_worker(number // 2, bool(number % 2))
            case 4:
                self.end_engine(engine)
            case 5:
                self.ssd_gives_up_a_page(number)
            case 6:
                self.ssd_is_full(bool(number % 2))
            case 7:
                self.store.clear()
            case 8:
                self.restart()
            case 9:
                self.reserve_in_vain(number, prompt, salt)
            case 10:
                self.discard(prompt, salt)
            case 11 if self.copies:
                self.abort(number)

    def open_scheduler(self, engine: Owner) -> None:
        self.schedulers.append(self.store.open_session("scheduler", 0, engine))

    def open_worker(self, engine: Owner, rank: int) -> None:
        """A client opens a session only when none of its copies runs; later it goes on with those of this epoch."""
        self.copies = [
            copy
            for copy in self.copies
            if (copy.owner, copy.rank) != (engine, rank) or copy.epoch == self.store.epoch
        ]
        session = self.store.open_session("worker", rank, engine)
        earlier = self.workers.pop((engine, rank), None)
        self.workers[engine, rank] = session
        if earlier is not None:
            self.store.close_session(earlier, writes_no_more=False)

    def close_scheduler(self, number: int) -> None:
        session = self.schedulers.pop(number % len(self.schedulers))
        self.matches = [match for match in self.matches if match[0] is not session]
        self.store.close_session(session, writes_no_more=False)

    def close_worker(self, number: int, writes_no_more: bool) -> None:
        key = list(self.workers)[number % len(self.workers)]
        session = self.workers.pop(key)
        if writes_no_more:
            self.copies = [copy for copy in self.copies if (copy.owner, copy.rank) != key]
        self.store.close_session(session, writes_no_more=writes_no_more)

    def end_engine(self, engine: Owner) -> None:
        """All its processes end; the daemon notices by their sessions and by the process table."""
        self.copies = [copy for copy in self.copies if copy.owner != engine]
        for session in [each for each in self.schedulers if each.owner == engine]:
            self.schedulers.remove(session)
            self.matches = [match for match in self.matches if match[0] is not session]
            self.store.close_session(session, writes_no_more=True)
        for key in [each for each in self.workers if each[0] == engine]:
            self.store.close_session(self.workers.pop(key), writes_no_more=True)
        self.store.reservations.owner_ended(engine)

    @rule(number=numbers, prompt=prompts, salt=salts, forged=st.binary(max_size=8), first=st.integers(0, 8))
    def reserve(self, number: int, prompt: int, salt: str, forged: bytes, first: int) -> None:
        session = self.scheduler(number)
        for rank in range(RANKS):
            if (session.owner, rank) not in self.workers:
                self.open_worker(session.owner, rank)
        wished = pages_of(GEOMETRY, PROMPTS[prompt], salt)[first : first + 8]
        refs = self.store.reserve(forged, wished, session)
        for (page, _), ref in zip(wished, refs, strict=True):
            if ref is not None:
                self.copies += [
                    Copy(session.owner, rank, page, ref, self.store.epoch) for rank in range(RANKS)
                ]

    @rule(number=numbers, prompt=prompts, salt=salts, end=st.integers(1, 10))
    def store_well(self, number: int, prompt: int, salt: str, end: int) -> None:
        """What engines do most: attention blocks and windows, a state where the prompt ends, all committed."""
        pages = pages_of(GEOMETRY, PROMPTS[prompt][: end * 32], salt)
        states = [page for page in pages if page[0][-1] == 1]
        wished = [page for page in pages if page not in states[:-1]]
        refs = self.store.reserve(TENANT, wished, self.scheduler(number))
        for rank in range(RANKS):
            for (page, _), ref in zip(wished, refs, strict=True):
                if ref is not None:
                    part = self.write(Copy(ENGINES[0], rank, page, ref, 0))
                    self.store.reservations.commit(ref.slot, rank, xxhash.xxh3_64_intdigest(part))

        self.step_ssd(0, number % 40, True)

    @rule(number=numbers, prompt=prompts, salt=salts, end=st.integers(1, 10))
    def store_and_match(self, number: int, prompt: int, salt: str, end: int) -> None:
        self.store_well(number, prompt, salt, end)
        self.match(number, prompt, salt, 0, True)

    @precondition(lambda self: self.copies)
    @rule(number=numbers, count=st.integers(1, 12))
    def commit(self, number: int, count: int) -> None:
        for _ in range(min(count, len(self.copies))):
            copy = self.copies.pop(number % len(self.copies))
            part = self.write(copy)
            self.store.reservations.commit(copy.ref.slot, copy.rank, xxhash.xxh3_64_intdigest(part))

    @precondition(lambda self: self.copies)
    @rule(number=numbers)
    def write_some(self, number: int) -> None:
        """A worker is in the middle of a copy: what it wrote is garbage so far."""
        copy = self.copies[number % len(self.copies)]
        begin = copy.ref.offset + GEOMETRY.rank_offset(copy.page[-1], copy.rank)
        size = GEOMETRY.group(copy.page[-1]).rank_bytes
        self.arena.view[begin : begin + size] = b"\x5a" * size

    def abort(self, number: int) -> None:
        copy = self.copies.pop(number % len(self.copies))
        self.store.reservations.abort(copy.ref.slot, copy.rank)

    def reserve_in_vain(self, number: int, prompt: int, salt: str) -> None:
        """A scheduler gives no order after all."""
        wished = pages_of(GEOMETRY, PROMPTS[prompt], salt)[:3]
        refs = self.store.reserve(TENANT, wished, self.scheduler(number))
        for ref in refs:
            if ref is not None:
                self.store.reservations.abort_all(ref.slot)

    @rule(number=numbers, prompt=prompts, salt=salts, start=st.integers(0, 100), whole=st.booleans())
    def match(self, number: int, prompt: int, salt: str, start: int, whole: bool) -> None:
        session, limit = self.scheduler(number), len(PROMPTS[prompt]) - 1
        chain = chain_of(GEOMETRY, PROMPTS[prompt], salt)
        before = self.held_pages()
        asked = Question(packed_chain(chain), start, limit, whole=whole, tenant=tenant_id(salt), pin=False)
        found = self.store.match(session, asked)
        assert (found.usable_tokens, found.attention_tokens) == self.expected_end(
            before, prompt, salt, start, limit, whole
        )
        found = self.store.match(session, msgspec.structs.replace(asked, pin=True))
        assert found.usable_tokens <= limit
        pages = []
        for group, first, slots, offsets in found.pages:
            block_tokens = GEOMETRY.group(group).block_tokens
            for block, ref in enumerate(page_refs(slots, offsets), first):
                expected = page_id(chain.key_at((block + 1) * block_tokens), group)
                assert self.store.memory.rows[row_of(ref.slot)].page_id == expected
                assert expected in before
                pages.append((expected, ref))
        if found.pin:
            assert found.memory_tokens <= found.usable_tokens
            self.matches.append((session, found, pages))

    @precondition(lambda self: self.matches)
    @rule(number=numbers)
    def unpin(self, number: int) -> None:
        session, found, _ = self.matches.pop(number % len(self.matches))
        self.store.unpin_match(session, found.pin)

    @rule(prompt=prompts, salt=salts)
    def pin_inside(self, prompt: int, salt: str) -> None:
        wished = [page for page, _ in pages_of(GEOMETRY, PROMPTS[prompt], salt)[2:5]]
        for page, ref in zip(wished, self.store.pin(wished), strict=True):
            if ref is not None:
                self.own_pins.append((page, ref))

    @precondition(lambda self: self.own_pins)
    @rule(number=numbers)
    def unpin_inside(self, number: int) -> None:
        self.store.unpin([self.own_pins.pop(number % len(self.own_pins))[1]])

    @rule(prompt=prompts, salt=salts)
    def reserve_inside(self, prompt: int, salt: str) -> None:
        wished = pages_of(GEOMETRY, PROMPTS[prompt], salt)[:4]
        for (page, _), ref in zip(wished, self.store.reserve(TENANT, wished), strict=True):
            if ref is not None:
                self.own_writes.append((page, ref))

    @precondition(lambda self: self.own_writes)
    @rule(number=numbers, commits=st.booleans())
    def end_inside(self, number: int, commits: bool) -> None:
        page, ref = self.own_writes.pop(number % len(self.own_writes))
        if not commits:
            self.store.abort([ref])
            return
        parts = [self.write(Copy(ENGINES[0], rank, page, ref, 0)) for rank in range(RANKS)]
        self.store.commit_all(ref, [xxhash.xxh3_64_intdigest(part) for part in parts])

    def discard(self, prompt: int, salt: str) -> None:
        self.store.discard([page for page, _ in pages_of(GEOMETRY, PROMPTS[prompt], salt) if page[-1] == 1])

    @rule()
    def settle(self) -> None:
        self.time_s += 1.0
        self.store.settle()

    @rule(number=numbers, count=st.integers(1, 20), succeeds=st.sampled_from([True, True, True, False]))
    def step_ssd(self, number: int, count: int, succeeds: bool) -> None:
        for _ in range(count if self.ssd is not None else 0):
            assert self.ssd is not None
            self.ssd.step(number, succeeds=succeeds)

    def ssd_gives_up_a_page(self, number: int) -> None:
        if self.ssd is not None and self.ssd.pages:
            page = list(self.ssd.pages)[number % len(self.ssd.pages)]
            del self.ssd.pages[page]
            self.store.dropped_by_ssd(page)

    def ssd_is_full(self, takes_writes: bool) -> None:
        if self.ssd is not None:
            self.ssd.takes_writes = takes_writes

    def restart(self) -> None:
        """The daemon is killed; engines live, and some of their copies go on for a while."""
        readable = {row.page_id for row in self.arena.table.used_rows() if row.state.is_readable}
        on_ssd = set() if self.ssd is None else set(self.ssd.pages)
        arena = open_arena(self.path, self.memory_bytes)
        assert arena is not None
        self.arena = arena
        arena.begin_epoch(arena.epoch + 1)
        if self.ssd is not None:
            self.ssd.waiting.clear()
            self.ssd.view = arena.view
        self.matches, self.own_pins, self.own_writes = [], [], []
        self.schedulers, self.workers = [], {}
        self.open_store()
        assert self.held_pages() == readable | on_ssd
        for row in arena.table.used_rows():
            slot = arena.table.slot(row.row)
            to_verify = arena.table.checksums_to_verify([slot], 1).get(slot)
            assert to_verify == (
                row.checksums[1] if row.page_id in readable and row.state.is_readable else None
            )

    def write(self, copy: Copy) -> bytes:
        part = part_of(GEOMETRY, copy.page, copy.rank)
        begin = copy.ref.offset + GEOMETRY.rank_offset(copy.page[-1], copy.rank)
        self.arena.view[begin : begin + len(part)] = part
        return part

    def held_pages(self) -> set[bytes]:
        return {page.page_id for pages in self.store.held.values() for page in pages.values()}

    def expected_end(
        self, held: set[bytes], prompt: int, salt: str, start: int, limit: int, whole: bool
    ) -> tuple[int, int]:
        """By the definition: try every end."""
        chain = chain_of(GEOMETRY, PROMPTS[prompt], salt)

        def has(group: PageGroup, block: int) -> bool:
            end = (block + 1) * group.block_tokens
            return end <= chain.num_tokens and page_id(chain.key_at(end), group.index) in held

        groups = [group for group in GEOMETRY.groups if whole or group.kind is GroupKind.FULL]
        usable = 0
        for end in range(16, limit + 1, 16):
            if end > start and all(
                end % group.block_tokens == 0
                and all(has(group, block) for block in group.moving_blocks(end, start))
                for group in groups
            ):
                usable = end
        attention = []
        for group in groups:
            if group.kind is GroupKind.FULL:
                block = start // group.block_tokens
                while (block + 1) * group.block_tokens <= limit and has(group, block):
                    block += 1
                attention.append(block * group.block_tokens)
        return usable, max(min(attention), start // 16 * 16)

    @invariant()
    def ready_pages_have_their_bytes(self) -> None:
        for page in self.store.memory.rows.values():
            if page.state.is_readable:
                for rank in range(RANKS):
                    part = part_of(GEOMETRY, page.page_id, rank)
                    begin = page.offset + GEOMETRY.rank_offset(page.group, rank)
                    assert self.arena.view[begin : begin + len(part)] == part
                    assert page.checksums[rank] == xxhash.xxh3_64_intdigest(part)

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        store = self.store
        spans = []
        for row, page in store.memory.rows.items():
            told = store.memory.table.read(row)
            assert (told.state, told.page_id) == (page.state, page.page_id)
            assert store.memory.table.state(page.slot) is page.state
            spans.append((page.offset, page.offset + GEOMETRY.page_bytes(page.group)))
            is_held = store.held[page.group].get(page.key) is page
            assert is_held == (page.state not in (PageState.WRITING, PageState.FAILED))
        spans.sort()
        layout = store.memory.arena.layout
        assert all(layout.slabs_at <= begin and end <= layout.arena_bytes for begin, end in spans)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert layout.arena_bytes <= self.memory_bytes
        used = {row.row for row in store.memory.table.used_rows()}
        assert used == set(store.memory.rows)
        for pages in store.held.values():
            for page in pages.values():
                assert page.slot != NO_SLOT or (page.on_ssd and page.state is PageState.ON_SSD)
                assert not page.on_ssd or (self.ssd is not None and self.ssd.entry(page.page_id) is not None)

    @invariant()
    def pins_are_conserved(self) -> None:
        pins: dict[int, int] = {}
        for _, _, pages in self.matches:
            for _, ref in pages:
                pins[ref.slot] = pins.get(ref.slot, 0) + 1
        for _, ref in self.own_pins:
            pins[ref.slot] = pins.get(ref.slot, 0) + 1
        there = {page.slot: page.pins for page in self.store.memory.rows.values() if page.pins}
        assert there == pins

    @invariant()
    def nobody_writes_into_another_page(self) -> None:
        """A process that may still copy does it into a slot that nothing else uses."""
        for copy in self.copies:
            page = self.store.memory.rows.get(copy.ref.slot & 0xFFFFFFFF)
            assert page is not None
            assert page.page_id == copy.page
            assert page.state is PageState.WRITING

    @invariant()
    def who_listens_knows_what_is_held(self) -> None:
        there = set()
        for pages in self.store.held.values():
            for page in pages.values():
                if page.slot != NO_SLOT and page.state is not PageState.PROMOTING:
                    there.add((page.page_id, "memory"))
                if page.on_ssd:
                    there.add((page.page_id, "ssd"))
        assert self.events.held == there
        for medium, pages_of_groups in self.store.tier_pages.items():
            for group, count in pages_of_groups.items():
                assert count == sum(page[-1] == group and tier == medium for page, tier in there)

    def teardown(self) -> None:
        self.directory.cleanup()


StoreMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=80, report_multiple_bugs=False
)
TestStore = pytest.mark.slow("a property over many sequences of steps")(StoreMachine.TestCase)
