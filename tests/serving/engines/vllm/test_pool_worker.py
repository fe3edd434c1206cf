"""What a rank reads from a pool and writes into it, over an arena in numpy memory."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PoolGeometry, PoolGeometryError
from prfaas.serving.engines.vllm.arena_pages import ArenaPages
from prfaas.serving.engines.vllm.connector_worker import PoolWorker
from prfaas.serving.engines.vllm.device_pages import DevicePages
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout
from prfaas.serving.engines.vllm.metadata import PoolLoad, PoolPages, PoolStore
from prfaas.serving.engines.vllm.pages import HostPages, LayerPages
from prfaas.serving.engines.vllm.pool_reader import PoolReader
from prfaas.serving.engines.vllm.rank_pages import RankPages, pool_geometry
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.protocol import PageRef

STATE = EngineGroup(1, GroupKind.STATE, 16, 0, ("g0", "g1", "g2"))
FULL = EngineGroup(0, GroupKind.FULL, 16, 0, ("a0", "a1"))
WINDOW = EngineGroup(2, GroupKind.WINDOW, 8, 20, ("w0",))
GROUPS = (STATE, FULL, WINDOW)
NUM_BLOCKS = 64
PAGE_BYTES = {"a0": 4096, "a1": 4096, "g0": 1000, "g1": 1000, "g2": 1000, "w0": 512}
Memory = dict[str, np.ndarray]
T = TypeVar("T")


def memory(seed: int) -> Memory:
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 256, (NUM_BLOCKS, size), dtype=np.uint8) for name, size in PAGE_BYTES.items()
    }


def layout(kv: Memory, pages: Callable[[torch.Tensor], LayerPages] = HostPages) -> KvLayout:
    return KvLayout(GROUPS, {name: [pages(torch.from_numpy(each))] for name, each in kv.items()})


def copy_of(kv: Memory) -> Memory:
    return {name: pages.copy() for name, pages in kv.items()}


@dataclass
class ArenaClient:
    """A session with a daemon that has an arena in this process, and hears but does not answer."""

    geometry: PoolGeometry
    slots: int = 200
    epoch: int = 7
    states: dict[int, PageState] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    """Of pages that must be verified."""
    committed: dict[int, int] = field(default_factory=dict)
    aborted: list[int] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    """A copy into the arena has begun."""
    may_write: threading.Event = field(default_factory=threading.Event)
    closed: bool = False

    def __post_init__(self) -> None:
        self.slot_bytes = max(self.geometry.page_bytes(group.index) for group in self.geometry.groups)
        self.arena = np.random.default_rng(9).integers(0, 256, self.slots * self.slot_bytes, dtype=np.uint8)
        self.may_write.set()

    def ref(self, slot: int, state: PageState) -> PageRef:
        self.states[slot] = state
        return PageRef(slot, slot * self.slot_bytes)

    def page_state(self, slot: int) -> PageState:
        return self.states.get(slot, PageState.FREE)

    def page_states(self, pages: Sequence[PageRef]) -> npt.NDArray[np.uint8]:
        return np.array([self.page_state(page.slot) for page in pages], np.uint8)

    def checksums_to_verify(self, pages: Sequence[PageRef]) -> dict[int, int]:
        return {page.slot: self.checksums[page.slot] for page in pages if page.slot in self.checksums}

    def intact(self, epoch: int, pages: Sequence[PageRef]) -> bool:
        return epoch == self.epoch and all(self.page_state(page.slot).is_readable for page in pages)

    @contextmanager
    def writing(self, epoch: int) -> Iterator[bool]:
        self.entered.set()
        assert self.may_write.wait(60)
        yield epoch == self.epoch

    def commit(self, pages: Sequence[tuple[PageRef, int]]) -> None:
        self.committed |= {page.slot: checksum for page, checksum in pages}

    def abort(self, pages: Sequence[PageRef]) -> None:
        self.aborted += [page.slot for page in pages]

    def close(self) -> None:
        self.closed = True


@dataclass
class Rank:
    """One rank of an engine at a pool."""

    kv: Memory
    client: ArenaClient
    worker: PoolWorker
    stats: ConnectorStats

    def reserved(self, count: int, first_slot: int) -> tuple[PageRef, ...]:
        return tuple(self.client.ref(first_slot + i, PageState.WRITING) for i in range(count))

    def ready(self, *parts: PoolPages) -> None:
        for part in parts:
            self.client.states |= dict.fromkeys((page.slot for page in part.pages), PageState.READY)

    def results(self, wait_s: float = 60.0) -> tuple[set[str], set[str]]:
        return awaited(self.worker.reader.results, lambda results: bool(results[0]), wait_s)

    def finished(self, wait_s: float = 60.0) -> set[str]:
        return awaited(self.worker.writer.finished, bool, wait_s)

    def stored(self, *parts: PoolPages, request_id: str = "s", urgent: bool = False) -> None:
        """Store and wait until the daemon has heard of it."""
        self.worker.writer.order([PoolStore(request_id, self.client.epoch, parts, urgent)])
        slots = {page.slot for part in parts for page in part.pages}
        awaited(lambda: self.client.committed.keys() >= slots, bool)
        self.ready(*parts)


def awaited(look: Callable[[], T], is_there: Callable[[T], object], wait_s: float = 60.0) -> T:
    deadline_s = time.monotonic() + wait_s
    while not is_there(found := look()):
        assert time.monotonic() < deadline_s, "nothing came of it"
        time.sleep(0.001)
    return found


def make_rank(
    kv: Memory,
    client: ArenaClient | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
    load_wait_s: float = 60.0,
    pages: Callable[[torch.Tensor], LayerPages] = HostPages,
) -> Rank:
    engine = layout(kv, pages)
    geometry = pool_geometry(engine, "f", ranks)
    client = client or ArenaClient(geometry)
    stats = ConnectorStats()
    worker = PoolWorker(engine, geometry, rank, cast(PoolClient, client), load_wait_s, stats)
    return Rank(kv, client, worker, stats)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = make_rank(memory(1))
    yield made
    made.client.may_write.set()
    made.worker.close()
    assert made.client.closed


def parts_of(
    rank: Rank, blocks: dict[int, list[int]], slots: dict[int, list[int]] | None = None
) -> tuple[PoolPages, ...]:
    """Blocks of each group with reserved pages; `slots`: else in order from 0 on."""
    parts, slot = [], 0
    for group, ids in blocks.items():
        chosen = slots[group] if slots is not None else list(range(slot, slot + len(ids)))
        slot += len(ids)
        refs = tuple(rank.client.ref(each, PageState.WRITING) for each in chosen)
        parts.append(PoolPages(group, 3, tuple(ids), refs))
    return tuple(parts)


def at_blocks(parts: Sequence[PoolPages], shift: int) -> tuple[PoolPages, ...]:
    """The same pages for other blocks."""
    return tuple(
        PoolPages(part.group, part.first_block, tuple(block + shift for block in part.block_ids), part.pages)
        for part in parts
    )


def assert_filled(
    kv: Memory, source: Memory, before: Memory, blocks: dict[int, list[int]], shift: int
) -> None:
    """Blocks `shift` behind those of `source` are equal to them, every other one is what it was."""
    for group in GROUPS:
        for name in group.layer_names:
            expected = before[name].copy()
            for block in blocks.get(group.index, []):
                expected[block + shift] = source[name][block]
            assert np.array_equal(kv[name], expected), name


@pytest.mark.parametrize("pages", [HostPages, DevicePages])
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_come_back_byte_for_byte_in_other_blocks(
    pages: Callable[[torch.Tensor], LayerPages], ranks: int
) -> None:
    blocks = {0: [1, 2, 3, 4, 5, 9], 1: [7], 2: [20, 19, 18, 17, 9, 7, 5, 3, 1, 30]}
    geometry = pool_geometry(layout(memory(0)), "f", ranks)
    client = ArenaClient(geometry)
    workers = [make_rank(memory(i), client, rank=i, ranks=ranks, pages=pages) for i in range(ranks)]
    parts = parts_of(workers[0], blocks)
    for each in workers:
        client.committed.clear()
        each.client.states |= dict.fromkeys(client.states, PageState.WRITING)
        each.stored(*parts)
    for each in workers:
        before = copy_of(each.kv)
        each.worker.reader.order([PoolLoad("r", 1, client.epoch, at_blocks(parts, 30))])
        assert each.results() == ({"r"}, set())
        assert_filled(each.kv, before, before, blocks, 30)
        each.worker.close()


def test_checksums_are_of_this_ranks_part_with_zeros_behind_its_content(rank: Rank) -> None:
    parts = parts_of(rank, {1: [7, 8]})
    rank.stored(*parts, urgent=True)
    part_bytes = rank.client.geometry.group(1).rank_bytes
    for block, page in zip((7, 8), parts[0].pages, strict=True):
        content = b"".join(rank.kv[name][block].tobytes() for name in STATE.layer_names)
        expected = content.ljust(part_bytes, b"\0")
        assert rank.client.arena[page.offset : page.offset + part_bytes].tobytes() == expected
        assert rank.client.committed[page.slot] == xxh3_64_intdigest(expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_layout_and_any_places(data: st.DataObject) -> None:
    """Whatever pages there are, wherever they lie: what is stored comes back, and nothing else is touched."""
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    group = EngineGroup(0, GroupKind.FULL, 16, 0, tuple(f"l{i}" for i in range(len(sizes))))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    kv = {f"l{i}": random.integers(0, 256, (40, size), dtype=np.uint8) for i, size in enumerate(sizes)}
    engine = KvLayout([group], {name: [HostPages(torch.from_numpy(each))] for name, each in kv.items()})
    ranks = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(0, ranks - 1))
    geometry = pool_geometry(engine, "f", ranks)
    copies = RankPages(engine, geometry, rank)
    count = data.draw(st.integers(1, 15))
    step = data.draw(st.sampled_from([-1, 1, 2, 0]))
    ids = list(range(1, 40))
    blocks = (
        [20 + step * i for i in range(count)]
        if step and 20 + step * count < 40
        else data.draw(st.permutations(ids))[:count]
    )
    slots = data.draw(st.one_of(st.just(list(range(count))), st.permutations(list(range(20)))))[:count]
    slot_bytes = geometry.page_bytes(0) + data.draw(st.integers(0, 1)) * 64
    arena = random.integers(0, 256, 20 * slot_bytes, dtype=np.uint8)
    before = arena.copy()
    refs = [PageRef(slot, slot * slot_bytes) for slot in slots]
    copies.store(arena, 0, blocks, refs)
    start = geometry.rank_offset(0, rank)
    content = sum(sizes)
    for block, ref in zip(blocks, refs, strict=True):
        part = before[ref.offset + start :][: geometry.group(0).rank_bytes]
        part[:content] = np.concatenate([kv[name][block] for name in group.layer_names])
        part[content:] = 0
    assert np.array_equal(arena, before)
    expected = copy_of(kv)
    targets = data.draw(st.permutations(ids))[:count]
    for name in group.layer_names:
        expected[name][targets] = kv[name][blocks]
    copies.load(arena, 0, targets, refs)
    for name in group.layer_names:
        assert np.array_equal(kv[name], expected[name])


def test_blocks_and_slots_in_order_are_copied_in_runs() -> None:
    arena = np.zeros(100 * 64, np.uint8)
    up = ArenaPages(arena, list(range(5, 25)), [64 * i for i in range(20)])
    assert [len(run.blocks) for run in up.runs] == [20] and not up.singles
    down = ArenaPages(arena, [9, 3, *range(30, 20, -1)], [0, 64 * 50, *(64 * i for i in range(20, 40, 2))])
    assert [(run.blocks, run.stride_bytes) for run in down.runs] == [(range(30, 20, -1), 128)]
    assert down.singles == [(9, 0), (3, 64 * 50)]


def test_a_load_reads_what_promotion_brings_page_by_page(rank: Rank) -> None:
    source = copy_of(rank.kv)
    blocks = {0: [1, 2, 3]}
    (part,) = parts_of(rank, blocks)
    rank.stored(part)
    rank.client.states[part.pages[1].slot] = PageState.PROMOTING
    rank.client.states[part.pages[2].slot] = PageState.SPILLING
    rank.worker.reader.order([PoolLoad("r", 1, 7, at_blocks([part], 30))])
    awaited(lambda: np.array_equal(rank.kv["a1"][31], source["a1"][1]), bool)
    assert rank.worker.reader.results() == (set(), set())
    assert np.array_equal(rank.kv["a0"][32:34], source["a0"][32:34])
    # Another load does not wait for this one.
    rank.worker.reader.order([PoolLoad("other", 1, 7, (PoolPages(0, 0, (50,), part.pages[:1]),))])
    assert rank.results() == ({"other"}, set())
    rank.ready(part)
    assert rank.results() == ({"r"}, set())
    assert_filled(rank.kv, source, after_other(source), blocks, 30)
    times = rank.worker.reader.take_times()
    assert times is not None and set(times.loads) == {"r", "other"}
    assert times.loads["r"].wait_s > 0 and times.loads["other"].wait_s == 0
    assert times.loads["r"].loaded_bytes == 3 * 8192
    assert rank.worker.reader.take_times() is None


def after_other(source: Memory) -> Memory:
    """`source` after block 1 of group 0 was loaded into block 50, too."""
    changed = copy_of(source)
    for name in FULL.layer_names:
        changed[name][50] = source[name][1]
    return changed


@pytest.mark.parametrize("state", [PageState.FREE, PageState.WRITING, PageState.FAILED, PageState.ON_SSD])
def test_a_page_that_cannot_be_read_fails_the_load_once(rank: Rank, state: PageState) -> None:
    (part,) = parts_of(rank, {0: [1, 2]})
    rank.stored(part)
    rank.client.states[part.pages[1].slot] = state
    rank.worker.reader.order([PoolLoad("r", 1, 7, at_blocks([part], 30))])
    assert rank.results() == ({"r"}, {"r"})
    assert rank.worker.reader.results() == (set(), set())
    assert rank.stats.data["pool_loads_failed"] == 1


def test_a_page_that_never_comes_from_the_ssd_fails_the_load() -> None:
    rank = make_rank(memory(1), load_wait_s=0.05)
    (part,) = parts_of(rank, {0: [1]})
    rank.client.states[part.pages[0].slot] = PageState.PROMOTING
    rank.worker.reader.order([PoolLoad("r", 1, 7, (part,))])
    assert rank.results() == ({"r"}, {"r"})
    rank.worker.close()


def test_a_damaged_page_that_outlived_a_daemon_is_not_loaded(rank: Rank) -> None:
    parts = parts_of(rank, {0: [1, 2], 1: [7]})
    rank.stored(*parts)
    rank.client.checksums = dict(rank.client.committed)
    rank.worker.reader.order([PoolLoad("r", 1, 7, at_blocks(parts, 30))])
    assert rank.results() == ({"r"}, set())
    rank.client.arena[parts[1].pages[0].offset + 2999] ^= 1
    rank.worker.reader.order([PoolLoad("r", 1, 7, at_blocks(parts, 30))])
    assert rank.results() == ({"r"}, {"r"})


class OtherEpoch(ArenaClient):
    """Its daemon is restarted while pages are copied out: seen only behind the last one."""

    def intact(self, epoch: int, pages: Sequence[PageRef]) -> bool:
        self.epoch += 1
        return super().intact(epoch, pages)


def test_a_daemon_that_is_restarted_fails_the_loads_of_before(rank: Rank) -> None:
    (part,) = parts_of(rank, {0: [1]})
    rank.stored(part)
    rank.worker.reader.order([PoolLoad("old", 1, 6, (part,))])
    assert rank.results() == ({"old"}, {"old"})
    restarted = make_rank(memory(1), OtherEpoch(rank.client.geometry))
    restarted.client.ref(0, PageState.READY)
    restarted.worker.reader.order([PoolLoad("r", 1, 7, (part,))])
    assert restarted.results() == ({"r"}, {"r"})
    restarted.worker.close()


@pytest.mark.parametrize("wrong", ["null block", "outside", "unknown group"])
def test_an_order_that_makes_no_sense_fails_and_the_next_one_does_not(rank: Rank, wrong: str) -> None:
    (part,) = parts_of(rank, {0: [1]})
    rank.stored(part)
    page = part.pages[0]
    bad = {
        "null block": PoolPages(0, 0, (0,), (page,)),
        "outside": PoolPages(0, 0, (1,), (PageRef(page.slot, len(rank.client.arena) - 64),)),
        "unknown group": PoolPages(5, 0, (1,), (page,)),
    }[wrong]
    before = copy_of(rank.kv)
    rank.worker.reader.order([PoolLoad("bad", 1, 7, (bad,)), PoolLoad("good", 1, 7, at_blocks([part], 30))])
    ended: set[str] = set()
    failed: set[str] = set()
    while len(ended) < 2:
        ended_now, failed_now = rank.results()
        ended |= ended_now
        failed |= failed_now
    assert failed == {"bad"}
    assert_filled(rank.kv, before, before, {0: [1]}, 30)


def test_a_store_that_cannot_be_is_aborted(rank: Rank) -> None:
    page = rank.client.ref(0, PageState.WRITING)
    rank.worker.writer.order([PoolStore("s", 7, (PoolPages(0, 0, (0,), (page,)),), urgent=True)])
    rank.worker.writer.settle(())
    awaited(lambda: rank.client.aborted, bool)
    assert rank.client.aborted == [0] and not rank.client.committed


@pytest.mark.parametrize("lost", ["epoch", "reservation"])
def test_nothing_is_written_where_the_daemon_has_other_use_for_the_slot(rank: Rank, lost: str) -> None:
    page = rank.client.ref(0, PageState.WRITING if lost == "epoch" else PageState.READY)
    before = rank.client.arena.copy()
    epoch = 6 if lost == "epoch" else 7
    rank.worker.writer.order([PoolStore("s", epoch, (PoolPages(0, 0, (1,), (page,)),), urgent=False)])
    rank.worker.writer.hold(["s"])
    assert rank.finished() == {"s"}
    assert np.array_equal(rank.client.arena, before) and not rank.client.committed


def test_what_is_urgent_is_copied_before_the_next_step_and_before_what_is_not(rank: Rank) -> None:
    """Their blocks may be written over as soon as `settle` returns."""
    source = copy_of(rank.kv)
    parts = parts_of(rank, {1: [7], 2: [20, 21], 0: list(range(1, 40))})
    rank.worker.writer.order([PoolStore("s", 7, parts[2:], urgent=False)])
    rank.worker.writer.order([PoolStore("s", 7, parts[:2], urgent=True)])
    rank.worker.writer.settle(())
    for group in (STATE, WINDOW):
        for name in group.layer_names:
            rank.kv[name][:] = 0
    awaited(lambda: len(rank.client.committed) == 42, bool)
    rank.ready(*parts)
    rank.worker.reader.order([PoolLoad("r", 1, 7, parts)])
    assert rank.results() == ({"r"}, set())
    assert np.array_equal(rank.kv["g2"][7], source["g2"][7])
    assert np.array_equal(rank.kv["w0"][20:22], source["w0"][20:22])


def test_settle_waits_for_an_urgent_copy_that_has_begun(rank: Rank) -> None:
    rank.client.may_write.clear()
    (part,) = parts_of(rank, {1: [7]})
    rank.worker.writer.order([PoolStore("s", 7, (part,), urgent=True)])
    assert rank.client.entered.wait(60)
    settled = threading.Thread(target=rank.worker.writer.settle, args=((),))
    settled.start()
    settled.join(0.05)
    assert settled.is_alive()
    rank.client.may_write.set()
    settled.join(60)
    assert not settled.is_alive()


def test_a_preempted_request_is_copied_no_more_and_its_blocks_are_free(rank: Rank) -> None:
    """The copy that has begun is waited for, what has not begun is aborted; other requests' stores go on."""
    source = copy_of(rank.kv)
    rank.client.may_write.clear()
    first, second, other = parts_of(rank, {0: [1, 2], 2: [20, 21], 1: [9]})
    store = rank.worker.writer.order
    store([PoolStore("gone", 7, (first,), urgent=False)])
    assert rank.client.entered.wait(60)
    store([PoolStore("gone", 7, (second,), urgent=False), PoolStore("stays", 7, (other,), urgent=False)])
    settled = threading.Thread(target=rank.worker.writer.settle, args=(("gone",),))
    settled.start()
    settled.join(0.05)
    assert settled.is_alive()
    rank.client.may_write.set()
    settled.join(60)
    for name in ("a0", "a1", "w0"):
        rank.kv[name][:] = 0
    awaited(lambda: len(rank.client.committed) == 3 and len(rank.client.aborted) == 2, bool)
    assert sorted(rank.client.aborted) == [page.slot for page in second.pages]
    rank.ready(first, other)
    rank.worker.reader.order([PoolLoad("r", 1, 7, at_blocks([first, other], 30))])
    assert rank.results() == ({"r"}, set())
    assert np.array_equal(rank.kv["a1"][31:33], source["a1"][1:3])
    assert np.array_equal(rank.kv["g0"][39], source["g0"][9])


