"""A prefill engine dies in the middle: the decode engine goes on from what has come, and loads nothing else."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.serving.engines.vllm.test_producer_consumer import (
    FULL,
    GROUPS,
    Ends,
    await_filled,
    copy_of,
    make_ends,
    new_ticket,
    order_early,
    sends,
)

from prfaas.serving.engines.vllm.metadata import BlockRun, LoadOrder, TransferMetadata
from prfaas.serving.transport.protocol import region_layout
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.ticket import Ticket
from prfaas.serving.transport.protocol.wire import TransferStatus

TOKENS = 320
CHUNK_ENDS = [40, 80, 160, 240, 304, TOKENS]


@pytest.fixture
def dense() -> Iterator[Ends]:
    yield from make_ends(groups=(FULL,))


def chunks(ticket: Ticket) -> list[TransferMetadata]:
    """The steps of a prefill, without states and windows."""
    steps = sends(ticket, CHUNK_ENDS)
    return [TransferMetadata(sends=[replace(step.sends[0], closing=())]) for step in steps]


def part(ticket: Ticket, local_tokens: int, usable_tokens: int, base: int = 20) -> TransferMetadata:
    """The order of a load; 0: of the whole transfer."""
    tokens = usable_tokens or ticket.num_tokens
    blocks = range(local_tokens // 16, -(-tokens // 16))
    run = BlockRun(0, blocks.start, tuple(base + block for block in blocks))
    return TransferMetadata(loads=[LoadOrder("d", ticket, local_tokens, (run,), usable_tokens)])


def arrived(ends: Ends, ticket: Ticket, usable_tokens: int) -> None:
    """Wait until so much has come that is not usable before its digests have."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        arrival = ends.receiver.transfers.lend(ticket.transfer_id, lambda: None)
        if arrival is not None:
            covered = ends.receiver.transfers.table._transfers[ticket.transfer_id].covered_end
            arrival.give_back()
            if (
                region_layout.resume_points(
                    ends.receiver.transfers.table._open_check.layout, ticket, covered
                ).tokens
                >= usable_tokens
            ):
                return
        time.sleep(0.002)
    raise AssertionError("it has not come")


def failed(ends: Ends, ticket: Ticket) -> TransferStatus:
    ends.complete(ticket)
    status = ends.receiver.transfers.state(ticket.transfer_id)
    assert status is not None
    return status


@pytest.mark.parametrize("how", ["killed", "aborted", "given up"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_what_has_come_is_loaded_and_the_rest_is_not_touched(dense: Ends, steps: int, how: str) -> None:
    ticket = new_ticket(TOKENS, skip=16)
    before = copy_of(dense.home)
    end_tokens = CHUNK_ENDS[steps - 1] // 16 * 16
    for orders in chunks(ticket)[:steps]:
        dense.step(orders)
    arrived(dense, ticket, end_tokens)
    dense.order(part(ticket, 32, 0))
    if how == "killed":
        dense.sender.close()
    elif how == "aborted":
        dense.step(TransferMetadata(held={"p": True}))
    else:
        dense.receiver.transfers.drop(ticket.transfer_id, "its prefill engine is dead", keep=True)
    assert dense.results() == ({"d"}, {"d"})
    assert failed(dense, ticket).usable_tokens == end_tokens
    assert dense.consuming.take_usable() == {"d": ResumePoints(end_tokens)}
    assert dense.consuming.take_usable() == {}
    dense.order(part(ticket, 32, end_tokens, base=40))
    assert dense.results() == ({"d"}, set())
    for name in ("a0", "a1"):
        expected = before[name].copy()
        for block in range(2, end_tokens // 16):
            expected[40 + block] = dense.east[name][1 + block]
        assert np.array_equal(dense.home[name][40:], expected[40:]), name
    assert dense.arena.used_blocks == 0
    assert dense.consuming.stats.data["loads_resumed"] == 1
    # It is there once; an observer that asks later still learns what it was.
    assert failed(dense, ticket).usable_tokens == 0
    told = dense.receiver.transfers.table._status(ticket.transfer_id)
    assert told is not None and (told.taken, told.usable_tokens) == (True, end_tokens)
    dense.order(part(ticket, 32, end_tokens))
    assert dense.results() == ({"d"}, {"d"})
    assert dense.consuming.take_usable() == {}


def test_a_page_that_is_another_one_by_then_is_seen(dense: Ends) -> None:
    ticket = new_ticket(TOKENS)
    for orders in chunks(ticket)[:3]:
        dense.step(orders)
    arrived(dense, ticket, 160)
    dense.receiver.transfers.drop(ticket.transfer_id, "its prefill engine is dead", keep=True)
    staged = dense.receiver.transfers.table._partials._kept[ticket.transfer_id][0]
    assert staged.lease is not None
    staged.lease.views(5 * 4096, 4096)[0][9] ^= 1
    dense.order(part(ticket, 0, 160))
    assert dense.results() == ({"d"}, {"d"})
    assert dense.consuming.stats.data["digest_mismatches"] == 1


def test_pages_without_their_digests_do_not_count(dense: Ends) -> None:
    """The engine dies before the end of a step, so that layers have left and their digests have not."""
    ticket = new_ticket(TOKENS)
    first, second = chunks(ticket)[:2]
    dense.step(first)
    for name in ("a0", "a1"):
        dense.producing.save_layer(second.sends, name)
    order_early(dense, ticket)
    dense.order(part(ticket, 0, 0))
    await_filled(dense, "a1", 5)
    dense.sender.close()
    assert failed(dense, ticket).usable_tokens == 32


def test_without_digests_pages_count_alone() -> None:
    for dense in make_ends(page_digests=False, groups=(FULL,)):
        ticket = new_ticket(TOKENS)
        dense.step(chunks(ticket)[0])
        arrived(dense, ticket, 32)
        dense.sender.close()
        assert failed(dense, ticket).usable_tokens == 32
        dense.order(part(ticket, 0, 32))
        assert dense.results() == ({"d"}, set())


def test_with_states_or_windows_nothing_is_kept() -> None:
    for ends in make_ends(groups=GROUPS):
        ticket = new_ticket(TOKENS)
        for orders in sends(ticket, CHUNK_ENDS)[:4]:
            ends.step(orders)
        order_early(ends, ticket)
        time.sleep(0.05)
        ends.sender.close()
        assert failed(ends, ticket).usable_tokens == 0
        assert ends.arena.used_blocks == 0


def test_who_needs_the_staging_has_it(dense: Ends) -> None:
    """Staging of 4 MiB; the pages of 320 tokens take 160 KiB, and 64 KiB are given out at least."""
    tickets = [new_ticket(TOKENS) for _ in range(40)]
    for number, ticket in enumerate(tickets):
        dense.step(TransferMetadata(sends=[replace(chunks(ticket)[0].sends[0], request_id=f"p{number}")]))
        arrived(dense, ticket, 32)
        dense.receiver.transfers.drop(ticket.transfer_id, "its prefill engine is dead", keep=True)
    kept = [ticket for ticket in tickets if failed(dense, ticket).usable_tokens]
    assert 0 < len(kept) < 40 and kept == tickets[-len(kept) :]
    dense.receiver.transfers.drop(kept[0].transfer_id, "the client has left")
    assert failed(dense, kept[0]).usable_tokens == 0
