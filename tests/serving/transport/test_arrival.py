"""Reading a transfer while it arrives."""

import random
import threading
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.serving.transport.io.received_transfers import Arrival
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.incoming import IncomingTransfer, ProducerSession
from prfaas.serving.transport.protocol.staging import StagingLease
from prfaas.serving.transport.protocol.wire import TransferPhase

from .harness import PATIENCE_S, World, await_true, make_ticket

REGIONS = 3


def lend(world: World, transfer_id: bytes, changed: threading.Event | None = None) -> Arrival:
    """The transfer once it has its staging."""
    lent: list[Arrival] = []

    def is_lent() -> bool:
        arrival = world.receiver.transfers.lend(
            transfer_id, changed.set if changed is not None else lambda: None
        )
        lent.extend([arrival] if arrival is not None else [])
        return arrival is not None

    await_true(is_lent, PATIENCE_S, lambda: "the transfer is lent")
    return lent[0]


def bytes_of(arrival: Arrival, region: int, start: int, end: int) -> bytes:
    return b"".join(arrival.region_views(region, start, end - start))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), unit_bytes=st.integers(1, 3000), cuts=st.integers(0, 12))
def test_what_is_said_to_be_there_is_there(world: World, seed: int, unit_bytes: int, cuts: int) -> None:
    """In whatever pieces and order it comes: the prefix from any byte on is as long as it can be, and right."""
    rng = random.Random(seed)
    ticket, transfer, content = world.open(unit_bytes)
    pieces = []
    for region, data in enumerate(content):
        edges = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(cuts))})
        pieces += [(region, start, end) for start, end in pairwise(edges)]
    rng.shuffle(pieces)
    arrival = lend(world, ticket.transfer_id)
    there: list[set[int]] = [set() for _ in range(REGIONS)]
    for number, (region, start, end) in enumerate(pieces):
        transfer.put(region, start, BytesSource(content[region][start:end]))
        there[region] |= set(range(start, end))
        if number % 4 and number + 1 < len(pieces):
            continue
        world.await_received(ticket, sum(map(len, there)))
        starts = [(each, rng.randrange(len(content[each]))) for each in range(REGIONS) for _ in range(3)]
        for (each, begin), until in zip(starts, arrival.ends(starts), strict=True):
            expected = begin
            while expected in there[each]:
                expected += 1
            assert until == expected
            assert bytes_of(arrival, each, begin, until) == content[each][begin:until]
    transfer.end()
    world.await_phase(ticket, TransferPhase.COMPLETE)
    arrival.give_back()
    assert world.take(ticket) == content
    world.await_clean()


def test_every_change_is_told(world: World) -> None:
    changed = threading.Event()
    ticket, transfer, content = world.open(1000)
    arrival = lend(world, ticket.transfer_id, changed)
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
        assert changed.wait(PATIENCE_S)
        world.await_received(ticket, 500 * (region + 1) * (region + 2))
        assert arrival.ends([(region, 0)]) == [1000 * (region + 1)]
        changed.clear()
    transfer.end()
    assert changed.wait(PATIENCE_S)
    world.await_phase(ticket, TransferPhase.COMPLETE)
    arrival.give_back()
    world.take(ticket)


@pytest.mark.parametrize("how", ["abort", "drop"])
def test_what_is_read_stays_until_it_is_given_back(world: World, how: str) -> None:
    """A transfer that fails must not have its bytes written over under the eyes of who reads them."""
    changed = threading.Event()
    ticket, transfer, content = world.open(1000)
    arrival = lend(world, ticket.transfer_id, changed)
    transfer.put(2, 0, BytesSource(content[2]))
    await_true(lambda: arrival.ends([(2, 0)]) == [3000], PATIENCE_S, lambda: "the region is there")
    changed.clear()
    if how == "abort":
        transfer.abort("enough")
    else:
        world.receiver.transfers.drop(ticket.transfer_id, "enough")
    assert changed.wait(PATIENCE_S)
    world.await_phase(ticket, TransferPhase.FAILED)
    assert world.status(ticket).dropped is (how == "drop")
    assert world.arena.used_blocks == 1
    assert bytes_of(arrival, 2, 0, 3000) == content[2]
    assert world.receiver.transfers.lend(ticket.transfer_id, changed.set) is None
    arrival.give_back()
    arrival.give_back()
    world.await_clean()


def test_a_transfer_without_staging_is_not_lent(world: World) -> None:
    ticket, _, _ = world.open(4 << 20)  # takes most of the staging
    first = lend(world, ticket.transfer_id)
    second, transfer, content = world.open(4 << 20)
    world.await_phase(second, TransferPhase.WAITING)
    assert world.receiver.transfers.lend(second.transfer_id, lambda: None) is None
    world.receiver.transfers.drop(ticket.transfer_id, "enough")
    assert world.status(second).phase is TransferPhase.WAITING  # as long as the first is read
    first.give_back()
    world.await_phase(second, TransferPhase.RECEIVING)
    world.receiver.transfers.drop(second.transfer_id, "enough")
    assert transfer is not None and content
    world.await_clean()


def arriving(cached_tokens: int | None, *, lease: StagingLease) -> IncomingTransfer:
    """One of 1,000 tokens and 1,000 bytes, accepted at 100 s."""
    session = ProducerSession("p/0", "s")
    transfer = IncomingTransfer(make_ticket(1000), (1000,), session, 99.0, cached_tokens=cached_tokens)
    transfer.accept(lease, 100.0)
    return transfer


@pytest.mark.parametrize(
    ("cached_tokens", "chunks", "expected"),
    [
        # Bytes at times: half of it at 2 s needs 2 s more; 800 at 4 s needs one.
        (None, [(500, 102.0), (799, 104.0), (801, 104.0)], [False, False, True]),
        (0, [(500, 100.9)], [True]),
        (None, [(499, 100.1), (500, 101.1)], [False, False]),
        # 800 were cached and come at once: the pace is that of the 200 behind them.
        (800, [(400, 100.1), (790, 100.2), (899, 110.2), (910, 111.2), (991, 120.0)], [False] * 4 + [True]),
        (800, [(790, 105.0), (905, 106.0)], [False, True]),
        (2000, [(999, 100.5)], [False]),
    ],
)
def test_what_is_expected_soon(
    cached_tokens: int | None, chunks: list[tuple[int, float]], expected: list[bool]
) -> None:
    lease = StagingArena(4096, 4096).allocate(1000)
    assert lease is not None
    transfer = arriving(cached_tokens, lease=lease)
    seen = []
    for received_bytes, now_s in chunks:
        transfer.received_bytes = received_bytes
        seen.append(transfer.becomes_soon(1.0, now_s))
    assert seen == expected
    assert transfer.status().soon == expected[-1]


def test_after_the_prefill_the_pace_is_that_of_all_bytes() -> None:
    lease = StagingArena(4096, 4096).allocate(1000)
    assert lease is not None
    transfer = arriving(990, lease=lease)
    transfer.received_bytes = 700
    assert not transfer.becomes_soon(1.0, 101.0)
    transfer.ended = True
    assert transfer.becomes_soon(1.0, 101.0)
    assert transfer.becomes_soon(1.0, 101.0) is False  # told once
