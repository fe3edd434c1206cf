"""Models with states and windows, a prefill engine that dies: the decode engine goes on from the newest checkpoint."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from tests.serving.engines.vllm.test_producer_consumer import (
    FULL,
    GROUPS,
    KEY,
    STATE,
    WINDOW,
    Ends,
    assert_moved,
    copy_of,
    ends,
    load,
    make_ends,
    new_ticket,
    sends,
    table,
)

from prfaas.core.kv.groups import region_bytes
from prfaas.serving.engines.vllm.metadata import BlockRun, LoadOrder, TransferMetadata
from prfaas.serving.engines.vllm.pages import PagedSource
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.ticket import Ticket, checkpoint_id
from prfaas.serving.transport.protocol.wire import TransferPhase

__all__ = ["ends"]

TOKENS = 320
CHUNK_ENDS = [40, 80, 160, 240, 304, TOKENS]
# After these chunks; 40 is inside of a block.
AT = {80: 1, 160: 2, 240: 3}
Memory = dict[str, np.ndarray]


def checkpoint_runs(num_tokens: int, base: int = 1) -> tuple[BlockRun, ...]:
    runs = []
    for group in (STATE, WINDOW):
        moving = group.moving_blocks(num_tokens, 0)
        ids = table(group, num_tokens, base)[moving.start : moving.stop]
        runs.append(BlockRun(group.index, moving.start, tuple(ids)))
    return tuple(runs)


def steps_of(ticket: Ticket, at: tuple[int, ...] = tuple(AT)) -> list[TransferMetadata]:
    """The steps of a prefill with checkpoints after some of them."""
    steps = sends(ticket, CHUNK_ENDS)
    for end in at:
        step = steps[CHUNK_ENDS.index(end)]
        step.sends[0] = replace(
            step.sends[0], checkpoint_tokens=end, checkpoint=checkpoint_runs(end), cached_tokens=0
        )
    return steps


def part(ticket: Ticket, local_tokens: int, usable_tokens: int, base: int = 30) -> TransferMetadata:
    """The order of a load of what is kept."""
    runs = []
    for group in GROUPS:
        moving = group.moving_blocks(usable_tokens, local_tokens)
        ids = table(group, usable_tokens, base)[moving.start : moving.stop]
        runs.append(BlockRun(group.index, moving.start, tuple(ids)))
    return TransferMetadata(loads=[LoadOrder("d", ticket, local_tokens, tuple(runs), usable_tokens)])


def await_true(is_true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.002)


def checkpoints(ends: Ends) -> int:
    """How many have come."""
    count: int = ends.receiver.stats()["checkpoints"]
    return count


def await_checkpoints(ends: Ends, count: int) -> None:
    await_true(lambda: checkpoints(ends) >= count, f"{count} checkpoints have come")


def await_ready(ends: Ends) -> None:
    """Until the producer knows that its transfer was let in, and that its last checkpoint has come."""
    transfer = ends.producing._open_sends["p"][0].transfer
    await_true(
        lambda: transfer.phase is SendPhase.SENDING and bool(ends.producing.ready_for_checkpoints()),
        "a checkpoint may follow",
    )


def usable_tokens(ends: Ends, ticket: Ticket) -> int:
    """What would be kept, were the transfer to break now."""
    with ends.receiver.transfers as table:
        transfer = table._transfers.get(ticket.transfer_id)
        if transfer is None or transfer.lease is None:
            return 0
        layout = table._open_check.layout.of_transfer(ticket.transfer_id)  # type: ignore[union-attr]
        end = layout.usable_tokens(
            ticket.num_tokens, ticket.skip_tokens, transfer.covered_end, transfer.checkpoints
        )
        return int(end)


def await_usable(ends: Ends, ticket: Ticket, end: int) -> None:
    await_true(lambda: usable_tokens(ends, ticket) == end, f"{end} tokens can be used")


def broken(ends: Ends, ticket: Ticket) -> int:
    """The prefill engine dies; what is kept."""
    ends.sender.close()
    ends.complete(ticket)
    status = ends.receiver.transfers.state(ticket.transfer_id)
    assert status is not None and status.phase is TransferPhase.FAILED
    return status.usable_tokens


@dataclass
class Engine:
    """A prefill whose states are written over by the next chunk, as vLLM does where it keeps no prefixes."""

    ends: Ends
    ticket: Ticket
    then: dict[int, Memory]
    """The producer's memory at the end of each chunk."""

    def run(self, steps: int, at: tuple[int, ...] = tuple(AT)) -> None:
        random = np.random.default_rng(9)
        for end, orders in list(zip(CHUNK_ENDS, steps_of(self.ticket, at), strict=True))[:steps]:
            for name in (*STATE.layer_names, *WINDOW.layer_names):
                self.ends.east[name][:] = random.integers(0, 256, self.ends.east[name].shape, dtype=np.uint8)
            if end in at:
                await_ready(self.ends)
            self.ends.step(orders)
            self.then[end] = copy_of(self.ends.east)
            if end in at:
                await_checkpoints(self.ends, at.index(end) + 1)


