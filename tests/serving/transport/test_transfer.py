"""The life of a transfer, without faults on the wire."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from prfaas.core.deployment import GATEWAY
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.protocol import outgoing, transfer_table
from prfaas.serving.transport.protocol.chunk_source import BytesSource, SourceGone
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.wire import TransferPhase, body_of

from .harness import FAST_RECEIVER, FAST_SENDER, KEY, World, await_over, await_true, with_options

MakeWorld = Callable[..., World]


@pytest.mark.parametrize("unit_bytes", [1, 63, 4096, 100_001, 2_000_003])
def test_bytes_arrive_exactly(world: World, unit_bytes: int) -> None:
    ticket, transfer, content = world.send(unit_bytes)
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    status = world.status(ticket)
    assert status.phase is TransferPhase.COMPLETE
    assert status.received_bytes == status.total_bytes == transfer.acked_bytes == 6 * unit_bytes
    assert (status.num_tokens, status.skip_tokens) == (unit_bytes, 0)
    assert world.take(ticket) == content
    assert world.status(ticket).taken
    assert world.receiver.transfers.take(ticket.transfer_id) is None
    world.await_clean()


def body_of_older(value: Any) -> dict[str, Any]:
    """What a release says that knows only the attributes without a default."""
    needed = {field.name for field in fields(value) if field.default is MISSING}
    return {name: said for name, said in body_of(value).items() if name in needed}


def body_of_newer(value: Any) -> dict[str, Any]:
    return {**body_of(value), "of_a_newer_release": {"snapshots": [1, 2]}}


@pytest.mark.parametrize(
    ("of_producer", "of_consumer"),
    [(body_of_older, body_of_newer), (body_of_newer, body_of_older)],
    ids=["older to newer", "newer to older"],
)
def test_releases_with_unlike_sets_of_attributes_transfer_what_both_know(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    of_producer: Callable[[Any], Mapping[str, Any]],
    of_consumer: Callable[[Any], Mapping[str, Any]],
) -> None:
    monkeypatch.setattr(outgoing, "body_of", of_producer)
    monkeypatch.setattr(transfer_table, "body_of", of_consumer)
    ticket, transfer, content = world.send(5000)
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason

    async def told() -> Any:
        observer = Observer(GATEWAY, KEY, "127.0.0.1", world.receiver.port, "c/0")
        try:
            return await observer.wait(ticket.transfer_id, 30.0)
        finally:
            await observer.close()

    status = asyncio.run(told())
    assert (status.phase, status.received_bytes) == (TransferPhase.COMPLETE, 30_000)
    assert world.take(ticket) == content
    world.await_clean()


def test_pieces_in_any_order_with_prefill_between(world: World) -> None:
    ticket, transfer, content = world.open(300_000)
    for region in (2, 0, 1):
        half = len(content[region]) // 2
        transfer.put(region, half, BytesSource(content[region][half:]))
        await_true(transfer.idle, 5.0, lambda: str(transfer.acked_bytes))
        transfer.put(region, 0, BytesSource(content[region][:half]))
    assert not transfer.phase.terminal
    await_true(transfer.idle, 5.0, lambda: str(transfer.acked_bytes))
    assert world.status(ticket).phase is TransferPhase.RECEIVING
    transfer.end()
    await_over(transfer)
    assert transfer.overlapped_bytes == world.status(ticket).overlapped_bytes == transfer.total_bytes
    assert world.take(ticket) == content
    world.await_clean()


def test_bytes_put_after_end_complete_it(world: World) -> None:
    ticket, transfer, content = world.open(1000)
    transfer.end()
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    await_over(transfer)
    assert world.take(ticket) == content


def test_many_transfers_at_once(world: World) -> None:
    sent = [world.send(40_000 + index) for index in range(40)]
    for ticket, transfer, content in sent:
        await_over(transfer)
        assert world.take(ticket) == content
    world.await_clean()


def test_put_is_checked(world: World) -> None:
    _, transfer, content = world.open(1000)
    transfer.put(0, 0, BytesSource(content[0][:500]))
    for region, offset, nbytes in ((0, 499, 10), (0, 600, 401), (3, 0, 1), (-1, 0, 1), (0, -1, 2)):
        with pytest.raises(ValueError, match="region"):
            transfer.put(region, offset, BytesSource(bytes(nbytes)))
    transfer.abort("enough")
    transfer.put(0, 0, BytesSource(content[0]))  # over: ignored


def test_abort_and_drop_at_every_stage(world: World) -> None:
    """Idempotent on both sides, whatever has happened already."""
    for stage in ("opened", "some", "all put", "ended", "complete"):
        for side in ("abort", "drop"):
            ticket, transfer, content = world.open(400_000)
            if stage != "opened":
                transfer.put(0, 0, BytesSource(content[0]))
            if stage in ("all put", "ended", "complete"):
                transfer.put(1, 0, BytesSource(content[1]))
                transfer.put(2, 0, BytesSource(content[2]))
            if stage in ("ended", "complete"):
                transfer.end()
            if stage == "complete":
                await_over(transfer)
            for _ in range(2):
                if side == "abort":
                    transfer.abort("client left")
                else:
                    world.receiver.transfers.drop(ticket.transfer_id, "client left")
            if side == "drop":
                transfer.put(0, 0, BytesSource(content[0])) if stage == "opened" else None
                await_over(transfer)
            else:
                assert transfer.await_quiescent(5.0)
                world.receiver.transfers.drop(ticket.transfer_id, "over")
            expected = (SendPhase.COMPLETE, SendPhase.FAILED)
            assert transfer.phase in (expected if stage in ("ended", "complete") else expected[1:])
            status = world.receiver.transfers.state(ticket.transfer_id)
            assert status is not None and status.phase is TransferPhase.FAILED
            assert world.receiver.transfers.take(ticket.transfer_id) is None
    world.await_clean()


def test_abort_tells_the_consumer(world: World) -> None:
    ticket, transfer, content = world.open(100_000)
    transfer.put(0, 0, BytesSource(content[0]))
    world.await_phase(ticket, TransferPhase.RECEIVING)
    transfer.abort("preempted")
    status = world.await_phase(ticket, TransferPhase.FAILED)
    assert status.reason == "producer aborted: preempted"


def test_staging_full_makes_others_wait_in_order(make_world: MakeWorld) -> None:
    world = make_world(staging_bytes=4 << 20)
    sent = []
    for _ in range(5):  # one fits at a time; the order is that of arrival
        sent.append(world.send(500_000))
        known = sent[-1][0].transfer_id
        await_true(lambda known=known: world.receiver.transfers.state(known) is not None, 5.0, lambda: "OPEN")
    for ticket, transfer, content in sent:
        world.await_phase(ticket, TransferPhase.COMPLETE)
        later = [
            t for t, _, _ in sent if (s := world.receiver.transfers.state(t.transfer_id)) and not s.taken
        ]
        assert later[0] is ticket
        assert all(world.status(t).phase is TransferPhase.WAITING for t in later[1:])
        assert world.take(ticket) == content
        await_over(transfer)
    world.await_clean()
    assert world.arena.peak_used_blocks <= world.arena.total_blocks


def test_staging_goes_to_the_background_last(make_world: MakeWorld) -> None:
    world = make_world(staging_bytes=4 << 20)
    sent = []
    for background in (False, True, False, True, False):
        sent.append(world.send(500_000, background=background))
        known = sent[-1][0].transfer_id
        await_true(lambda known=known: world.receiver.transfers.state(known) is not None, 5.0, lambda: "OPEN")
    for number in (0, 2, 4, 1, 3):
        ticket, transfer, content = sent[number]
        world.await_phase(ticket, TransferPhase.COMPLETE)
        assert world.take(ticket) == content
        await_over(transfer)
    world.await_clean()


def test_staging_wait_ends_in_a_refusal(make_world: MakeWorld) -> None:
    world = make_world(
        staging_bytes=4 << 20, receiver_options=with_options(FAST_RECEIVER, staging_wait_s=0.3)
    )
    first, _, _ = world.send(500_000)
    world.await_phase(first, TransferPhase.COMPLETE)
    _, transfer, _ = world.send(500_000)
    await_over(transfer)
    assert transfer.phase is SendPhase.FAILED
    assert transfer.reason == "c/0 refused: staging was full for 0.3 s"
    world.take(first)
    world.await_clean()


def test_too_large_for_staging_is_refused(world: World) -> None:
    _, transfer, _ = world.open(6 << 20)
    await_over(transfer)
    assert "can never fit into staging" in transfer.reason


def test_waiting_transfer_can_be_aborted_and_dropped(make_world: MakeWorld) -> None:
    world = make_world(staging_bytes=4 << 20)
    first, _, _ = world.send(500_000)
    world.await_phase(first, TransferPhase.COMPLETE)
    aborted, transfer_a, _ = world.send(500_000)
    dropped, transfer_d, _ = world.send(500_000)
    last, transfer_l, content = world.send(500_000)
    world.await_phase(last, TransferPhase.WAITING)
    transfer_a.abort("no longer wanted")
    world.receiver.transfers.drop(dropped.transfer_id, "client left")
    world.await_phase(aborted, TransferPhase.FAILED)
    await_over(transfer_d)
    assert transfer_d.reason == "c/0 refused: client left"
    world.take(first)
    await_over(transfer_l)
    assert world.take(last) == content
    world.await_clean()


def test_complete_but_never_taken_expires(make_world: MakeWorld) -> None:
    world = make_world(receiver_options=with_options(FAST_RECEIVER, staging_ttl_s=0.2))
    ticket, transfer, _ = world.send(1000)
    await_over(transfer)
    status = world.await_phase(ticket, TransferPhase.FAILED)
    assert status.reason == "nobody took it within 0.2 s"
    assert world.receiver.stats()["expired"] == 1
    world.await_clean()


def test_end_without_the_bytes_fails(make_world: MakeWorld) -> None:
    world = make_world(receiver_options=with_options(FAST_RECEIVER, progress_deadline_s=0.4))
    ticket, transfer, content = world.open(1000)
    transfer.put(0, 0, BytesSource(content[0]))
    transfer.end()
    status = world.await_phase(ticket, TransferPhase.FAILED)
    assert "no progress" in status.reason
    await_over(transfer)
    assert transfer.reason == f"c/0 aborted: {status.reason}"
    world.await_clean()


def test_slow_prefill_is_no_failure(make_world: MakeWorld) -> None:
    world = make_world(
        receiver_options=with_options(FAST_RECEIVER, progress_deadline_s=0.2),
        sender_options=with_options(FAST_SENDER, progress_deadline_s=0.2, transfer_deadline_s=0.3),
    )
    ticket, transfer, content = world.open(1000)
    for region, data in enumerate(content):
        time.sleep(0.5)
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    await_over(transfer)
    assert world.take(ticket) == content


def test_idle_deadline_ends_a_forgotten_transfer(make_world: MakeWorld) -> None:
    world = make_world(receiver_options=replace(FAST_RECEIVER, idle_deadline_s=0.3))
    ticket, transfer, _ = world.open(1000)
    assert "no progress" in world.await_phase(ticket, TransferPhase.FAILED).reason
    await_over(transfer)
    world.await_clean()


class _GoneSource:
    nbytes = 1000

    def views(self, start: int, nbytes: int) -> None: ...

    def read_into(self, start: int, out: memoryview) -> None:
        raise SourceGone("blocks were freed")


def test_source_gone_fails_only_its_transfer(world: World) -> None:
    ticket, transfer, _ = world.open(1000)
    transfer.put(0, 0, _GoneSource())
    other_ticket, other, content = world.send(5000)
    await_over(transfer)
    assert transfer.reason == "source gone: blocks were freed"
    world.await_phase(ticket, TransferPhase.FAILED)
    await_over(other)
    assert world.take(other_ticket) == content
    world.await_clean()


class _SlowSource:
    def __init__(self) -> None:
        self.nbytes = 1000
        self.reading = threading.Event()
        self.go_on = threading.Event()

    def views(self, start: int, nbytes: int) -> None: ...

    def read_into(self, start: int, out: memoryview) -> None:
        self.reading.set()
        assert self.go_on.wait(60)


def test_quiescent_waits_for_a_running_read(world: World) -> None:
    """Engine memory may be reused only once nobody reads it any more."""
    _, transfer, _ = world.open(1000)
    source = _SlowSource()
    transfer.put(0, 0, source)
    assert source.reading.wait(60)
    transfer.abort("preempted")
    assert transfer.phase is SendPhase.FAILED
    assert not transfer.idle()
    assert not transfer.await_quiescent(0.1)
    source.go_on.set()
    assert transfer.await_quiescent(5.0)
    assert transfer.idle()
    world.await_clean()


@pytest.mark.slow("connections wait for each other, and for time limits")
def test_finished_transfer_keeps_no_source(world: World) -> None:
    import gc
    import weakref

    ticket, transfer, content = world.open(100_000)
    sources = [BytesSource(data) for data in content]
    alive = [weakref.ref(source) for source in sources]
    for region, source in enumerate(sources):
        transfer.put(region, 0, source)
    transfer.abort("over")
    await_over(transfer)
    del sources, source
    # A writer's last chunk lives on in its frame until the next one.
    world.take(world_send_complete(world))
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    world.receiver.transfers.drop(ticket.transfer_id, "over")


def world_send_complete(world: World):  # type: ignore[no-untyped-def]
    ticket, transfer, _ = world.send(2_000_000)
    await_over(transfer)
    return ticket


def test_unknown_peer_and_double_open(world: World) -> None:
    ticket, transfer, _ = world.open(1000)
    again = world.sender.open(ticket, ticket.seal(bytes(32)), [1, 2, 3])
    assert (again.phase, again.reason) == (SendPhase.FAILED, "this transfer is open already")
    stranger = world.sender.open(replace(ticket, consumer="nobody"), "", [1])
    assert stranger.reason == "p/0 has no peer named nobody"
    assert stranger.await_quiescent(0)
    transfer.abort("over")


def test_empty_transfer_completes(make_world: MakeWorld) -> None:
    world = make_world()
    world.layout.regions = 0
    ticket, transfer, _ = world.send(1)
    await_over(transfer)
    assert world.take(ticket) == []
