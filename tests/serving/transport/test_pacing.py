"""A slow link: the rate holds, progress is smooth, END overtakes, and peers share one budget."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable

import pytest

from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.sockets import SO_MAX_PACING_RATE, packet_bytes
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.options import Peer
from prfaas.serving.transport.protocol.pacing import LinkPacer, PaceOrder
from prfaas.serving.transport.protocol.wire import WireError, body_of, read_body

from .harness import (
    FAST_SENDER,
    FINGERPRINT,
    KEY,
    PATIENT_SENDER,
    World,
    await_over,
    await_true,
    make_receiver,
)

MakeWorld = Callable[..., World]


class _Socket:
    rate: int | None = None
    least_bytes_per_s = 0.0

    def set_rate(self, bytes_per_s: int | None) -> None:
        self.rate = bytes_per_s


def test_budget_is_divided_over_those_who_work() -> None:
    pacer = LinkPacer(80e6)
    one, two, three = _Socket(), _Socket(), _Socket()
    pacer.update("a", [one, two], 0.0)
    assert (one.rate, two.rate) == (5_000_000, 5_000_000)
    pacer.update("b", [three], 0.0)
    assert {one.rate, two.rate, three.rate} == {3_333_333}
    pacer.set_bandwidth(40e6)
    assert {one.rate, two.rate, three.rate} == {1_666_666}
    pacer.set_bandwidth(800e6)
    pacer.update("a", [], 0.0)
    assert three.rate == 10_000_000
    pacer.update("b", [], 0.0)
    unpaced = LinkPacer(None)
    four = _Socket()
    unpaced.update("a", [four], 0.0)
    assert four.rate is None


def test_what_is_told_holds_for_a_while_and_never_exceeds_the_link() -> None:
    pacer = LinkPacer(80e6, 20e6)
    one = _Socket()
    pacer.update("a", [one], 0.0)
    assert (one.rate, pacer.pace_bits_per_s) == (2_500_000, 20e6)
    pacer.order(60e6, 3.0, 0.0)
    assert (one.rate, pacer.pace_bits_per_s) == (7_500_000, 60e6)
    pacer.order(1e12, 3.0, 0.0)
    assert one.rate == 10_000_000
    pacer.look(2.9)
    assert one.rate == 10_000_000
    pacer.look(3.0)
    assert (one.rate, pacer.pace_bits_per_s) == (2_500_000, 20e6)
    pacer.order(60e6, 3.0, 3.0)
    pacer.update("a", [one], 9.0)
    assert one.rate == 2_500_000
    unpaced = LinkPacer(None)
    unpaced.update("a", [one], 9.0)
    unpaced.order(8.0, 3.0, 9.0)
    assert (one.rate, unpaced.pace_bits_per_s) == (2_500_000, None)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"links": [], "hold_ms": 1},
        {"links": {"wan": 0}, "hold_ms": 1},
        {"links": {"wan": -1}, "hold_ms": 1},
        {"links": {"wan": 1.5}, "hold_ms": 1},
        {"links": {"wan": True}, "hold_ms": 1},
        {"links": {"wan": 1 << 51}, "hold_ms": 1},
        {"links": {"x" * 256: 1}, "hold_ms": 1},
        {"links": {str(number): 1 for number in range(257)}, "hold_ms": 1},
        {"links": {"wan": 1}},
        {"links": {"wan": 1}, "hold_ms": 60_001},
    ],
)
def test_an_absurd_order_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(WireError):
        read_body(PaceOrder, body)


def test_an_order_survives_the_wire() -> None:
    order = PaceOrder({"a->b": 20_000_000}, 2500)
    assert body_of(order) == {"links": {"a->b": 20_000_000}, "hold_ms": 2500}
    assert read_body(PaceOrder, body_of(order)) == order


def test_an_order_leaves_each_connection_enough_for_a_packet() -> None:
    """A packet that leaves at a lower rate holds up all behind it, whatever is ordered later."""
    pacer = LinkPacer(80e6, 20e6)
    one, two = _Socket(), _Socket()
    one.least_bytes_per_s = two.least_bytes_per_s = 131_072.0
    pacer.update("a", [one, two], 0.0)
    pacer.order(1, 3.0, 0.0)
    assert (one.rate, two.rate) == (131_072, 131_072)
    # What the file gives is enough, however narrow: a floor must not overbook the link.
    narrow = LinkPacer(1e6, 0.5e6)
    narrow.update("a", [one, two], 0.0)
    narrow.order(1, 3.0, 0.0)
    assert (one.rate, two.rate) == (31_250, 31_250)


def test_a_tiny_pace_leaves_real_connections_a_packet_in_half_a_second(make_world: MakeWorld) -> None:
    """By the kernel's own word: at 1 bit/s a packet of 64 KiB would hold its connection for days."""
    world = make_world(bandwidth_bits_per_s=800e6, sender_options=PATIENT_SENDER, connections=2)
    await_true(lambda: world.receiver.stats()["connections"] == 2, 5.0, lambda: "up")
    ticket, transfer, content = world.open(200_000)
    world.sender.pace(PaceOrder({"wan": 1}, 60_000))
    for connection in world.sender._connections["c/0"]:
        sock = connection._sock
        assert sock is not None
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)
        assert int.from_bytes(raw, sys.byteorder) >= packet_bytes(sock) / 0.5 > 0
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    world.sender.pace(PaceOrder({"wan": 800_000_000}, 60_000))
    transfer.end()
    await_over(transfer)
    assert transfer.phase == "complete", transfer.reason
    assert world.take(ticket) == content