def engine(ends: Ends, skip: int = 0) -> Engine:
    return Engine(ends, new_ticket(TOKENS, skip, every_tokens=16), {})


def assert_loaded(
    ends: Ends, then: Memory, before: Memory, local_tokens: int, end: int, base: int = 30
) -> None:
    """Every page of the tokens before `end` is as it was then, every other page of the consumer is untouched."""
    for group in GROUPS:
        for name in group.layer_names:
            expected = before[name].copy()
            for block in group.moving_blocks(end, local_tokens):
                expected[base + block] = then[name][1 + block]
            assert np.array_equal(ends.home[name], expected), name


@pytest.mark.parametrize(("steps", "end"), [(2, 80), (3, 160), (4, 240), (5, 240)])
@pytest.mark.parametrize(("skip", "local"), [(0, 0), (32, 48)])
def test_it_goes_on_from_the_newest_checkpoint(
    ends: Ends, steps: int, end: int, skip: int, local: int
) -> None:
    prefill = engine(ends, skip)
    prefill.run(steps)
    await_usable(ends, prefill.ticket, end)
    before = copy_of(ends.home)
    assert broken(ends, prefill.ticket) == end
    ends.order(part(prefill.ticket, local, end))
    assert ends.results() == ({"d"}, set())
    assert_loaded(ends, prefill.then[end], before, local, end)
    assert ends.arena.used_blocks == 0
    assert ends.consuming.stats.data["loads_resumed"] == 1
    assert ends.consuming.stats.data["bytes_loaded"] == sum(
        region_bytes(ends.producing._layout.regions, end, local)
    )


def test_a_load_that_waits_is_told_what_can_be_loaded(ends: Ends) -> None:
    prefill = engine(ends)
    prefill.run(3)
    await_usable(ends, prefill.ticket, 160)
    ends.order(load(prefill.ticket, 0))
    broken(ends, prefill.ticket)
    assert ends.results() == ({"d"}, {"d"})
    assert ends.consuming.take_usable()["d"].tokens == 160
    before = copy_of(ends.home)
    ends.order(part(prefill.ticket, 0, 160))
    assert ends.results() == ({"d"}, set())
    assert_loaded(ends, prefill.then[160], before, 0, 160)


def test_a_checkpoint_before_its_full_attention_does_not_count(ends: Ends) -> None:
    """The engine dies in a chunk whose checkpoint has come, and one of whose layers has not."""
    prefill = engine(ends)
    prefill.run(2)
    orders = steps_of(prefill.ticket)[2]
    await_ready(ends)
    ends.producing.save_layer(orders.sends, "a0")
    ends.producing._put_checkpoints(orders.sends[0])
    await_true(lambda: checkpoints(ends) == 2, "the second checkpoint has come")
    transfer = ends.receiver.transfers.table._transfers[prefill.ticket.transfer_id]
    assert set(transfer.checkpoints) == {80, 160}
    before = copy_of(ends.home)
    assert broken(ends, prefill.ticket) == 80
    assert set(transfer.checkpoints) == {80}
    ends.order(part(prefill.ticket, 0, 80))
    assert ends.results() == ({"d"}, set())
    assert_loaded(ends, prefill.then[80], before, 0, 80)
    assert ends.arena.used_blocks == 0


