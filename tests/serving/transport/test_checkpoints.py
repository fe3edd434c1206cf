"""Checkpoints on the wire: who may send one, when it leaves, and what becomes of it."""

from collections.abc import Callable, Collection, Iterator, Sequence

import pytest

from prfaas.core.link.send_order import order_of_checkpoint, order_of_ended, order_of_open
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.ticket import Ticket, checkpoint_id, part_id
from prfaas.serving.transport.protocol.wire import TransferPhase

from .harness import (
    KEY,
    PATIENCE_S,
    SizesByTokens,
    World,
    await_over,
    await_true,
    make_receiver,
    make_sender,
)

UNIT = 4096


class Checkpointed(SizesByTokens):
    """One more region of one byte a token, and checkpoints of 100 bytes."""

    def checkpoint_bytes(self, num_tokens: int) -> Sequence[int]:
        if num_tokens % 2:
            raise ValueError("no checkpoint after an odd number of tokens")
        return [100]

    def usable_tokens(
        self,
        num_tokens: int,
        skip_tokens: int,
        covered_end: Callable[[int, int], int],
        checkpoints: Collection[int] = (),
    ) -> int:
        return max((end for end in checkpoints if end <= covered_end(0, 0)), default=0)


@pytest.fixture
def world() -> Iterator[World]:
    arena, layout = StagingArena(4 << 20, 64 << 10), Checkpointed()
    receiver = make_receiver(arena, layout=layout)
    world = World(receiver, make_sender(receiver.port), arena, layout)
    yield world
    world.close()


def receiving(world: World) -> tuple[Ticket, SentTransfer, list[bytes]]:
    ticket, transfer, content = world.open(UNIT)
    world.await_phase(ticket, TransferPhase.RECEIVING)
    return ticket, transfer, content


def opened(world: World, transfer: SentTransfer, tokens: int, sizes: Sequence[int] = (100,)) -> SentTransfer:
    return world.sender.open_checkpoint(transfer, tokens, sizes, "c/0")


def sent(world: World, transfer: SentTransfer, tokens: int) -> SentTransfer:
    """A checkpoint that was sent, and has come or was refused."""
    checkpoint = opened(world, transfer, tokens)
    checkpoint.put(0, 0, BytesSource(tokens.to_bytes(100)))
    checkpoint.end()
    await_over(checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("tokens", "sizes", "why"),
    [
        (UNIT, [100], f"there is no checkpoint of this transfer after {UNIT} tokens"),
        (11, [100], "no checkpoint after an odd number of tokens"),
        (10, [99], "announced 99 bytes in region 0, c/0 expects 100"),
        (10, [50, 50], "announced 2 regions, c/0 expects 1"),
    ],
)
def test_what_is_no_checkpoint_is_refused(world: World, tokens: int, sizes: list[int], why: str) -> None:
    _, transfer, content = receiving(world)
    checkpoint = opened(world, transfer, tokens, sizes)
    await_over(checkpoint)
    assert checkpoint.phase.value == "failed" and why in checkpoint.reason
    assert world.receiver.stats()["refused"] == 0
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    await_over(transfer)
    assert transfer.phase.value == "complete"


def test_where_a_layout_has_none_they_are_refused(make_world: Callable[..., World]) -> None:
    world = make_world()
    _, transfer, _ = receiving(world)
    checkpoint = sent(world, transfer, 10)
    assert "there is no checkpoint of this transfer after 10 tokens" in checkpoint.reason
    transfer.abort("done")


def test_one_of_a_transfer_that_is_over_is_refused(world: World) -> None:
    ticket, transfer, _ = world.send(UNIT)
    world.await_phase(ticket, TransferPhase.COMPLETE)
    assert "the transfer that it is a checkpoint of is not under way" in sent(world, transfer, 10).reason
    world.take(ticket)
    assert "the transfer that it is a checkpoint of is not under way" in sent(world, transfer, 20).reason
    world.await_clean()


def test_an_id_that_is_not_of_the_ticket_is_refused(world: World) -> None:
    ticket, transfer, _ = receiving(world)
    offer = Offer(ticket.seal(KEY), (100,), checkpoint=20)
    other = world.sender._open("c/0", checkpoint_id(ticket.transfer_id, 10), offer, transfer.service)
    await_over(other)
    assert "ticket belongs to another transfer" in other.reason
    transfer.abort("done")


def test_each_checkpoint_has_an_id_of_its_own() -> None:
    whole = bytes(16)
    ids = {checkpoint_id(part_id(whole, part), tokens) for part in range(4) for tokens in range(100)}
    assert len(ids) == 400 and checkpoint_id(whole, 0) == whole