def test_a_probe_is_what_the_link_carries_in_a_second_at_most() -> None:
    pacer = LinkPacer(80e6)
    assert pacer.admit_probe(1 << 30, 0.0) == 10_000_000
    assert pacer.admit_probe(1, 0.4) == 0
    assert pacer.admit_probe(1000, 0.6) == 1000
    assert LinkPacer(1000.0).admit_probe(1 << 30, 0.0) == 64 << 10
    assert LinkPacer(None).admit_probe(1 << 30, 0.0) == 16_000_000


def test_an_observer_paces_the_sender_beside_a_receiver() -> None:
    arena = StagingArena(8 << 20)
    peer = Peer("c/0", "127.0.0.1", 1, "wan", 1, 64e6, on_demand=True, share_bits_per_s=16e6)
    sender = Sender(name="c/0", key=KEY, peers={"c/0": peer}, fingerprint=FINGERPRINT, options=FAST_SENDER)
    receiver = make_receiver(arena, sender=sender)

    async def main() -> None:
        observer = Observer("control", KEY, "127.0.0.1", receiver.port, "c/0")
        await observer.order(PaceOrder({"wan": 32_000_000, "unknown": 5}, 30_000))
        await observer.stats()  # answered behind it
        assert sender._pacers["wan"].pace_bits_per_s == 32e6
        await observer.close()

    try:
        asyncio.run(main())
    finally:
        receiver.close()


def test_urgent_chunks_of_a_transfer_leave_first(make_world: MakeWorld) -> None:
    world = make_world(sender_options=FAST_SENDER, connections=1)
    read: list[str] = []

    class Noted(BytesSource):
        def __init__(self, name: str, nbytes: int) -> None:
            super().__init__(bytes(nbytes))
            self.name = name

        def views(self, start: int, nbytes: int) -> list[memoryview]:
            read.append(self.name)
            return super().views(start, nbytes)

    ticket, transfer, _ = world.open(1000)
    first = threading.Event()

    class Gate(Noted):
        def views(self, start: int, nbytes: int) -> list[memoryview]:
            first.wait(20)
            return super().views(start, nbytes)

    transfer.put(0, 0, Gate("gate", 1000))
    transfer.put(1, 0, Noted("bulk", 2000))
    transfer.put(2, 0, Noted("urgent", 1000), urgent=True)
    transfer.put(2, 1000, Noted("urgent too", 2000), urgent=True)
    first.set()
    transfer.end()
    await_over(transfer)
    assert [name for name in read if name != "gate"] == ["urgent", "urgent too", "bulk"]
    world.take(ticket)


