"""Connections cut, bytes damaged, peers killed: the result is byte-exact or a clean failure, and nothing is left."""

import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.wire import FrameType, TransferPhase

from .harness import (
    FAST_RECEIVER,
    FAST_SENDER,
    KEY,
    PATIENT_RECEIVER,
    PATIENT_SENDER,
    SizesByTokens,
    World,
    await_over,
    await_true,
    make_receiver,
    make_sender,
    make_ticket,
    receive_control,
    server_handshake,
    with_options,
)
from .proxy import FaultyProxy

MakeWorld = Callable[..., World]


@pytest.fixture
def proxies() -> Iterator[Callable[..., FaultyProxy]]:
    made: list[FaultyProxy] = []

    def make(**how: int) -> FaultyProxy:
        made.append(FaultyProxy(**how))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 16),
    connections=st.integers(1, 4),
    unit_bytes=st.integers(50_000, 700_000),
    cut_after_bytes=st.integers(100_000, 2_000_000),
    cuts=st.integers(0, 10),
    flips=st.integers(0, 3),
)
@pytest.mark.slow("a faulty link takes its time")
def test_result_is_exact_through_a_faulty_link(
    seed: int, connections: int, unit_bytes: int, cut_after_bytes: int, cuts: int, flips: int
) -> None:
    """Invariant: whatever is cut or damaged on the way, a COMPLETE transfer has exactly the bytes that were put."""
    proxy = FaultyProxy(seed=seed, cut_after_bytes=cut_after_bytes, cuts=cuts, flips=flips)
    arena = StagingArena(16 << 20, 256 << 10)
    layout = SizesByTokens()
    # Deadlines far off: a busy machine must not look like a dead peer here.
    patient = with_options(PATIENT_RECEIVER, progress_deadline_s=10.0)
    receiver = make_receiver(arena, layout=layout, options=patient)
    options = with_options(PATIENT_SENDER, chunk_bytes=64 << 10, progress_deadline_s=10.0)
    sender = make_sender(proxy.start(receiver.port), connections=connections, options=options)
    world = World(receiver, sender, arena, layout, seed)
    try:
        sent = [world.send(unit_bytes) for _ in range(3)]
        for ticket, transfer, content in sent:
            await_over(transfer)
            assert transfer.phase is SendPhase.COMPLETE, transfer.reason
            assert transfer.acked_bytes == transfer.total_bytes
            assert world.status(ticket).received_bytes == transfer.total_bytes
            assert world.take(ticket) == content
        world.await_clean()
    finally:
        proxy.close()
        world.close()


def test_damaged_chunk_is_sent_again(make_world: MakeWorld, proxies: Callable[..., FaultyProxy]) -> None:
    proxy = proxies(seed=3, flips=4)
    world = make_world(through=proxy.start, connections=1)
    for _ in range(8):
        ticket, transfer, content = world.send(200_000)
        await_over(transfer)
        assert transfer.phase is SendPhase.COMPLETE, transfer.reason
        assert world.take(ticket) == content
    world.await_clean()
    stats = world.sender.stats()["peers"]["c/0"]
    assert proxy.flips_left < 4
    assert stats["resent_chunks"] + stats["connects"] > 1


def test_all_connections_lost_within_the_grace(world: World) -> None:
    """Every socket of the producer is closed by the consumer's side in the middle, twice."""
    ticket, transfer, content = world.open(600_000)
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
        await_true(transfer.idle, 5.0, lambda: str(transfer.acked_bytes))
        for connection in list(world.receiver._connections):
            connection.shut()
    transfer.end()
    await_over(transfer)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    assert world.take(ticket) == content
    world.await_clean()


def test_sockets_closed_at_random(make_world: MakeWorld) -> None:
    rng = random.Random(11)
    world = make_world(
        sender_options=replace(PATIENT_SENDER, chunk_bytes=64 << 10), receiver_options=PATIENT_RECEIVER
    )

    def requeued_chunks() -> int:
        return int(world.sender.stats()["peers"]["c/0"]["requeued_chunks"])

    done = 0
    # On a machine that starves, a transfer may be over before this thread runs.
    while done < 6 or (requeued_chunks() == 0 and done < 100):
        done += 1
        ticket, transfer, content = world.send(1_000_000)
        while not transfer.phase.terminal:
            time.sleep(rng.uniform(0.001, 0.004))
            ends = [*world.receiver._connections, *world.sender._connections["c/0"]]
            rng.choice(ends).shut()
            if rng.random() < 0.2:
                time.sleep(0.03)
        await_over(transfer)
        assert transfer.phase is SendPhase.COMPLETE, transfer.reason
        assert world.take(ticket) == content
    world.await_clean()
    assert requeued_chunks() > 0


