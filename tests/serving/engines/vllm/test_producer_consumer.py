"""KV producer and consumer over the real transport, with numpy memory in place of an engine's KV."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from prfaas.core.deployment import TransferLimits
from prfaas.core.kv.groups import GroupKind, region_bytes
from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.layout import EngineGroup, KvLayout
from prfaas.serving.engines.vllm.metadata import BlockRun, LoadOrder, NixlRead, SendOrder, TransferMetadata
from prfaas.serving.engines.vllm.pages import HostPages, LayerPages
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import wire_layouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, TransferAttributes
from prfaas.serving.transport.protocol.wire import TransferPhase

KEY = b"k" * 32
FULL = EngineGroup(0, GroupKind.FULL, 16, 0, ("a0", "a1"))
STATE = EngineGroup(1, GroupKind.STATE, 16, 0, ("g0", "g1", "g2"))
WINDOW = EngineGroup(2, GroupKind.WINDOW, 8, 20, ("w0",))
GROUPS = (STATE, FULL, WINDOW)
NUM_BLOCKS = 64
PAGE_BYTES = {"a0": 4096, "a1": 4096, "g0": 1000, "g1": 1000, "g2": 1000, "w0": 512}


def memory(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 256, (NUM_BLOCKS, size), dtype=np.uint8) for name, size in PAGE_BYTES.items()
    }


def layout(
    kv: dict[str, np.ndarray],
    groups: Sequence[EngineGroup] = GROUPS,
    seen_as: Callable[[torch.Tensor], LayerPages] = HostPages,
) -> KvLayout:
    return KvLayout(groups, {name: [seen_as(torch.from_numpy(pages))] for name, pages in kv.items()})


def kv_bytes_of(ends: "Ends", num_tokens: int) -> int:
    return sum(region_bytes(layout(ends.east).regions, num_tokens, 0))


@dataclass
class Ends:
    east: dict[str, np.ndarray]
    home: dict[str, np.ndarray]
    producing: KvProducer
    consuming: KvConsumer
    receiver: Receiver
    sender: Sender
    arena: StagingArena

    def step(self, orders: TransferMetadata) -> None:
        """One engine step of the producer: hooks of the attention layers, then the end of the step."""
        self.producing.detach(orders.preempted)
        for name in ("a0", "a1", "w0"):
            self.producing.save_layer(orders.sends, name)
        self.producing.end_step(orders.sends)
        self.producing.hold(orders.held)

    def order(self, orders: TransferMetadata) -> None:
        self.consuming.order(orders.loads, orders.drops)

    def finished(self, wait_s: float = 60.0) -> set[str]:
        done: set[str] = set()
        deadline_s = time.monotonic() + wait_s
        while not done and time.monotonic() < deadline_s:
            done |= self.producing.finished()
            time.sleep(0.002)
        return done

    def complete(self, ticket: Ticket, wait_s: float = 60.0) -> None:
        """Wait as the gateway does before it sends the decode request."""
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            status = self.receiver.transfers.state(ticket.transfer_id)
            if status is not None and status.phase.terminal:
                return
            time.sleep(0.002)
        raise TimeoutError("the transfer did not end")

    def results(self, count: int = 1, wait_s: float = 60.0) -> tuple[set[str], set[str]]:
        ended: set[str] = set()
        failed: set[str] = set()
        deadline_s = time.monotonic() + wait_s
        while len(ended) < count and time.monotonic() < deadline_s:
            more_ended, more_failed = self.consuming.results()
            assert not ended & more_ended
            ended |= more_ended
            failed |= more_failed
            time.sleep(0.002)
        return ended, failed


@pytest.fixture
def ends() -> Iterator[Ends]:
    yield from make_ends()


def make_ends(
    lease_s: float = 20.0,
    *,
    page_digests: bool = True,
    groups: Sequence[EngineGroup] = GROUPS,
    seen_as: Callable[[torch.Tensor], LayerPages] = HostPages,
) -> Iterator[Ends]:
    east, home = memory(1), memory(2)
    east_layout, home_layout = layout(east, groups, seen_as), layout(home, groups, seen_as)
    east_wires = wire_layouts(east_layout, "east", 0, page_digests=page_digests)
    home_wires = wire_layouts(home_layout, "home", 0, page_digests=page_digests)
    arena = StagingArena(4 << 20, 64 << 10)
    receiver = Receiver(
        name="home/0",
        key=KEY,
        host="127.0.0.1",
        port=0,
        arena=arena,
        layout=home_wires,
        fingerprint={"layers": 6},
        peer_list=PeerList(producers=frozenset(["east/0"])),
        options=ReceiverOptions(limits=TransferLimits(resume_s=0.3), uncounted_regions=int(page_digests)),
    )
    receiver.start()
    sender = Sender(
        name="east/0",
        key=KEY,
        peers={"home/0": Peer("home/0", "127.0.0.1", receiver.port, "east->home", 2, None)},
        fingerprint={"layers": 6},
        options=SenderOptions(limits=TransferLimits(resume_s=0.3)),
        layouts=east_wires,
    )
    sender.start()
    # The first transfer to who is not met waits for the engine's next step.
    assert sender.meet("home", 60)
    stats = ConnectorStats()
    producing = KvProducer(east_layout, east_wires, sender, lease_s, stats)
    consuming = KvConsumer(home_wires, receiver, TransferLimits(load_wait_s=2.0, staging_ttl_s=5.0), stats)
    try:
        yield Ends(east, home, producing, consuming, receiver, sender, arena)
    finally:
        consuming.close()
        sender.close()
        receiver.close()
        assert arena.used_blocks == 0


def new_ticket(num_tokens: int, skip: int = 0, uses: int = 1, every_tokens: int = 0) -> Ticket:
    return Ticket(
        transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
        producer="east",
        consumer="home",
        num_tokens=num_tokens,
        skip_tokens=skip,
        prompt_digest=bytes(16),
        expires_at_s=time.time() + 60,
        attributes=TransferAttributes(uses=uses, checkpoint_tokens=every_tokens),
    )


def table(group: EngineGroup, num_tokens: int, base: int) -> list[int]:
    return [base + i for i in range(-(-num_tokens // group.block_tokens))]


def sends(
    ticket: Ticket, chunk_ends: list[int], request_id: str = "p", base: int = 1
) -> list[TransferMetadata]:
    steps, sent = [], ticket.skip_tokens // 16
    sealed = ticket.seal(KEY)
    for end_tokens in chunk_ends:
        final = end_tokens == ticket.num_tokens
        end = -(-end_tokens // 16) if final else end_tokens // 16
        runs = (
            (BlockRun(0, sent, tuple(table(FULL, ticket.num_tokens, base)[sent:end])),) if end > sent else ()
        )
        sent = max(sent, end)
        closing = tuple(
            BlockRun(
                group.index,
                group.first_block(ticket.num_tokens, 0),
                tuple(table(group, ticket.num_tokens, base)[group.first_block(ticket.num_tokens, 0) :]),
            )
            for group in (STATE, WINDOW)
        )
        steps.append(
            TransferMetadata(
                sends=[SendOrder(request_id, ticket, sealed, runs, closing if final else (), final)],
            )
        )
    return steps


def load(ticket: Ticket, local_tokens: int, request_id: str = "d", base: int = 20) -> TransferMetadata:
    runs = []
    for group in GROUPS:
        first = group.first_block(ticket.num_tokens, local_tokens)
        runs.append(BlockRun(group.index, first, tuple(table(group, ticket.num_tokens, base)[first:])))
    return TransferMetadata(loads=[LoadOrder(request_id, ticket, local_tokens, tuple(runs))])


def assert_moved(
    ends: Ends, ticket: Ticket, local_tokens: int, home_before: dict[str, np.ndarray], base: int = 20
) -> None:
    """Every page that should have moved is equal, every other page of the consumer is untouched."""
    for group in GROUPS:
        blocks = range(group.first_block(ticket.num_tokens, local_tokens), group.end_block(ticket.num_tokens))
        for name in group.layer_names:
            expected = home_before[name].copy()
            for block in blocks:
                expected[base + block] = ends.east[name][1 + block]
            assert np.array_equal(ends.home[name], expected), name


def copy_of(kv: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: pages.copy() for name, pages in kv.items()}


@pytest.mark.parametrize(
    ("num_tokens", "skip", "local", "chunk_ends"),
    [
        (100, 0, 0, [100]),
        (100, 0, 0, [10, 37, 64, 100]),
        (96, 0, 32, [48, 96]),
        (100, 32, 32, [40, 100]),
        (100, 32, 64, [100]),
        (7, 0, 0, [7]),
        (96, 96, 80, [96]),
    ],
)
def test_pages_arrive_byte_for_byte(
    ends: Ends, num_tokens: int, skip: int, local: int, chunk_ends: list[int]
) -> None:
    ticket = new_ticket(num_tokens, skip)
    local = max(local, skip)
    before = copy_of(ends.home)
    for orders in sends(ticket, chunk_ends):
        ends.step(orders)
    ends.step(TransferMetadata(held={"p": False}))
    assert ends.finished() == {"p"}
    ends.order(load(ticket, local))
    assert ends.results() == ({"d"}, set())
    assert_moved(ends, ticket, local, before)
    assert ends.arena.used_blocks == 0
    assert not ends.producing._open_sends
    assert not ends.consuming._waiting and not ends.consuming._held


def test_one_transfer_serves_as_many_requests_as_its_ticket_says(ends: Ends) -> None:
    ticket = new_ticket(50, uses=3)
    for orders in sends(ticket, [50]):
        ends.step(orders)
    ends.complete(ticket)
    for number, base in enumerate((10, 20, 30)):
        before = copy_of(ends.home)
        ends.order(load(ticket, 0, f"d{number}", base))
        assert ends.results() == ({f"d{number}"}, set())
        assert_moved(ends, ticket, 0, before, base)
    assert ends.arena.used_blocks == 0
    ends.order(load(ticket, 0, "one too many"))
    assert ends.results() == ({"one too many"}, {"one too many"})


def test_an_unknown_transfer_fails_at_once_and_once(ends: Ends) -> None:
    ends.order(load(new_ticket(50), 0))
    assert ends.results() == ({"d"}, {"d"})
    assert ends.consuming.results() == (set(), set())


def test_a_load_before_the_transfer_is_complete_waits_for_it(ends: Ends) -> None:
    ticket = new_ticket(100)
    first, last = sends(ticket, [50, 100])
    ends.step(first)
    deadline_s = time.monotonic() + 60
    while ends.receiver.transfers.state(ticket.transfer_id) is None and time.monotonic() < deadline_s:
        time.sleep(0.002)
    ends.order(load(ticket, 0))
    assert ends.consuming.results() == (set(), set())
    ends.step(last)
    assert ends.results() == ({"d"}, set())


def await_filled(ends: Ends, name: str, blocks: int, base: int = 20) -> None:
    """Wait until the first blocks of a layer are the consumer's as they are the producer's."""
    deadline_s = time.monotonic() + 60
    while not np.array_equal(ends.home[name][base : base + blocks], ends.east[name][1 : 1 + blocks]):
        assert time.monotonic() < deadline_s, f"{name} is not filled"
        time.sleep(0.002)


def order_early(ends: Ends, ticket: Ticket, *requests: tuple[str, int]) -> None:
    """Order loads, (request, first block), of a transfer that has begun."""
    deadline_s = time.monotonic() + 60
    while ends.receiver.transfers.state(ticket.transfer_id) is None and time.monotonic() < deadline_s:
        time.sleep(0.002)
    for request_id, base in requests:
        ends.order(load(ticket, 0, request_id, base))


def test_blocks_are_filled_while_the_rest_is_still_arriving(ends: Ends) -> None:
    ticket = new_ticket(100)
    before = copy_of(ends.home)
    first, last = sends(ticket, [70, 100])
    ends.step(first)
    order_early(ends, ticket, ("d", 20), ("e", 40))
    for name in ("a0", "a1"):
        await_filled(ends, name, 4)
        await_filled(ends, name, 4, base=40)
    assert ends.consuming.results() == (set(), set())
    assert np.array_equal(ends.home["a0"][24:40], before["a0"][24:40])
    # The two share a transfer for one use: the second to load is refused, and its blocks are its own trouble. Both
    # waited since before its end, so which of them is second is not said.
    ends.step(last)
    ended, failed = ends.results(2)
    assert ended == {"d", "e"} and len(failed) == 1
    assert ends.consuming.stats.data["bytes_loaded"] == kv_bytes_of(ends, 100)


def test_requests_that_share_a_transfer_are_all_filled_while_it_arrives(ends: Ends) -> None:
    ticket = new_ticket(100, uses=2)
    first, last = sends(ticket, [70, 100])
    ends.step(first)
    order_early(ends, ticket, ("d", 20), ("e", 40))
    await_filled(ends, "a1", 4, base=40)
    ends.step(last)
    assert ends.results(2) == ({"d", "e"}, set())
    for name, group in (("a0", FULL), ("g2", STATE), ("w0", WINDOW)):
        blocks = range(group.first_block(100, 0), group.end_block(100))
        for block in blocks:
            assert np.array_equal(ends.home[name][40 + block], ends.east[name][1 + block])
    assert ends.arena.used_blocks == 0


@pytest.mark.parametrize("how", ["aborted", "dropped", "lost"])
def test_a_transfer_that_fails_after_blocks_were_filled_fails_its_loads_once(ends: Ends, how: str) -> None:
    ticket = new_ticket(100)
    ends.step(sends(ticket, [70, 100])[0])
    order_early(ends, ticket, ("d", 20))
    await_filled(ends, "a1", 4)
    if how == "aborted":
        ends.step(TransferMetadata(held={"p": True}))
    elif how == "dropped":
        ends.receiver.transfers.drop(ticket.transfer_id, "the client went away")
    else:
        ends.sender.close()
    assert ends.results() == ({"d"}, {"d"})
    assert ends.consuming.results() == (set(), set())
    assert ends.arena.used_blocks == 0
    # Nobody waits for what was dropped: no request is prefilled in its place.
    assert ends.consuming.stats.data["loads_failed"] == (how != "dropped")


def test_a_load_that_waits_keeps_no_other_waiting(ends: Ends) -> None:
    stands, goes = new_ticket(100), new_ticket(60)
    ends.step(sends(stands, [70, 100])[0])
    order_early(ends, stands, ("d", 20))
    await_filled(ends, "a0", 4)
    for orders in sends(goes, [60], request_id="q"):
        ends.step(orders)
    order_early(ends, goes, ("e", 40))
    assert ends.results() == ({"e"}, set())
    # The other one is given up after `load_wait_s`.
    assert ends.results() == ({"d"}, {"d"})
    assert ends.consuming.stats.data["loads_failed"] == 1


def test_a_page_that_changes_between_its_arrival_and_its_load_is_seen(ends: Ends) -> None:
    """Of blocks that are filled early too, the digests are of what is written to the engine's memory."""
    ticket = new_ticket(100)
    first, last = sends(ticket, [70, 100])
    ends.step(first)
    arrived = ends.receiver.transfers.lend
    for _ in range(1000):
        status = ends.receiver.transfers.state(ticket.transfer_id)
        if status is not None and status.received_bytes == 2 * 4 * 4096:
            break
        time.sleep(0.005)
    arrival = arrived(ticket.transfer_id, lambda: None)
    assert arrival is not None
    arrival.region_views(0, 0, 4096)[0][5] ^= 1
    arrival.give_back()
    order_early(ends, ticket, ("d", 20))
    await_filled(ends, "a1", 4)
    ends.step(last)
    assert ends.results() == ({"d"}, {"d"})
    assert ends.consuming.stats.data["digest_mismatches"] == 1