def test_peers_of_one_link_must_agree() -> None:
    peers = {name: Peer(name, "127.0.0.1", 1, "wan", 1, rate) for name, rate in (("a", 1e6), ("b", 2e6))}
    with pytest.raises(ValueError, match="link 'wan' name different bandwidths"):
        Sender(name="p", key=KEY, peers=peers, fingerprint=FINGERPRINT)


def test_rate_is_never_exceeded_and_progress_is_smooth(make_world: MakeWorld) -> None:
    asked_bits_per_s = 50e6
    world = make_world(bandwidth_bits_per_s=asked_bits_per_s, sender_options=FAST_SENDER)
    ticket, transfer, content = world.open(1_600_000)  # 9.6 MB: about 1.5 s
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    await_true(lambda: transfer.acked_bytes > 0, 5.0, lambda: "first ack")
    marks: list[tuple[float, int]] = []
    ended = False
    while transfer.acked_bytes < transfer.total_bytes:
        marks.append((time.perf_counter(), transfer.acked_bytes))
        if not ended and transfer.acked_bytes > transfer.total_bytes // 2:
            transfer.end()
            ended = True
            await_true(lambda: world.status(ticket).overlapped_bytes > 0, 5.0, lambda: "END")
            assert transfer.acked_bytes < transfer.total_bytes  # END overtook what was queued before it
        time.sleep(0.01)
        assert time.perf_counter() - marks[0][0] < 60
    marks.append((time.perf_counter(), transfer.acked_bytes))
    await_over(transfer)
    # The first fifth is left out: TCP starts with a burst.
    start = next(mark for mark in marks if mark[1] > transfer.total_bytes // 5)
    rate = (marks[-1][1] - start[1]) * 8 / (marks[-1][0] - start[0])
    assert rate < 1.1 * asked_bits_per_s
    assert len({acked for _, acked in marks}) > 10  # many small chunks, not a few large ones
    assert transfer.overlapped_bytes == world.status(ticket).overlapped_bytes < transfer.total_bytes
    report = world.sender.telemetry()["links"]["wan"]
    assert report["unsent_bytes"] < 4 * 200_000  # the queue is ours, not the kernel's
    assert report["busy_s_total"] > 0
    assert world.take(ticket) == content


def test_two_peers_share_the_link() -> None:
    arenas = [StagingArena(8 << 20) for _ in range(2)]
    receivers = [make_receiver(arena) for arena in arenas]
    peers = {
        f"c{index}": Peer("c/0", "127.0.0.1", receiver.port, "wan", 2, 64e6)
        for index, receiver in enumerate(receivers)
    }
    sender = Sender(name="p/0", key=KEY, peers=peers, fingerprint=FINGERPRINT, options=FAST_SENDER)
    sender.start()
    worlds = [
        World(receiver, sender, arena, receiver.transfers.table._open_check.layout)  # type: ignore[arg-type]
        for receiver, arena in zip(receivers, arenas, strict=True)
    ]
    try:
        await_true(
            lambda: all(queue["connections"] == 2 for queue in sender.stats()["peers"].values()),
            5.0,
            lambda: "connected",
        )
        began_s = time.perf_counter()
        from .harness import make_ticket

        transfers = []
        for index in range(2):
            ticket = make_ticket(600_000)  # 3.6 MB each: 0.9 s together, 0.45 s each alone
            sizes = (600_000, 1_200_000, 1_800_000)
            transfer = sender.open(ticket, ticket.seal(KEY), sizes, peer=f"c{index}")
            for region in range(3):
                transfer.put(region, 0, BytesSource(bytes(600_000 * (region + 1))))
            transfer.end()
            transfers.append((ticket, transfer))
        for _, transfer in transfers:
            await_over(transfer)
        elapsed_s = time.perf_counter() - began_s
        assert elapsed_s > 0.75
        for world, (ticket, _) in zip(worlds, transfers, strict=True):
            world.take(ticket)
    finally:
        sender.close()
        for receiver in receivers:
            receiver.close()
