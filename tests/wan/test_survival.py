"""The real transport over the emulated network, whose line goes dark, loses connections or packets.

Transfers arrive exactly, or end on both sides in time.
"""

import asyncio
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.shared_queue import SentTransfer
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.protocol.chunk_source import BytesSource
from prfaas.serving.transport.protocol.options import Peer, SenderOptions
from prfaas.serving.transport.protocol.outgoing import SendPhase
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.ticket import TRANSFER_ID_BYTES, Ticket, prompt_digest
from prfaas.serving.transport.protocol.wire import TransferPhase
from wan.laboratory import Laboratory, LineSettings

pytestmark = [pytest.mark.wan, pytest.mark.timeout(180)]

MakeLaboratory = Callable[..., Laboratory]
KEY = bytes(range(32))
PORT = 5100
REGIONS = 3
STAGING_BYTES = 32 << 20
# What a loaded machine may add to a deadline, which is counted in looks of a tenth or a fifth of a second.
SLACK_S = 1.5


class EqualRegions:
    """As many bytes in each region as the ticket has tokens."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        return [num_tokens - skip_tokens] * REGIONS


@dataclass
class Ends:
    """The producer in far-0, the consumer in home-0; their threads start there, too."""

    laboratory: Laboratory
    sender: Sender
    receiver: Receiver

    def open(self, nbytes: int) -> tuple[Ticket, SentTransfer, list[bytes]]:
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            producer="p/0",
            consumer="c/0",
            num_tokens=nbytes,
            skip_tokens=0,
            prompt_digest=prompt_digest([]),
            expires_at_s=time.time() + 60,
        )
        content = [random.Random(region).randbytes(nbytes) for region in range(REGIONS)]
        return ticket, self.sender.open(ticket, ticket.seal(KEY), [nbytes] * REGIONS), content

    def send(self, nbytes: int, during: Callable[[SentTransfer], None] = lambda _: None) -> float:
        """One transfer, compared byte by byte; `during` is called when its bytes are queued. How long it took."""
        begun_s = time.monotonic()
        ticket, transfer, content = self.open(nbytes)
        put(transfer, content)
        transfer.end()
        during(transfer)
        assert transfer.await_quiescent(60)
        took_s = time.monotonic() - begun_s
        assert transfer.phase is SendPhase.COMPLETE, transfer.reason
        self.compare(ticket, content)
        return took_s

    def compare(self, ticket: Ticket, content: Sequence[bytes]) -> None:
        staged = self.receiver.transfers.take(ticket.transfer_id)
        assert staged is not None
        for region, data in enumerate(content):
            assert b"".join(staged.region_views(region, 0, len(data))) == data
        staged.free()

    def counters(self) -> dict[str, int]:
        return dict(self.sender.stats()["peers"]["c/0"])


@pytest.fixture
def make_ends(make_laboratory: MakeLaboratory) -> Iterator[Callable[..., Ends]]:
    @contextmanager
    def ends(line: LineSettings, connections: int, paced: bool, options: SenderOptions) -> Iterator[Ends]:
        laboratory = make_laboratory(line)
        with laboratory.inside("home-0"):
            receiver = Receiver(
                name="c/0",
                key=KEY,
                host=laboratory.address("home-0"),
                port=PORT,
                arena=StagingArena(STAGING_BYTES),
                layout=EqualRegions(),
                fingerprint={},
                peer_list=PeerList(producers=frozenset(["p/0"])),
            )
            receiver.start()
        with laboratory.inside("far-0"):
            pace = line.goodput_bits_per_s if paced else None
            peer = Peer("c/0", laboratory.address("home-0"), PORT, "wan", connections, pace)
            sender = Sender(name="p/0", key=KEY, peers={"c/0": peer}, fingerprint={}, options=options)
            sender.start()
        try:
            await_true(lambda: sender.stats()["peers"]["c/0"]["connections"] == connections)
            yield Ends(laboratory, sender, receiver)
        finally:
            laboratory.change(blackhole=False)
            sender.close()
            receiver.close()
            assert sender.stats()["thread_errors"] == receiver.stats()["thread_errors"] == 0

    made = []

    def make(
        rate_bits_per_s: float = 200e6,
        connections: int = 4,
        *,
        paced: bool = True,
        congestion: str | None = "bbr",
        rtt_s: float = 0.030,
        loss: float = 0.0,
    ) -> Ends:
        line = LineSettings.of_round_trip(rate_bits_per_s, rtt_s, loss=loss)
        made.append(ends(line, connections, paced, SenderOptions(congestion=congestion)))
        return made[-1].__enter__()

    yield make
    for context in made:
        context.__exit__(None, None, None)


def put(transfer: SentTransfer, content: Sequence[bytes], first: int = 0) -> None:
    for region in range(first, REGIONS):
        transfer.put(region, 0, BytesSource(content[region]))


def await_true(check: Callable[[], bool], timeout_s: float = 30.0) -> float:
    begun_s = time.monotonic()
    while not check():
        assert time.monotonic() - begun_s < timeout_s
        time.sleep(0.01)
    return time.monotonic() - begun_s


PHASES = ["before OPEN", "waiting for ACCEPT", "prefilling", "inside a frame", "after END"]


@pytest.mark.slow("emulated lines and their time limits are in real time")
@pytest.mark.parametrize("phase", PHASES)
def test_a_dark_link_ends_transfers_on_both_sides(make_ends: Callable[..., Ends], phase: str) -> None:
    ends = make_ends()
    nbytes = 2 << 20
    if phase == "waiting for ACCEPT":
        ends.open(STAGING_BYTES // REGIONS - (1 << 20))
        time.sleep(0.3)
    if phase == "before OPEN":
        ends.laboratory.change(blackhole=True)
    dark_s = time.monotonic()
    ticket, transfer, content = ends.open(nbytes)
    if phase != "before OPEN":
        known = TransferPhase.WAITING if phase == "waiting for ACCEPT" else TransferPhase.RECEIVING
        await_true(
            lambda: (
                (status := ends.receiver.transfers.state(ticket.transfer_id)) is not None
                and status.phase is known
            )
        )
        if phase == "prefilling":
            transfer.put(0, 0, BytesSource(content[0]))
            await_true(transfer.idle)
            time.sleep(1.0)
        elif phase in ("inside a frame", "after END"):
            put(transfer, content)
            if phase == "after END":
                transfer.end()
            await_true(lambda: transfer.acked_bytes > 0)
        ends.laboratory.change(blackhole=True)
        dark_s = time.monotonic()
    await_true(lambda: transfer.phase.terminal)
    assert time.monotonic() - dark_s < 3.0 + SLACK_S
    assert transfer.phase is SendPhase.FAILED
    assert transfer.reason.startswith("c/0 unreachable: ")
    assert ends.sender.telemetry()["silent"]["c/0"].startswith("nothing has come back from it for")
    if phase != "before OPEN":

        def failed() -> bool:
            status = ends.receiver.transfers.state(ticket.transfer_id)
            return status is not None and status.phase is TransferPhase.FAILED

        await_true(failed)
        assert time.monotonic() - dark_s < 3.0 + SLACK_S
        status = ends.receiver.transfers.state(ticket.transfer_id)
        assert status is not None
        assert "p/0" in status.reason
    # Work finds the link again as soon as it is there.
    ends.laboratory.change(blackhole=False)
    ends.send(1000)
    assert ends.sender.telemetry()["silent"] == {}


@pytest.mark.slow("emulated lines and their time limits are in real time")
@pytest.mark.parametrize("phase", ["prefilling", "sending"])
def test_a_link_that_comes_back_in_time_costs_time(make_ends: Callable[..., Ends], phase: str) -> None:
    ends = make_ends()
    ticket, transfer, content = ends.open(4 << 20)
    transfer.put(0, 0, BytesSource(content[0]))
    if phase == "prefilling":
        await_true(transfer.idle)
    else:
        await_true(lambda: transfer.acked_bytes > 0)
    before = ends.counters()["requeued_chunks"]
    ends.laboratory.change(blackhole=True)
    timer = threading.Timer(1.2, lambda: ends.laboratory.change(blackhole=False))
    timer.start()
    put(transfer, content, first=1)
    transfer.end()
    assert transfer.await_quiescent(30)
    timer.join()
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    ends.compare(ticket, content)
    assert ends.counters()["requeued_chunks"] - before <= 8 * 4


@pytest.mark.slow("emulated lines and their time limits are in real time")
@pytest.mark.parametrize("count", [1, None])
def test_killed_connections_cost_time(make_ends: Callable[..., Ends], count: int | None) -> None:
    """What is sent again is what was on its way: a part of a chunk, and one whose ACK was lost."""
    ends = make_ends()
    ends.send(4 << 20)
    before = ends.laboratory.counters("far", "home").carried_bytes
    ends.send(4 << 20)
    between = ends.laboratory.counters("far", "home").carried_bytes
    requeued = ends.counters()["requeued_chunks"]

    def kill(transfer: SentTransfer) -> None:
        await_true(lambda: transfer.acked_bytes > transfer.total_bytes // 3)
        ends.laboratory.kill_connections(count)

    ends.send(4 << 20, kill)
    after = ends.laboratory.counters("far", "home").carried_bytes
    killed = 4 if count is None else count
    assert ends.counters()["requeued_chunks"] - requeued <= 3 * killed
    chunk_bytes = max(connection.chunk_bytes for connection in ends.sender._connections["c/0"])
    assert (after - between) - (between - before) < 2 * killed * chunk_bytes
    assert ends.counters()["failed"] == 0


def test_the_first_transfer_after_a_lossy_spell_is_not_slow(make_ends: Callable[..., Ends]) -> None:
    """Connections whose window was spoiled are made anew while nobody needs them. BBR needs no such thing."""
    ends = make_ends(congestion="cubic")
    before_s = sorted(ends.send(1 << 20) for _ in range(3))[1]
    connects = ends.counters()["connects"]
    ends.laboratory.change(loss=0.05)
    ends.send(1 << 20)
    ends.laboratory.change(loss=0.0)
    await_true(lambda: ends.counters()["connects"] > connects and ends.counters()["connections"] == 4)
    # Without a new connection it takes 4.7 times as long.
    assert ends.send(1 << 20) < 2 * before_s + 0.1


@pytest.mark.slow("emulated lines and their time limits are in real time")
def test_an_observer_notices_a_dark_path(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(LineSettings.of_round_trip(200e6, 0.030))
    with laboratory.inside("home-0"):
        receiver = Receiver(
            name="c/0",
            key=KEY,
            host=laboratory.address("home-0"),
            port=PORT,
            arena=StagingArena(1 << 20),
            layout=EqualRegions(),
            fingerprint={},
        )
        receiver.start()

    async def main() -> float:
        observer = Observer("gateway", KEY, laboratory.address("home-0"), PORT, "c/0")
        try:
            waiting = asyncio.create_task(observer.wait(bytes(15) + b"1", 60))
            # As long as the path is well, a wait may take as long as it likes.
            await asyncio.sleep(4.0)
            assert not waiting.done()
            laboratory.change(blackhole=True)
            begun_s = time.monotonic()
            with pytest.raises(ConnectionError, match="nothing has come back from c/0"):
                await waiting
            return time.monotonic() - begun_s
        finally:
            await observer.close()

    try:
        with laboratory.inside("far-0"):
            assert asyncio.run(main()) < 3.0 + SLACK_S
    finally:
        laboratory.change(blackhole=False)
        receiver.close()
    assert receiver.stats()["thread_errors"] == 0


def test_a_transfer_arrives_exactly_over_a_lossy_line(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(paced=False, loss=0.01)
    ends.send(1_500_001)
    assert ends.laboratory.counters("far", "home").lost_segments > 5


@pytest.mark.parametrize("killed", [1, 4])
def test_a_transfer_arrives_exactly_when_connections_are_killed(
    make_ends: Callable[..., Ends], killed: int
) -> None:
    ends = make_ends(100e6, paced=False, rtt_s=0.010)

    def kill(_: SentTransfer) -> None:
        await_true(lambda: ends.laboratory.counters("far", "home").carried_bytes >= 1 << 20, 60)
        assert ends.laboratory.kill_connections(killed, PORT) == killed

    ends.send(2_000_000, kill)
