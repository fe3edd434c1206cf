"""The real transport over the emulated network."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from prfaas.serving.transport import (
    BytesSource,
    Peer,
    Receiver,
    Sender,
    SendPhase,
    StagingArena,
    Ticket,
    prompt_digest,
)
from wan.laboratory import Laboratory, LineSettings

pytestmark = [pytest.mark.wan, pytest.mark.timeout(180)]

MakeLaboratory = Callable[..., Laboratory]
KEY = bytes(range(32))
PORT = 5100
REGIONS = 3


class EqualRegions:
    """As many bytes in each region as the ticket has tokens."""

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> Sequence[int]:
        return [num_tokens - skip_tokens] * REGIONS


@contextmanager
def ends(laboratory: Laboratory, connections: int = 4) -> Iterator[tuple[Sender, Receiver]]:
    """The producer in far-0, the consumer in home-0; its threads start there, too."""
    with laboratory.inside("home-0"):
        receiver = Receiver(
            name="c/0",
            key=KEY,
            host=laboratory.address("home-0"),
            port=PORT,
            arena=StagingArena(32 << 20),
            layout=EqualRegions(),
            fingerprint={},
            producers=["p/0"],
        )
        receiver.start()
    with laboratory.inside("far-0"):
        peer = Peer("c/0", laboratory.address("home-0"), PORT, "wan", connections, None)
        sender = Sender(name="p/0", key=KEY, peers={"c/0": peer}, fingerprint={})
        sender.start()
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def send(sender: Sender, receiver: Receiver, nbytes: int, during: Callable[[], None] = lambda: None) -> None:
    """One transfer, compared byte by byte; `during` is called when its bytes are queued."""
    ticket = Ticket.issue(
        producer="p/0",
        consumer="c/0",
        num_tokens=nbytes,
        skip_tokens=0,
        prompt_digest=prompt_digest([]),
        lifetime_s=60,
        now_s=time.time(),
    )
    content = [random.Random(region).randbytes(nbytes) for region in range(REGIONS)]
    transfer = sender.open(ticket, ticket.seal(KEY), [nbytes] * REGIONS)
    for region, data in enumerate(content):
        transfer.put(region, 0, BytesSource(data))
    transfer.end()
    during()
    assert transfer.await_quiescent(100)
    assert transfer.phase is SendPhase.COMPLETE, transfer.reason
    staged = receiver.take(ticket.transfer_id)
    assert staged is not None
    assert [b"".join(staged.region_views(region, 0, nbytes)) for region in range(REGIONS)] == content
    staged.free()


def test_a_transfer_arrives_exactly_over_a_lossy_line(make_laboratory: MakeLaboratory) -> None:
    laboratory = make_laboratory(LineSettings.of_round_trip(200e6, 0.030, loss=0.01))
    with ends(laboratory) as (sender, receiver):
        send(sender, receiver, 1_500_001)
    assert laboratory.counters("far", "home").lost_segments > 5


@pytest.mark.parametrize("killed", [1, 4])
def test_a_transfer_arrives_exactly_when_connections_are_killed(
    make_laboratory: MakeLaboratory, killed: int
) -> None:
    laboratory = make_laboratory(LineSettings.of_round_trip(100e6, 0.010))

    with ends(laboratory) as (sender, receiver):

        def kill() -> None:
            deadline_s = time.monotonic() + 60
            while laboratory.counters("far", "home").carried_bytes < 1 << 20:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert laboratory.kill_connections(killed, PORT) == killed

        send(sender, receiver, 2_000_000, kill)