def test_the_last_two_are_kept_while_the_prefill_goes_on(ends: Ends) -> None:
    prefill = engine(ends)
    prefill.run(3)
    transfer = ends.receiver.transfers.table._transfers[prefill.ticket.transfer_id]
    steps = steps_of(prefill.ticket, (*AT, 304))
    for count, number in ((3, 3), (4, 4)):
        await_usable(ends, prefill.ticket, CHUNK_ENDS[number - 1])
        await_ready(ends)
        ends.step(steps[number])
        await_true(lambda least=count: checkpoints(ends) == least, f"{count} checkpoints have come")
    # Two of those that can be used; the fourth may still wait for its full attention.
    await_true(lambda: 80 not in transfer.checkpoints, "the first one is freed")
    assert {240, 304} <= set(transfer.checkpoints)


def test_a_complete_transfer_keeps_them_until_it_is_taken(ends: Ends) -> None:
    prefill = engine(ends)
    before = copy_of(ends.home)
    prefill.run(len(CHUNK_ENDS))
    ends.complete(prefill.ticket)
    transfer = ends.receiver.transfers.table._transfers[prefill.ticket.transfer_id]
    # Another part of the KV may still break.
    assert transfer.phase is TransferPhase.COMPLETE and set(transfer.checkpoints) == {160, 240}
    assert transfer.status().resume_points == ResumePoints(240, (160, 240))
    # Each has a page of three linear layers, and three of the window.
    assert transfer.status().checkpoint_bytes == 3 * (3 * 1000 + 3 * 512)
    ends.order(load(prefill.ticket, 0))
    assert ends.results() == ({"d"}, set())
    assert_moved(ends, prefill.ticket, 0, before)
    ends.step(TransferMetadata(held={"p": False}))
    assert ends.finished() == {"p"}
    assert ends.arena.used_blocks == 0
    stats = ends.producing.stats.data
    assert (stats["checkpoints_sent"], stats["sends_completed"], stats["sends_failed"]) == (3, 1, 0)
    received = ends.receiver.stats()
    assert [received[name] for name in ("opened", "completed", "failed", "refused")] == [1, 1, 0, 0]
    assert not ends.sender.stats()["peers"]["home/0"]["transfers"]


def test_a_complete_transfer_keeps_two_where_the_last_came_before_its_full_attention(ends: Ends) -> None:
    prefill = engine(ends)
    prefill.run(3)
    await_usable(ends, prefill.ticket, 160)
    at_240, *rest = steps_of(prefill.ticket)[3:]
    await_ready(ends)
    ends.producing._put_checkpoints(at_240.sends[0])
    await_checkpoints(ends, 3)
    transfer = ends.receiver.transfers.table._transfers[prefill.ticket.transfer_id]
    assert set(transfer.checkpoints) == {80, 160, 240}
    for step in (
        TransferMetadata(sends=[replace(at_240.sends[0], checkpoint_tokens=0, checkpoint=())]),
        *rest,
    ):
        ends.step(step)
    ends.complete(prefill.ticket)
    assert set(transfer.checkpoints) == {160, 240}
    assert transfer.status().resume_points == ResumePoints(240, (160, 240))


def test_without_digests_checkpoints_are_loaded_too() -> None:
    for plain in make_ends(page_digests=False):
        prefill = engine(plain)
        prefill.run(3)
        await_usable(plain, prefill.ticket, 160)
        before = copy_of(plain.home)
        assert broken(plain, prefill.ticket) == 160
        plain.order(part(prefill.ticket, 0, 160))
        assert plain.results() == ({"d"}, set())
        assert_loaded(plain, prefill.then[160], before, 0, 160)


@pytest.mark.parametrize("region", [0, 3])
def test_a_page_of_a_checkpoint_that_is_another_one_is_seen(ends: Ends, region: int) -> None:
    prefill = engine(ends)
    prefill.run(3)
    await_usable(ends, prefill.ticket, 160)
    broken(ends, prefill.ticket)
    checkpoint = ends.receiver.transfers.table._partials._kept[prefill.ticket.transfer_id][0].checkpoints[160]
    assert checkpoint.lease is not None
    checkpoint.lease.views(checkpoint.region_starts[region], 8)[0][3] ^= 1
    ends.order(part(prefill.ticket, 0, 160))
    assert ends.results() == ({"d"}, {"d"})
    assert ends.consuming.stats.data["digest_mismatches"] == 1
    assert ends.arena.used_blocks == 0


