"""What senders tell of their links, and connections that are made on demand."""

import asyncio
import time
from collections.abc import Callable

import pytest

from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.pacing import ProbeOrder
from prfaas.serving.transport.protocol.wire import MAX_PROBE_BYTES

from .harness import (
    FAST_SENDER,
    FINGERPRINT,
    KEY,
    SizesByTokens,
    World,
    await_over,
    await_true,
    make_receiver,
    make_ticket,
)

MakeWorld = Callable[..., World]


def test_a_link_s_report_adds_up(world: World) -> None:
    before = world.sender.telemetry()["links"]["wan"]
    assert (before["queued_bytes"], before["open_bytes"], before["acked_bytes_total"]) == (0, 0, 0)
    assert before["waiting_bytes"] == 0
    await_true(
        lambda: world.sender.telemetry()["links"]["wan"]["connections_up"] == 4, 5, lambda: "connections"
    )
    ticket, transfer, content = world.open(30_000)
    total = sum(len(data) for data in content)
    assert world.sender.telemetry()["links"]["wan"]["open_bytes"] == total
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    await_true(lambda: transfer.phase.terminal, 10, lambda: transfer.reason)
    world.take(ticket)
    await_true(lambda: world.sender.telemetry()["links"]["wan"]["open_bytes"] == 0, 5, lambda: "end")
    after = world.sender.telemetry()["links"]["wan"]
    assert (after["queued_bytes"], after["acked_bytes_total"]) == (0, total)
    assert after["connections"] == 4


def test_a_peer_on_demand_is_connected_by_the_first_transfer() -> None:
    arena = StagingArena(1 << 20, 1 << 16)
    receiver = make_receiver(arena)
    peer = Peer("c/0", "127.0.0.1", receiver.port, "wan", 2, None, on_demand=True)
    sender = Sender(name="p/0", key=KEY, peers={"c/0": peer}, fingerprint=FINGERPRINT, options=FAST_SENDER)
    sender.start()
    try:
        time.sleep(0.2)
        report = sender.telemetry()["links"]["wan"]
        assert (report["connections_up"], report["connections"]) == (0, 0)
        assert receiver.stats()["producer_connections"] == 0
        ticket = make_ticket(1000)
        transfer = sender.open(ticket, ticket.seal(KEY), SizesByTokens().region_bytes(1000, 0))
        for region, nbytes in enumerate(SizesByTokens().region_bytes(1000, 0)):
            transfer.put(region, 0, BytesSource(bytes(nbytes)))
        transfer.end()
        await_true(lambda: transfer.phase.terminal, 10, lambda: transfer.reason)
        assert transfer.phase == "complete", transfer.reason
        assert sender.telemetry()["links"]["wan"]["connections"] == 2
    finally:
        sender.close()
        receiver.close()


def test_observers_hear_of_the_sender_beside_the_receiver(world: World) -> None:
    receiver = Receiver(
        name="p/0",
        key=KEY,
        host="127.0.0.1",
        port=0,
        arena=StagingArena(1 << 20, 1 << 16),
        layout=SizesByTokens(),
        fingerprint=FINGERPRINT,
        sender=world.sender,
    )
    receiver.start()

    async def main() -> None:
        observer = Observer("gateway", KEY, "127.0.0.1", receiver.port, "p/0")
        stats = await observer.stats()
        assert stats["sender"]["links"]["wan"]["acked_bytes_total"] == 0
        assert stats["staging_used_blocks"] == 0
        await observer.close()

    try:
        asyncio.run(main())
    finally:
        receiver.close()


def test_both_ends_count_what_the_kernels_carry(world: World) -> None:
    ticket, transfer, content = world.open(300_000)
    total = sum(len(data) for data in content)
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    await_true(lambda: transfer.phase.terminal, 10, lambda: transfer.reason)
    world.take(ticket)
    # One of them may have carried the transfer while others were being opened.
    await_true(
        lambda: world.receiver.telemetry()["arrivals"]["p/0"]["connections"] == 4, 10, lambda: "connections"
    )
    arrived = world.receiver.telemetry()["arrivals"]["p/0"]
    # Frames and the handshake come on top of the payload.
    assert total < arrived["bytes_total"] < 1.1 * total + 20_000
    assert arrived["segments_total"] * arrived["mss_bytes"] > 0
    assert (arrived["unread_bytes"], arrived["connections"]) == (0, 4)
    report = world.sender.telemetry()["links"]["wan"]
    assert report["sent_bytes_total"] >= total
    assert report["unsent_bytes"] == report["filled_connections"] == 0
    assert 0 < report["least_rtt_s"] < 1
    # A connection that has ended still counts, and one that is new does not count again.
    for connection in list(world.receiver._connections):
        connection.shut()
    await_true(
        lambda: world.receiver.telemetry()["arrivals"]["p/0"]["bytes_total"] > arrived["bytes_total"],
        10,
        lambda: "connected again",
    )
    assert world.receiver.telemetry()["arrivals"]["p/0"]["bytes_total"] < 1.2 * total + 40_000
    assert world.sender.telemetry()["links"]["wan"]["sent_bytes_total"] >= report["sent_bytes_total"]


def test_filler_crosses_an_idle_link_and_leaves_nothing(world: World) -> None:
    await_true(
        lambda: world.sender.telemetry()["links"]["wan"]["connections_up"] == 4, 5, lambda: "connections"
    )

    def arrived() -> int:
        return sum(each["bytes_total"] for each in world.receiver.telemetry()["arrivals"].values())

    before = arrived()
    world.sender.probe("wan", 2_000_000)
    world.sender.probe("elsewhere", 2_000_000)
    await_true(lambda: arrived() >= before + 2_000_000, 10, lambda: f"{arrived()} of {before}")
    world.await_clean()
    assert arrived() < before + 2_200_000
    assert world.sender.telemetry()["links"]["wan"]["open_bytes"] == 0


def test_work_ends_filler(make_world: MakeWorld) -> None:
    world = make_world(sender_options=FAST_SENDER, connections=1, bandwidth_bits_per_s=20e6)
    await_true(
        lambda: world.sender.telemetry()["links"]["wan"]["connections_up"] == 1, 5, lambda: "connections"
    )
    world.sender.probe("wan", 1 << 30)
    ticket, transfer, content = world.open(1000)
    world.sender.probe("wan", 1 << 30)
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    await_over(transfer)
    assert world.take(ticket) == content
    assert world.receiver.telemetry()["arrivals"]["p/0"]["bytes_total"] < 50_000_000


def test_an_observer_asks_for_links_alone_and_for_filler(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(world.sender, "probe", lambda link, nbytes: asked.append((link, nbytes)))
    receiver = Receiver(
        name="p/0",
        key=KEY,
        host="127.0.0.1",
        port=0,
        arena=StagingArena(1 << 20, 1 << 16),
        layout=SizesByTokens(),
        fingerprint=FINGERPRINT,
        sender=world.sender,
    )
    receiver.start()

    async def main() -> None:
        observer = Observer("control", KEY, "127.0.0.1", receiver.port, "p/0")
        await observer.order(ProbeOrder("wan", MAX_PROBE_BYTES))
        answers = await asyncio.gather(*(observer.telemetry() for _ in range(20)), observer.stats())
        assert all(set(answer) == {"arrivals", "sender"} for answer in answers[:-1])
        assert "staging_used_blocks" in answers[-1]
        await observer.close()

    try:
        asyncio.run(main())
    finally:
        receiver.close()
    assert asked == [("wan", 1 << 30)]