def test_a_finished_request_is_named_once_its_blocks_are_not_read_any_more(rank: Rank) -> None:
    rank.client.may_write.clear()
    (part,) = parts_of(rank, {0: [1, 2]})
    rank.worker.writer.order([PoolStore("s", 7, (part,), urgent=False)])
    rank.worker.writer.hold(["s", "has none"])
    assert rank.finished() == {"has none"}
    assert rank.client.entered.wait(60)
    assert rank.worker.writer.finished() == set()
    rank.client.may_write.set()
    assert rank.finished() == {"s"}
    assert rank.worker.writer.finished() == set()


def test_large_stores_are_cut_so_that_a_preemption_need_not_wait_long() -> None:
    big = {"l": np.zeros((12, 1 << 20), np.uint8)}
    group = EngineGroup(0, GroupKind.FULL, 16, 0, ("l",))
    engine = KvLayout([group], {"l": [HostPages(torch.from_numpy(big["l"]))]})
    pages = RankPages(engine, pool_geometry(engine, "f", 1), 0)
    refs = tuple(PageRef(i, i << 20) for i in range(10))
    pieces = pages.pieces(PoolPages(0, 5, tuple(range(1, 11)), refs))
    assert [(piece.first_block, len(piece.block_ids)) for piece in pieces] == [(5, 8), (13, 2)]
    assert tuple(ref for piece in pieces for ref in piece.pages) == refs