def test_two_pages_do_not_go_into_one_block(ends: Ends) -> None:
    ticket = new_ticket(100)
    for step in sends(ticket, [100]):
        ends.step(step)
    (order,) = load(ticket, 0).loads
    full = next(run for run in order.runs if run.group == FULL.index)
    twice = replace(full, block_ids=(*full.block_ids[:-1], full.block_ids[0]))
    runs = tuple(twice if run is full else run for run in order.runs)
    ends.order(TransferMetadata(loads=[replace(order, runs=runs)]))
    assert ends.results() == ({"d"}, {"d"})


def test_a_preempted_prefill_sends_what_its_blocks_held_before_they_were_reused(ends: Ends) -> None:
    ticket = new_ticket(100)
    first, last = sends(ticket, [64, 100])
    original = copy_of(ends.east)
    before = copy_of(ends.home)
    ends.step(first)
    ends.step(TransferMetadata(preempted=["p"]))
    for name in ("a0", "a1"):
        ends.east[name][1:5] = 0
    ends.step(last)
    ends.complete(ticket)
    ends.order(load(ticket, 0))
    assert ends.results() == ({"d"}, set())
    ends.east.update(original)
    assert_moved(ends, ticket, 0, before)


def test_an_aborted_prefill_fails_the_load_and_frees_its_blocks(ends: Ends) -> None:
    ticket = new_ticket(100)
    ends.step(sends(ticket, [50, 100])[0])
    ends.step(TransferMetadata(held={"p": True}))
    assert ends.finished() == {"p"}
    ends.order(load(ticket, 0))
    assert ends.results() == ({"d"}, {"d"})