def test_the_one_before_the_newest_can_be_loaded_too(ends: Ends) -> None:
    """Where another rank has less."""
    prefill = engine(ends)
    prefill.run(3)
    await_usable(ends, prefill.ticket, 160)
    assert broken(ends, prefill.ticket) == 160
    status = ends.receiver.transfers.state(prefill.ticket.transfer_id)
    assert status is not None and status.usable_ends == (80, 160)
    ends.order(part(prefill.ticket, 0, 80))
    assert ends.results() == ({"d"}, set())
    await_true(lambda: ends.arena.used_blocks == 0, "staging is free")


def test_where_none_was_kept_nothing_is_loaded(ends: Ends) -> None:
    prefill = engine(ends)
    prefill.run(3)
    await_usable(ends, prefill.ticket, 160)
    assert broken(ends, prefill.ticket) == 160
    ends.order(part(prefill.ticket, 0, 144))
    assert ends.results() == ({"d"}, {"d"})
    # It is not asked for a third time.
    assert ends.consuming.take_usable() == {}
    ends.receiver.transfers.drop(prefill.ticket.transfer_id, "the prompt is computed")
    assert ends.arena.used_blocks == 0


def test_one_that_nobody_takes_is_freed(ends: Ends) -> None:
    prefill = engine(ends)
    prefill.run(3)
    await_usable(ends, prefill.ticket, 160)
    assert broken(ends, prefill.ticket) == 160
    # Three of the transfer, one of each of the last two checkpoints.
    assert ends.arena.used_blocks == 5
    ends.receiver.transfers.drop(prefill.ticket.transfer_id, "the client has left")
    assert ends.arena.used_blocks == 0


def test_a_cancelled_prefill_takes_its_checkpoint_with_it(ends: Ends) -> None:
    prefill = engine(ends)
    prefill.run(3)
    ends.receiver.transfers.drop(prefill.ticket.transfer_id, "the client has left")
    assert ends.arena.used_blocks == 0
    ends.step(steps_of(prefill.ticket)[3])
    ends.step(TransferMetadata(held={"p": True}))
    assert ends.finished() == {"p"}
    await_true(lambda: not ends.sender.stats()["peers"]["home/0"]["transfers"], "nothing is open")
    assert ends.arena.used_blocks == 0


def test_whoever_needs_the_staging_has_it(ends: Ends) -> None:
    """Staging of 4 MiB, given out by 64 KiB; the pages of 320 tokens take three of these, a checkpoint one."""
    prefill = engine(ends)
    prefill.run(3, at=(160,))
    transfer = ends.receiver.transfers.table._transfers[prefill.ticket.transfer_id]
    others = [new_ticket(TOKENS) for _ in range(21)]
    free = ends.arena.total_blocks - ends.arena.used_blocks
    assert (free, ends.arena.blocks_for(transfer.lease_bytes)) == (60, 3)
    for number, ticket in enumerate(others):
        ends.step(TransferMetadata(sends=[replace(steps_of(ticket)[0].sends[0], request_id=f"o{number}")]))
    phases = lambda: [ends.receiver.transfers.state(ticket.transfer_id) for ticket in others]  # noqa: E731
    await_true(lambda: all(phases()), "all are known")
    # 20 fit beside; one gets the checkpoint's block, and needs two more.
    await_true(lambda: transfer.checkpoints == {}, "the checkpoint has made room")
    assert usable_tokens(ends, prefill.ticket) == 0
    # With no room left a checkpoint is refused at once, and the transfer goes on.
    await_ready(ends)
    ends.step(steps_of(prefill.ticket)[3])
    open_send = ends.producing._open_sends["p"][0]
    assert open_send.checkpoint is not None
    sent = open_send.checkpoint.transfer
    await_true(lambda: sent.phase.terminal, "the checkpoint is over")
    assert "no staging is free for a checkpoint" in sent.reason
    assert not open_send.transfer.phase.terminal


