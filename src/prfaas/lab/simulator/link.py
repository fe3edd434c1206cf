"""A link between clusters: its bandwidth is shared by the transfers that are on it, as `core.link.budget` says."""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

import numpy as np

from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.capacity import CapacityProcess
from prfaas.lab.simulator.events import Events
from prfaas.lab.simulator.leftover import Leftover
from prfaas.lab.simulator.transfer import ABREAST, ARRIVING, BEHIND, OVER, PRODUCED, FluidTransfer

# A transfer this close to its end has reached it: clocks are floating-point numbers.
_SLACK_S = 1e-9
_SLACK = 1e-15
# A stream that is behind catches up only where its share is more than its production by more than rounding.
_FASTER = 1 + 1e-9

_NEARLY = 0.999  # rounding of rates

_production_rate = attrgetter("bits_per_s")


class FluidLink:
    """An exact fluid of max-min fair sharing between transfers, whatever the capacity does.

    No transfer gets more than its limit nor, while it has sent all that is there, more than its production rate; what
    it leaves is for the others, who share alike (D. Bertsekas and R. Gallager, "Data Networks", 6.5.2). All that have
    something waiting therefore send at the same rate: a single number, the bits that a transfer always behind would
    have sent (`_sent_each_bits`), gives the progress of all of them, and a heap of the values at which they end gives
    the next one in O(log n). Streams that keep abreast of their production only count in a sum; those produced while
    behind, of which there are few, are looked at one by one. What all these leave is for the background (`Leftover`).

    Between transfers nothing is scheduled, so a simulation ends when they do, if there is no endless outage.

    Args:
        events: The simulated clock.
        name: "source->target".
        capacity: Bits per second over time.
        rng: For the capacity's draws alone.
        rtt_s: From the last byte sent to `done`.
        transfer_limit_bits_per_s: What one transfer's connections can carry.
    """

    __slots__ = (
        "_abreast", "_abreast_bits_per_s", "_accepted_bits", "_armed_s", "_at_s", "_behind",
        "_capacity_bits_per_s", "_events", "_heap", "_late", "_leftover", "_limit_bits_per_s",
        "_next_bits_per_s", "_next_change_s", "_number", "_peak_bits_per_s", "_pieces", "_rate_bits_per_s",
        "_rtt_s", "_sent_bits", "_sent_each_bits", "_share_bits_per_s", "_slowest_bits_per_s", "_unwatched",
        "name", "open_transfers",
    )  # fmt: skip

    def __init__(
        self,
        events: Events,
        name: str,
        capacity: CapacityProcess,
        *,
        rng: np.random.Generator,
        rtt_s: float = 0.0,
        transfer_limit_bits_per_s: float = math.inf,
    ) -> None:
        if not (math.isfinite(rtt_s) and rtt_s >= 0):
            raise ValueError(f"The round trip of link {name} takes 0 s or more, not {rtt_s:g} s.")
        if not transfer_limit_bits_per_s > 0:
            raise ValueError(
                f"One transfer on link {name} gets more than 0 bit/s, not {transfer_limit_bits_per_s:g} bit/s."
            )
        self.name = name
        self.open_transfers = 0  # accepted, not yet arrived
        self._events = events
        self._rtt_s = rtt_s
        self._limit_bits_per_s = transfer_limit_bits_per_s
        self._pieces = capacity.changes(rng)
        self._capacity_bits_per_s = 0.0
        self._next_change_s, self._next_bits_per_s = next(self._pieces, (math.inf, 0.0))
        self._unwatched = True  # no event waits for the next change
        self._accepted_bits = 0.0
        self._number = 0
        self._armed_s = math.inf

        # As of _at_s, and valid until the next event:
        self._at_s = events.now_s
        self._sent_bits = 0.0
        self._rate_bits_per_s = 0.0
        self._share_bits_per_s = 0.0  # of each that is late
        self._sent_each_bits = 0.0  # of each that is late, since the first one was
        self._late = 0  # behind, or produced and not sent
        self._heap: list[tuple[float, int, FluidTransfer]] = []  # produced: _sent_each_bits at the end
        self._behind: dict[FluidTransfer, None] = {}
        self._slowest_bits_per_s = math.inf  # no production in _behind is slower
        self._abreast: dict[FluidTransfer, None] = {}
        self._abreast_bits_per_s = 0.0
        self._peak_bits_per_s = 0.0  # no production in _abreast is faster
        self._leftover = Leftover()
        self._take_changes(events.now_s)

    @property
    def capacity_bits_per_s(self) -> float:
        """Now; 0 in an outage."""
        now_s = self._events.now_s
        if now_s >= self._next_change_s:
            self._advance(now_s)
            self._take_changes(now_s)
            self._share(now_s)
        return self._capacity_bits_per_s

    @property
    def rate_bits_per_s(self) -> float:
        """What is being sent now."""
        return self._rate_bits_per_s

    @property
    def is_full(self) -> bool:
        """Whether transfers wait, and all of the capacity is used."""
        return self._late > 0 and self._rate_bits_per_s >= _NEARLY * self._capacity_bits_per_s

    @property
    def sent_bits(self) -> float:
        """All that was sent so far, of cancelled transfers too."""
        return self._sent_bits + self._rate_bits_per_s * (self._events.now_s - self._at_s)

    @property
    def residual_bytes(self) -> float:
        """Accepted and not sent; a stream counts wholly from its start on."""
        return max(0.0, self._accepted_bits - self.sent_bits) / BITS_PER_BYTE

    def stream(
        self,
        streamed_bytes: float,
        last_bytes: float,
        prefill_s: float,
        done: Callable[[Any], None],
        argument: Any = None,
    ) -> FluidTransfer:
        """A prefill starts: `streamed_bytes` come evenly over `prefill_s`, `last_bytes` all at its end.

        `done(argument)` is called when all of it has arrived.
        """
        if prefill_s <= 0:
            return self.send(streamed_bytes + last_bytes, done, argument)
        now_s = self._events.now_s
        if self._unwatched:
            self._watch(now_s)
        streamed_bits = streamed_bytes * 8.0
        last_bits = last_bytes * 8.0
        total_bits = streamed_bits + last_bits
        bits_per_s = streamed_bits / prefill_s
        transfer = FluidTransfer(bits_per_s, last_bits, total_bits, now_s, done, argument)
        self.open_transfers += 1
        self._accepted_bits += total_bits
        self._advance(now_s)
        self._abreast[transfer] = None
        self._abreast_bits_per_s = rate = self._abreast_bits_per_s + bits_per_s
        if bits_per_s > self._peak_bits_per_s:
            self._peak_bits_per_s = bits_per_s
        is_full = self._late or self._leftover.transfers or rate > self._capacity_bits_per_s
        if is_full or bits_per_s > self._limit_bits_per_s:
            self._share(now_s)
        else:
            self._rate_bits_per_s = rate
        self._events.at(now_s + prefill_s, self._end_production, transfer)
        return transfer

    def send(
        self, num_bytes: float, done: Callable[[Any], None], argument: Any = None, *, background: bool = False
    ) -> FluidTransfer:
        """All of it is there at once. `done(argument)` when it has arrived. `background`: a prefix cache that moves."""
        now_s = self._events.now_s
        if self._unwatched:
            self._watch(now_s)
        bits = num_bytes * 8.0
        transfer = FluidTransfer(0.0, bits, bits, now_s, done, argument)
        self.open_transfers += 1
        if not bits:
            transfer.state = ARRIVING
            self._events.at(now_s + self._rtt_s, self._arrive, transfer)
            return transfer
        self._accepted_bits += bits
        self._advance(now_s)
        transfer.state = PRODUCED
        if background:
            self._leftover.add(transfer)
            self._share(now_s)
            return transfer
        transfer.offset_bits = self._sent_each_bits
        self._late += 1
        self._number = number = self._number + 1
        heappush(self._heap, (self._sent_each_bits + bits, number, transfer))
        self._share(now_s)
        return transfer

    def withhold(self, transfer: FluidTransfer, done: Callable[[Any], None]) -> float:
        """Bytes that would come at the end of its production, and don't: it calls `done` when it arrives without."""
        self._accepted_bits -= (last_bits := transfer.withhold(done))
        return last_bits / BITS_PER_BYTE

    def cancel(self, transfer: FluidTransfer) -> None:
        """It ends here, and its `done` is not called. Nothing happens where it has been called already."""
        state = transfer.state
        if state == OVER:
            return
        now_s = self._events.now_s
        self._advance(now_s)
        transfer.state = OVER
        self.open_transfers -= 1
        if state == ARRIVING:
            return
        if state == ABREAST:
            sent_bits = transfer.bits_per_s * (now_s - transfer.start_s)
            self._leave_abreast(transfer)
        elif transfer in self._leftover.transfers:
            sent_bits = self._leftover.remove(transfer)
        else:
            # Its entry in the heap, if it has one, is passed over.
            sent_bits = self._sent_each_bits - transfer.offset_bits
            self._late -= 1
            self._behind.pop(transfer, None)
        self._accepted_bits -= transfer.total_bits - sent_bits
        self._share(now_s)

    def _end_production(self, transfer: FluidTransfer) -> None:
        state = transfer.state
        if state == OVER:
            return
        now_s = self._events.now_s
        self._advance(now_s)
        if state == ABREAST:
            self._leave_abreast(transfer)
            left_bits = transfer.last_bits
            transfer.offset_bits = self._sent_each_bits + left_bits - transfer.total_bits
        else:
            del self._behind[transfer]
            self._late -= 1
            left_bits = transfer.offset_bits + transfer.total_bits - self._sent_each_bits
            if left_bits <= transfer.bits_per_s * _SLACK_S:
                self._sent_bits += left_bits
                left_bits = 0.0
        if not left_bits:
            transfer.state = ARRIVING
            self._share(now_s)
            self._sent(transfer)
            return
        self._late += 1
        transfer.state = PRODUCED
        self._number = number = self._number + 1
        heappush(self._heap, (self._sent_each_bits + left_bits, number, transfer))
        self._share(now_s)

    def _sent(self, transfer: FluidTransfer) -> None:
        if self._rtt_s:
            self._events.at(self._events.now_s + self._rtt_s, self._arrive, transfer)
        else:
            self._arrive(transfer)

    def _arrive(self, transfer: FluidTransfer) -> None:
        if transfer.state != OVER:
            transfer.state = OVER
            self.open_transfers -= 1
            transfer.done(transfer.argument)

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        self._sent_bits += self._rate_bits_per_s * passed_s
        self._sent_each_bits += self._share_bits_per_s * passed_s
        if self._leftover.share_bits_per_s:
            self._leftover.advance(passed_s)
        self._at_s = now_s

    def _share(self, now_s: float) -> None:
        """Divide the capacity from now on, and put an event for when that changes."""
        self._share_first(now_s)
        if self._leftover.transfers:
            left_bits_per_s = self._capacity_bits_per_s - self._rate_bits_per_s
            self._rate_bits_per_s += self._leftover.share(left_bits_per_s, self._limit_bits_per_s)
            self._arm(self._leftover.next_end_s(now_s), now_s)

    def _arm(self, next_s: float, now_s: float) -> None:
        if next_s < self._armed_s:
            self._armed_s = next_s = next_s if next_s > now_s else now_s
            self._events.at(next_s, self._wake, next_s)

    def _share_first(self, now_s: float) -> None:
        """Among all that is not in the background."""
        while True:
            late = self._late
            if late:
                share = (self._capacity_bits_per_s - self._abreast_bits_per_s) / late
                if share > self._limit_bits_per_s:
                    share = self._limit_bits_per_s
                elif share < 0:
                    share = 0.0  # rounding of the sum, or too many abreast
                if self._peak_bits_per_s <= share:
                    break
            elif (
                self._abreast_bits_per_s <= self._capacity_bits_per_s
                and self._peak_bits_per_s <= self._limit_bits_per_s
            ):
                self._share_bits_per_s = self._sent_each_bits = 0.0
                self._rate_bits_per_s = self._abreast_bits_per_s
                self._slowest_bits_per_s = math.inf
                if self._heap:
                    self._heap.clear()
                if not (self._abreast or self._leftover.transfers):
                    self._sent_bits = self._accepted_bits  # without the rounding of many sums
                return
            self._fall_behind(now_s)
        self._share_bits_per_s = share
        self._rate_bits_per_s = self._abreast_bits_per_s + share * late
        if not share:
            return
        # An event for when the next one ends or catches up. One that comes too early will put another.
        heap = self._heap
        while heap and heap[0][2].state != PRODUCED:
            heappop(heap)
        next_s = now_s + (heap[0][0] - self._sent_each_bits) / share if heap else math.inf
        if share > self._slowest_bits_per_s * _FASTER:
            next_s = min(next_s, self._next_abreast_s(now_s, share))
        self._arm(next_s, now_s)

    def _fall_behind(self, now_s: float) -> None:
        """The fastest production gets more than a fair share: it has to wait from now on."""
        fastest = max(self._abreast, key=_production_rate)
        bits_per_s = fastest.bits_per_s
        if bits_per_s < self._peak_bits_per_s:
            self._peak_bits_per_s = bits_per_s
            return
        self._leave_abreast(fastest)
        fastest.state = BEHIND
        fastest.offset_bits = self._sent_each_bits - bits_per_s * (now_s - fastest.start_s)
        self._behind[fastest] = None
        self._late += 1
        if bits_per_s < self._slowest_bits_per_s:
            self._slowest_bits_per_s = bits_per_s

    def _leave_abreast(self, transfer: FluidTransfer) -> None:
        del self._abreast[transfer]
        if self._abreast:
            self._abreast_bits_per_s = max(0.0, self._abreast_bits_per_s - transfer.bits_per_s)
        else:
            self._abreast_bits_per_s = self._peak_bits_per_s = 0.0

    def _next_abreast_s(self, now_s: float, share: float) -> float:
        """When the first one that is behind has caught up with its production."""
        return min(
            (
                now_s + transfer.backlog_bits(self._sent_each_bits, now_s) / (share - transfer.bits_per_s)
                for transfer in self._behind
                if share > transfer.bits_per_s * _FASTER
            ),
            default=math.inf,
        )

    def _wake(self, armed_s: float) -> None:
        if armed_s != self._armed_s:
            return  # another event was put before this one
        self._armed_s = math.inf
        self._advance(armed_s)
        share = self._share_bits_per_s
        sent_each_bits = self._sent_each_bits
        slack_s = _SLACK_S + armed_s * _SLACK
        reached = sent_each_bits + slack_s * share
        heap = self._heap
        ended = []
        while heap and heap[0][0] <= reached:
            end_bits, _, transfer = heappop(heap)
            if transfer.state == PRODUCED:
                transfer.state = ARRIVING
                self._late -= 1
                self._sent_bits += end_bits - sent_each_bits
                ended.append(transfer)
        if share > self._slowest_bits_per_s * _FASTER:
            self._catch_up(armed_s, share, slack_s)
        if self._leftover.transfers:
            for transfer, left_bits in self._leftover.ended(slack_s):
                transfer.state = ARRIVING
                self._sent_bits += left_bits
                ended.append(transfer)
        self._share(armed_s)
        for transfer in ended:
            self._sent(transfer)

    def _catch_up(self, now_s: float, share: float, slack_s: float) -> None:
        for transfer in list(self._behind):
            bits_per_s = transfer.bits_per_s
            backlog_bits = transfer.backlog_bits(self._sent_each_bits, now_s)
            if share > bits_per_s * _FASTER and backlog_bits <= slack_s * (share - bits_per_s):
                del self._behind[transfer]
                transfer.state = ABREAST
                self._late -= 1
                self._sent_bits += backlog_bits
                self._abreast[transfer] = None
                self._abreast_bits_per_s += bits_per_s
                self._peak_bits_per_s = max(self._peak_bits_per_s, bits_per_s)
        self._slowest_bits_per_s = min(map(_production_rate, self._behind), default=math.inf)

    def _watch(self, now_s: float) -> None:
        """A transfer is about to start: from now on each change of the capacity has an event."""
        self._take_changes(now_s)
        self._unwatched = False
        if self._next_change_s < math.inf:
            self._events.at(self._next_change_s, self._changed)

    def _changed(self, _: None) -> None:
        now_s = self._events.now_s
        if not (self._late or self._abreast or self._leftover.transfers):
            self._unwatched = True
            return
        self._advance(now_s)
        self._watch(now_s)
        self._share(now_s)

    def _take_changes(self, now_s: float) -> None:
        while self._next_change_s <= now_s:
            self._capacity_bits_per_s = self._next_bits_per_s
            self._next_change_s, self._next_bits_per_s = next(self._pieces, (math.inf, 0.0))