def test_blocks_are_kept_while_a_thread_reads_them(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    views = HostPages.views

    def slow_views(self: HostPages, *where: Any) -> list[memoryview] | None:
        reading.set()
        go_on.wait(60)
        return views(self, *where)

    monkeypatch.setattr(HostPages, "views", slow_views)
    ends.step(sends(new_ticket(100), [50, 100])[0])
    assert reading.wait(60)
    ends.step(TransferMetadata(held={"p": True}))
    assert ends.finished(wait_s=0.2) == set()
    go_on.set()
    assert ends.finished() == {"p"}


def test_blocks_are_given_back_when_the_consumer_dies(ends: Ends) -> None:
    ticket = new_ticket(100)
    ends.step(sends(ticket, [50, 100])[0])
    ends.receiver.close()
    ends.step(TransferMetadata(held={"p": False}))
    assert ends.finished() == {"p"}


def test_blocks_are_given_back_when_the_lease_runs_out() -> None:
    for ends in make_ends(lease_s=0.2):
        ticket = new_ticket(100)
        ends.step(sends(ticket, [50, 100])[0])  # the last chunk never comes: nothing can complete
        ends.step(TransferMetadata(held={"p": False}))
        assert ends.finished() == {"p"}
        assert ends.producing.stats.data["leases_expired"] == 1


def test_a_held_request_that_never_opened_a_transfer_is_given_back(ends: Ends) -> None:
    ends.step(TransferMetadata(held={"p": False}))
    assert ends.finished() == {"p"}


def test_a_null_block_costs_the_transfer_not_the_engine(ends: Ends) -> None:
    ticket = new_ticket(100)
    (orders,) = sends(ticket, [100], base=0)
    ends.step(orders)
    ends.step(TransferMetadata(held={"p": False}))
    assert ends.finished() == {"p"}
    ends.order(load(ticket, 0))
    assert ends.results() == ({"d"}, {"d"})


def test_a_dropped_transfer_frees_its_staging(ends: Ends) -> None:
    ticket = new_ticket(100)
    for orders in sends(ticket, [100]):
        ends.step(orders)
    ends.step(TransferMetadata(held={"p": False}))
    ends.finished()
    assert ends.arena.used_blocks > 0
    ends.order(TransferMetadata(drops=[(ticket.transfer_id, "the client went away")]))
    assert ends.arena.used_blocks == 0
    ends.order(TransferMetadata(drops=[(ticket.transfer_id, "twice")]))


def test_the_end_of_a_load_is_told_whatever_it_was(ends: Ends) -> None:
    """An engine that has nothing else to do waits for this."""
    told = threading.Event()
    ends.consuming.on_end = told.set
    done = new_ticket(100)
    for orders in sends(done, [100]):
        ends.step(orders)
    ends.complete(done)
    for ticket in (done, new_ticket(100)):
        told.clear()
        ends.order(load(ticket, 0))
        assert told.wait(10)
        assert ends.results() == ({"d"}, set() if ticket is done else {"d"})


def late_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Pages are read for sending once this is set."""
    sending = threading.Event()
    views = HostPages.views

    def late_views(self: HostPages, *where: Any) -> list[memoryview] | None:
        sending.wait(60)
        return views(self, *where)

    monkeypatch.setattr(HostPages, "views", late_views)
    return sending


@pytest.mark.parametrize("page_digests", [True, False])
def test_a_page_that_is_reused_before_it_is_sent(
    page_digests: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every checksum of the transport is right then: only the digest of the page tells."""
    sending = late_reads(monkeypatch)
    for ends in make_ends(page_digests=page_digests):
        ticket = new_ticket(100)
        (orders,) = sends(ticket, [100])
        ends.step(orders)
        ends.east["a1"][1 + 3][77] ^= 1
        sending.set()
        ends.complete(ticket)
        ends.order(load(ticket, 0))
        failed = {"d"} if page_digests else set()
        assert ends.results() == ({"d"}, failed)
        assert ends.consuming.stats.data["digest_mismatches"] == ends.consuming.stats.data["loads_failed"]
        assert ends.consuming.stats.data["digest_mismatches"] == page_digests
        (line,) = caplog.messages if page_digests else [""]
        if page_digests:
            assert line == (
                "request d prefills locally: in its KV from east, block 3 of layer a1/0 is not what the prefill "
                "engine computed (1 of the 7 loaded blocks of this layer differ)"
            )


def test_slots_behind_the_prompt_may_be_filled_before_they_are_sent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on with the request's next token, in the partial last blocks of attention and windows."""
    sending = late_reads(monkeypatch)
    ticket = new_ticket(100)
    (orders,) = sends(ticket, [100])
    computed = copy_of(ends.east)
    ends.step(orders)
    for name, group in (("a0", FULL), ("a1", FULL), ("w0", WINDOW)):
        ends.east[name][1 + 100 // group.block_tokens][-8:] ^= 1
    sending.set()
    ends.complete(ticket)
    before = copy_of(ends.home)
    ends.order(load(ticket, 0))
    assert ends.results() == ({"d"}, set())
    ends.east.update(computed)
    assert_moved(ends, ticket, 0, before)


@pytest.mark.parametrize("page_digests", [True, False])
def test_states_and_windows_are_sent_as_the_prompt_left_them(
    page_digests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine decodes the request: it writes over states, gives window blocks to others, and fills last pages."""
    sending = late_reads(monkeypatch)
    for ends in make_ends(page_digests=page_digests):
        ticket = new_ticket(100)
        (orders,) = sends(ticket, [100])
        orders.sends[0] = replace(orders.sends[0], decodes_on=True)
        computed = copy_of(ends.east)
        ends.step(orders)
        for name in ("g0", "g1", "g2", "w0"):
            ends.east[name] ^= 1
        for name in ("a0", "a1"):
            ends.east[name][1 + 100 // 16][-8:] ^= 1
        sending.set()
        ends.complete(ticket)
        before = copy_of(ends.home)
        ends.order(load(ticket, 0))
        assert ends.results() == ({"d"}, set())
        ends.east.update(computed)
        assert_moved(ends, ticket, 0, before)


@pytest.mark.parametrize("phase", [TransferPhase.RECEIVING, TransferPhase.COMPLETE, TransferPhase.FAILED])
def test_kv_that_nixl_loads_is_told_in_bytes_of_the_engines_own_pages(
    ends: Ends, phase: TransferPhase
) -> None:
    pull = NixlRead("d", bytes(16), num_tokens=100, local_tokens=32, expires_at_s=time.time() + 60)
    ends.consuming.tell_pulled(pull, phase)
    status = ends.receiver.transfers.state(pull.transfer_id)
    assert status is not None
    total_bytes = sum(region_bytes(layout(ends.home).regions, 100, 32))
    assert (status.phase, status.total_bytes) == (phase, total_bytes)
    assert status.received_bytes == (total_bytes if phase is TransferPhase.COMPLETE else 0)


def test_digests_are_no_kv_in_any_count(ends: Ends) -> None:
    ticket = new_ticket(100)
    (orders,) = sends(ticket, [100])
    ends.step(orders)
    ends.complete(ticket)
    status = ends.receiver.transfers.state(ticket.transfer_id)
    kv_bytes = kv_bytes_of(ends, 100)
    assert status is not None
    assert (status.received_bytes, status.total_bytes) == (kv_bytes, kv_bytes)
    assert status.overlapped_bytes <= kv_bytes
    ends.step(TransferMetadata(held={"p": False}))
    ends.finished()
    ends.order(load(ticket, 0))
    ends.results()
    assert ends.producing.stats.data["bytes_sent"] == ends.producing.stats.data["bytes_loaded"] == kv_bytes