def test_one_of_a_transfer_that_waits_for_staging_comes_after_it(ends: Ends) -> None:
    """A consumer refuses checkpoints of transfers that it has not let in."""
    others = [new_ticket(TOKENS) for _ in range(21)]
    for number, ticket in enumerate(others):
        ends.step(TransferMetadata(sends=[replace(steps_of(ticket)[0].sends[0], request_id=f"o{number}")]))
    await_true(
        lambda: all(ends.receiver.transfers.state(each.transfer_id) for each in others), "all are known"
    )
    prefill = engine(ends)
    orders = steps_of(prefill.ticket)
    ends.step(orders[0])

    def phase() -> TransferPhase | None:
        status = ends.receiver.transfers.state(prefill.ticket.transfer_id)
        return None if status is None else status.phase

    await_true(lambda: phase() is TransferPhase.WAITING, "the transfer waits")
    ends.step(orders[1])
    checkpoint = ends.producing._open_sends["p"][0].checkpoint
    assert checkpoint is not None
    # Frames leave in order: what follows would come behind a refusal.
    another = new_ticket(TOKENS)
    ends.step(TransferMetadata(sends=[replace(steps_of(another)[0].sends[0], request_id="o")]))
    await_true(lambda: ends.receiver.transfers.state(another.transfer_id) is not None, "another one is known")
    assert checkpoint.transfer.phase is SendPhase.OPENING
    ends.receiver.transfers.drop(another.transfer_id, "done")
    ends.receiver.transfers.drop(others[0].transfer_id, "done")
    await_checkpoints(ends, 1)
    await_usable(ends, prefill.ticket, 80)


def test_one_that_is_late_is_not_followed_by_another(ends: Ends) -> None:
    prefill = engine(ends)
    prefill.run(2, at=())
    sent: list[int] = []
    real = ends.sender.open_checkpoint

    def slow(transfer, num_tokens, region_bytes, peer):  # type: ignore[no-untyped-def]
        sent.append(num_tokens)
        found = real(transfer, num_tokens, region_bytes, peer)
        found.end = lambda: None  # it stays open
        return found

    ends.sender.open_checkpoint = slow  # type: ignore[method-assign]
    await_ready(ends)
    for orders in steps_of(prefill.ticket)[2:5]:
        ends.step(orders)
    assert sent == [160]


def test_what_leaves_is_what_was_there_when_the_chunk_ended(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = engine(ends)
    put: list[tuple[int, PagedSource]] = []
    queued = SentTransfer.put

    def late(
        transfer: SentTransfer, region: int, offset: int, source: PagedSource, *, urgent: bool = False
    ) -> None:
        if transfer.transfer_id == checkpoint_id(prefill.ticket.transfer_id, 80) and region < 4:
            put.append((region, source))
        queued(transfer, region, offset, source, urgent=urgent)

    monkeypatch.setattr(SentTransfer, "put", late)
    prefill.run(2)
    for name in (*STATE.layer_names, *WINDOW.layer_names):
        ends.east[name][:] = 0
    found: dict[int, bytearray] = {}
    for region, source in put:
        page = bytearray(source.nbytes)
        source.read_into(0, memoryview(page))
        found.setdefault(region, bytearray()).extend(page)
    then = prefill.then[80]
    expected = [then["w0"][8:11], *(then[name][5] for name in STATE.layer_names)]
    assert [bytes(found[region]) for region in range(4)] == [pages.tobytes() for pages in expected]


def test_a_page_that_cannot_be_read_costs_the_checkpoint_alone(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = engine(ends)
    orders = steps_of(prefill.ticket)
    nowhere = tuple(replace(run, block_ids=(0,) * len(run.block_ids)) for run in checkpoint_runs(80))
    orders[1].sends[0] = replace(orders[1].sends[0], checkpoint=nowhere)
    ends.step(orders[0])
    await_ready(ends)
    for each in orders[1:]:
        ends.step(each)
    assert "request p sends no checkpoint" in caplog.text
    ends.complete(prefill.ticket)
    status = ends.receiver.transfers.state(prefill.ticket.transfer_id)
    assert status is not None and status.phase is TransferPhase.COMPLETE
    ends.receiver.transfers.drop(prefill.ticket.transfer_id, "done")


def test_the_producer_of_a_model_without_states_sends_none() -> None:
    for dense in make_ends(groups=(FULL,)):
        ticket = new_ticket(TOKENS)
        step = sends(ticket, CHUNK_ENDS)[1]
        order = replace(step.sends[0], checkpoint_tokens=80)
        dense.step(TransferMetadata(sends=[order]))
        assert dense.producing.stats.data["checkpoints_sent"] == 0
        assert Ticket.unseal(order.sealed, KEY, time.time()).attributes.checkpoint_tokens == 0