def test_stats_count_bytes_and_ends(rank: Rank) -> None:
    (part,) = parts_of(rank, {0: [1, 2]})
    rank.stored(part)
    rank.worker.reader.order([PoolLoad("r", 1, 7, (part,))])
    rank.results()
    rank.worker.writer.finished()
    assert rank.stats.data["pool_bytes_stored"] == rank.stats.data["pool_bytes_loaded"] == 2 * 8192
    assert rank.stats.data["pool_loads_completed"] == 1
    assert rank.stats.data["pool_store_seconds"] > 0 and rank.stats.data["pool_load_seconds"] > 0


def test_the_geometry_follows_from_the_layout() -> None:
    geometry = pool_geometry(layout(memory(1)), "f", 2)
    assert [(group.index, group.kind, group.rank_bytes) for group in geometry.groups] == [
        (0, GroupKind.FULL, 8192),
        (1, GroupKind.STATE, 3008),
        (2, GroupKind.WINDOW, 512),
    ]
    only_states = KvLayout(
        [STATE], {n: [HostPages(torch.zeros((4, 64), dtype=torch.uint8))] for n in STATE.layer_names}
    )
    with pytest.raises(PoolGeometryError, match="full attention"):
        pool_geometry(only_states, "f", 1)


def test_a_reader_survives_a_client_that_raises() -> None:
    class Broken(ArenaClient):
        def page_state(self, slot: int) -> PageState:
            raise OSError("the table is gone")

    engine = layout(memory(1))
    geometry = pool_geometry(engine, "f", 1)
    client = Broken(geometry)
    reader = PoolReader(RankPages(engine, geometry, 0), cast(PoolClient, client), 1.0, ConnectorStats())
    reader.order([PoolLoad("r", 1, 7, (PoolPages(0, 0, (1,), (PageRef(0, 0),)),))])
    assert awaited(reader.results, lambda results: bool(results[0])) == ({"r"}, {"r"})
    reader.close()
