"""What senders tell of their links, and connections that are made on demand."""

import asyncio
import time

from prfaas.serving.transport import BytesSource, Observer
from prfaas.serving.transport.options import Peer
from prfaas.serving.transport.receiver import Receiver
from prfaas.serving.transport.sender import Sender
from prfaas.serving.transport.staging import StagingArena

from .harness import (
    FAST_SENDER,
    FINGERPRINT,
    KEY,
    SizesByTokens,
    World,
    await_true,
    make_receiver,
    make_ticket,
)


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
        sender_telemetry=world.sender.telemetry,
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