def test_producer_killed_fails_at_the_consumer(make_world: MakeWorld) -> None:
    world = make_world()
    doomed = make_sender(world.receiver.port)
    world.senders.append(doomed)
    ticket, transfer, content = world.open(100_000, sender=doomed)
    transfer.put(0, 0, BytesSource(content[0]))
    await_true(transfer.idle, 5.0, lambda: "idle")
    world.await_phase(ticket, TransferPhase.RECEIVING)
    doomed.close()
    assert transfer.phase is SendPhase.FAILED
    began_s = time.monotonic()
    status = world.await_phase(ticket, TransferPhase.FAILED)
    assert status.reason == "connection to p/0 lost"
    assert time.monotonic() - began_s < FAST_RECEIVER.limits.resume_s + 60.0
    ticket, transfer, content = world.send(1000)  # the other run of p/0 is not touched
    await_over(transfer)
    assert world.take(ticket) == content


def test_consumer_killed_fails_at_the_producer_and_its_successor_serves(make_world: MakeWorld) -> None:
    world = make_world()
    _, transfer, content = world.open(100_000)
    transfer.put(0, 0, BytesSource(content[0]))
    await_true(transfer.idle, 5.0, lambda: "idle")
    port = world.receiver.port
    world.receiver.close()
    assert world.arena.used_blocks == 0
    await_over(transfer)
    assert transfer.phase is SendPhase.FAILED
    assert "unreachable" in transfer.reason or "shuts down" in transfer.reason
    world.receiver = make_receiver(world.arena, layout=world.layout, port=port)
    ticket, transfer, content = world.send(1000)
    await_over(transfer)
    assert world.take(ticket) == content
    world.await_clean()


def test_consumer_restarted_within_the_grace_fails_the_transfer(make_world: MakeWorld) -> None:
    """A new consumer knows nothing of the transfer: it must say so, not let it hang."""
    world = make_world()
    _, transfer, content = world.open(100_000)
    transfer.put(0, 0, BytesSource(content[0]))
    await_true(transfer.idle, 5.0, lambda: "idle")
    port = world.receiver.port
    # As if killed: no ABORT comes.
    world.receiver.transfers.table.close = lambda _now_s: None  # type: ignore[method-assign]
    world.receiver.close()
    world.arena = StagingArena(16 << 20)
    world.receiver = make_receiver(world.arena, layout=world.layout, port=port)
    # Even where nothing more is to be sent.
    await_over(transfer)
    assert transfer.reason == "c/0 refused: c/0 does not know the transfer: it was restarted"
    world.await_clean()


def test_frozen_link_is_noticed(make_world: MakeWorld, proxies: Callable[..., FaultyProxy]) -> None:
    """No byte passes in either direction although all connections stay open."""
    proxy = proxies(seed=5)
    options = with_options(FAST_SENDER, progress_deadline_s=0.4, transfer_deadline_s=1.5, connect_s=0.3)
    world = make_world(
        through=proxy.start,
        sender_options=options,
        receiver_options=with_options(FAST_RECEIVER, progress_deadline_s=0.8),
    )
    _, transfer, content = world.open(2_000_000)
    transfer.put(0, 0, BytesSource(content[0]))
    await_true(transfer.idle, 5.0, lambda: "idle")
    proxy.freeze()
    transfer.put(1, 0, BytesSource(content[1]))
    transfer.put(2, 0, BytesSource(content[2]))
    transfer.end()
    await_over(transfer)
    assert transfer.phase is SendPhase.FAILED
    assert "unreachable" in transfer.reason or "no progress" in transfer.reason


def test_nobody_listens(make_world: MakeWorld) -> None:
    import socket

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        world = make_world(through=lambda _: int(reserved.getsockname()[1]))
        _, transfer, _ = world.send(1000)
        await_over(transfer)
        assert transfer.reason.startswith("c/0 unreachable")
        assert world.sender.stats()["peers"]["c/0"]["connect_failures"] > 0


def test_close_in_the_middle_leaves_nothing(make_world: MakeWorld) -> None:
    for side in ("sender", "receiver"):
        world = make_world(bandwidth_bits_per_s=40e6)
        sent = [world.send(300_000) for _ in range(3)]
        await_true(lambda sent=sent: sent[0][1].acked_bytes > 0, 5.0, lambda: "ack")
        getattr(world, side).close()
        for _, transfer, _ in sent:
            await_over(transfer)
            assert transfer.phase is SendPhase.FAILED


def test_an_answer_that_was_lost_with_another_connection_is_asked_for_again() -> None:
    """A consumer accepts a transfer on any connection of the producer, so also on one that is about to end."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = make_sender(listener.getsockname()[1], connections=2)
    consumers: list[socket.socket] = []
    try:
        for _ in range(2):
            consumers.append(listener.accept()[0])
            server = server_handshake("c/0")
            server.welcome(consumers[-1], producers=["p/0"])
        await_true(lambda: sender.stats()["peers"]["c/0"]["connections"] == 2, 5.0, lambda: "up")
        ticket = make_ticket(100)
        sender.open(ticket, ticket.seal(KEY), [100, 200, 300])
        (asked,), _, _ = select.select(consumers, [], [], 20)
        assert receive_control(asked)[0].kind is FrameType.OPEN
        (other,) = (sock for sock in consumers if sock is not asked)
        other.shutdown(socket.SHUT_RDWR)
        asked.settimeout(20)
        while receive_control(asked)[0].kind is not FrameType.OPEN:
            pass
    finally:
        sender.close()
        for sock in [listener, *consumers]:
            sock.close()