def test_a_producer_that_is_lost_takes_all_of_them_with_it(world: World) -> None:
    """The sweep ends the transfer, and so the checkpoint that was under way, before it comes to that one."""
    ticket, transfer, _ = receiving(world)
    half = opened(world, transfer, 20)
    half.put(0, 0, BytesSource(bytes(50)))
    await_true(lambda: half.acked_bytes == 50, PATIENCE_S, lambda: "half of it")
    world.sender.close()
    world.await_phase(ticket, TransferPhase.FAILED)
    await_true(lambda: world.arena.used_blocks == 0, PATIENCE_S, lambda: str(world.receiver.stats()))
    assert world.receiver.stats()["failed"] == 1
    assert world.receiver.stats()["thread_errors"] == 0


@pytest.mark.parametrize("covered", [10, 20, 40])
def test_the_newest_that_can_be_used_is_handed_over(world: World, covered: int) -> None:
    ticket, transfer, content = receiving(world)
    for tokens in (10, 20, 40, 60):
        assert sent(world, transfer, tokens).phase.value == "complete"
    transfer.put(0, 0, BytesSource(content[0][:covered]))
    world.await_received(ticket, covered)
    transfer.abort("the engine dies")
    status = world.await_phase(ticket, TransferPhase.FAILED)
    assert status.usable_tokens == covered
    staged = world.receiver.transfers.take(ticket.transfer_id, broken_tokens=covered)
    assert staged is not None and staged.checkpoint is not None
    assert staged.checkpoint.num_tokens == covered
    (data,) = staged.checkpoint.region_views(0, 0, 100)
    assert bytes(data) == covered.to_bytes(100)
    staged.free()
    world.await_clean()


def test_one_that_comes_after_its_transfer_is_complete_can_be_used_too(world: World) -> None:
    """Another part of the KV may still break."""
    ticket, transfer, content = receiving(world)
    late = opened(world, transfer, 20)
    late.put(0, 0, BytesSource(bytes(50)))
    await_true(lambda: late.acked_bytes == 50, PATIENCE_S, lambda: "half of it")
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    world.await_phase(ticket, TransferPhase.COMPLETE)
    assert world.status(ticket).usable_tokens == 0
    late.put(0, 50, BytesSource(bytes(50)))
    late.end()
    await_true(lambda: world.status(ticket).usable_tokens == 20, PATIENCE_S, lambda: "it has come")
    world.take(ticket)
    world.await_clean()


def test_one_that_breaks_with_its_transfer_leaves_nothing(world: World) -> None:
    ticket, transfer, content = receiving(world)
    sent(world, transfer, 10)
    half = opened(world, transfer, 20)
    half.put(0, 0, BytesSource(bytes(50)))
    transfer.put(0, 0, BytesSource(content[0]))
    world.await_received(ticket, UNIT)
    await_true(lambda: half.acked_bytes == 50, PATIENCE_S, lambda: "half of it")
    world.receiver.transfers.drop(ticket.transfer_id, "its engine is dead", keep=True)
    assert world.status(ticket).usable_tokens == 10
    # The transfer's own, and the checkpoint's: nothing of the one that had not come.
    assert world.arena.used_blocks == 2
    await_over(half)
    assert "the transfer that it is a checkpoint of has failed" in half.reason
    world.receiver.transfers.drop(ticket.transfer_id, "the client has left")
    assert world.arena.used_blocks == 0
    assert world.receiver.stats()["checkpoints"] == 1
    assert world.receiver.stats()["failed"] == 1


def test_a_checkpoint_leaves_before_the_rest_of_its_transfer_alone() -> None:
    first, second = order_of_open(5.0, 1), order_of_open(6.0, 2)
    checkpoints = [order_of_checkpoint(second, order_of_open(9.0, number)) for number in (7, 8)]
    assert sorted([second, *checkpoints[::-1], first]) == [first, *checkpoints, second]
    ended = order_of_ended(7.0, 100.0, 8.0, 1)
    assert sorted([first, order_of_checkpoint(ended, order_of_open(9.0, 7)), ended])[1] == ended


def test_it_overtakes_what_its_transfer_has_still_to_send(world: World) -> None:
    ticket, transfer, _ = receiving(world)
    before, after = opened(world, transfer, 10).place, opened(world, transfer, 20).place
    assert before < after < transfer.place
    transfer.abort("done")
    world.await_phase(ticket, TransferPhase.FAILED)
