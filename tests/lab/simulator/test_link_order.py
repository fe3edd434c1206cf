"""A simulated link sends as the live sender: the same transfers through `ChunkSchedule`, byte by byte."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas.lab.simulator.capacity import Constant
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.link import FluidLink
from prfaas.serving.transport.protocol.chunk_schedule import ChunkSchedule
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.outgoing import Chunk, OutgoingTransfer, SendPhase

BYTES_PER_S = 100
"""Of the link; the live one sends a byte each hundredth of a second."""
ROUTE = ("far-0", "home-0")


@dataclass(frozen=True)
class Prefill:
    """It begins after so many bytes' time, puts a byte each `every` of them, and `last` at its end."""

    start: int
    streamed: int
    every: int
    last: int

    @property
    def end(self) -> int:
        return self.start + self.streamed * self.every

    @property
    def total(self) -> int:
        return self.streamed + self.last


class _Source:
    """Bytes of which only the number counts."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def live_ends(prefills: list[Prefill]) -> tuple[list[int], list[float]]:
    """The tick by which a sender has sent everything of each, whose acknowledgements come at once; and when each was
    due."""
    schedule = ChunkSchedule()
    transfers: dict[int, OutgoingTransfer] = {}
    ends = [0] * len(prefills)
    put = [0] * len(prefills)
    sequence = 0
    tick = 0
    while not all(ends):
        for i, prefill in enumerate(prefills):
            if tick == prefill.start:
                # A number of its own for each: those opened at the same moment leave in the order of `prefills`.
                transfers[i] = OutgoingTransfer(bytes([i]), Offer("", (prefill.total,)))
                transfers[i].begin(tick / BYTES_PER_S, i)
                transfers[i].phase = SendPhase.SENDING
            if i not in transfers:
                continue
            transfer = transfers[i]
            there = prefill.total if tick >= prefill.end else (tick - prefill.start) // prefill.every
            if there > put[i]:
                transfer.put_bytes = there
                sequence += 1
                schedule.add(Chunk(transfer, sequence, 0, put[i], there, put[i], _Source(there - put[i])))  # type: ignore[arg-type]
                put[i] = there
            if tick == prefill.end:
                transfer.ends(tick / BYTES_PER_S, 8 * BYTES_PER_S)
                schedule.place(transfer)
        tick += 1
        chunk = schedule.take(1)
        if chunk is not None:
            transfer = chunk.transfer
            transfer.acked_bytes += chunk.nbytes
            if transfer.acked_bytes == transfer.total_bytes:
                ends[transfer.transfer_id[0]] = tick
    return ends, [BYTES_PER_S * transfers[i].place[1] for i in range(len(prefills))]


def simulated_ends_s(prefills: list[Prefill]) -> list[float]:
    events = Events()
    link = FluidLink(
        events,
        "wan",
        Constant(8.0 * BYTES_PER_S),
        rng=np.random.default_rng(0),
        paced_bits_per_s=8.0 * BYTES_PER_S,
    )
    ends_s = [math.inf] * len(prefills)

    def begin(i: int) -> None:
        prefill = prefills[i]
        lasts_s = (prefill.end - prefill.start) / BYTES_PER_S
        link.stream(ROUTE, prefill.streamed, prefill.last, lasts_s, arrived, i)

    def arrived(i: int) -> None:
        ends_s[i] = events.now_s

    for i, prefill in enumerate(prefills):
        events.at(prefill.start / BYTES_PER_S, begin, i)
    events.run(math.inf)
    return ends_s


prefills_of = st.builds(
    Prefill, st.integers(0, 3000), st.integers(1, 300), st.integers(1, 9), st.integers(0, 400)
)


@pytest.mark.slow("a property over many random systems")
@settings(max_examples=150)
@given(st.lists(prefills_of, min_size=1, max_size=8))
def test_transfers_arrive_when_and_in_the_order_in_which_the_live_sender_sends_them(
    prefills: list[Prefill],
) -> None:
    """Live bytes are whole, so the fluid is up to a byte of each transfer ahead. Two that are due at almost the same
    time may then be in the other order: such prefills are left out."""
    live, due = live_ends(prefills)
    slack = len(prefills) + 1
    assume(all(later - earlier > slack for earlier, later in pairwise(sorted(due))))
    simulated = [BYTES_PER_S * each for each in simulated_ends_s(prefills)]
    assert simulated == pytest.approx(live, abs=slack)
