"""A link between clusters: senders share its bandwidth as `core.link.budget` says, each sends in its own order."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from prfaas.core.link.send_order import order_of_ended
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.capacity import CapacityProcess
from prfaas.lab.simulator.events import Callback, Events
from prfaas.lab.simulator.flow import SharedFlow
from prfaas.lab.simulator.send_queue import (
    ABREAST,
    ARRIVING,
    BEHIND,
    HELD,
    OVER,
    PRODUCED,
    FluidTransfer,
    Route,
    SendQueue,
)

# A transfer this close to its end has reached it: clocks are floating-point numbers.
_SLACK_S = 1e-9
_SLACK = 1e-15

_NEARLY = 0.999  # rounding of rates
_FILLER: Route = ("filler", "filler")


class FluidLink:
    """An exact fluid of what the live system does with a link, whatever the capacity does.

    Senders share alike what none of them leaves. What a sender gets is shared alike by its queues, one for each
    consumer, and a queue sends one transfer after another (`SendQueue`). While a transfer has sent all that is there
    it gets its production rate, no more. Senders that keep abreast of their production only count in a sum; those that
    do not are looked at one by one, at every change. What all leave is for the background, in the same way.

    Between transfers nothing is scheduled, so a simulation ends when they do, if there is no endless outage.

    Args:
        events: The simulated clock.
        name: "source->target".
        capacity: Bits per second over time.
        rng: For the capacity's draws alone.
        rtt_s: From the last byte sent to `done`.
        transfer_limit_bits_per_s: What the connections of one sender to one consumer carry.
        paced_bits_per_s: The bandwidth that senders count with; only the order of transfers depends on it.
    """

    def __init__(
        self,
        events: Events,
        name: str,
        capacity: CapacityProcess,
        *,
        rng: np.random.Generator,
        rtt_s: float = 0.0,
        transfer_limit_bits_per_s: float = math.inf,
        paced_bits_per_s: float = math.inf,
    ) -> None:
        if not (math.isfinite(rtt_s) and rtt_s >= 0):
            raise ValueError(f"The round trip of link {name} takes 0 s or more, not {rtt_s:g} s.")
        if not transfer_limit_bits_per_s > 0:
            raise ValueError(
                f"One transfer on link {name} gets more than 0 bit/s, not {transfer_limit_bits_per_s:g} bit/s."
            )
        self.name = name
        self.open_transfers = 0  # accepted, not yet arrived
        self.paced_bits_per_s = paced_bits_per_s
        self._events = events
        self._rtt_s = rtt_s
        self._limit_bits_per_s = transfer_limit_bits_per_s
        self._pieces = capacity.changes(rng)
        self._capacity_bits_per_s = 0.0
        self._next_change_s, self._next_bits_per_s = next(self._pieces, (math.inf, 0.0))
        self._unwatched = True  # no event waits for the next change
        self._accepted_bits = 0.0
        self._number = 0
        self._active = 0  # have something to send, or will
        self._armed_s = math.inf
        is_limited = transfer_limit_bits_per_s < math.inf
        self._foreground = SharedFlow(None, is_limited=is_limited)
        self._background = SharedFlow(None, is_limited=is_limited)
        self._late_queues: dict[SendQueue, None] = {}
        self._queues: dict[Route, SendQueue] = {}
        self._queues_behind: dict[Route, SendQueue] = {}
        self._senders: dict[tuple[SharedFlow, str], SharedFlow] = {}
        self._filler: FluidTransfer | None = None
        # Bound once: every event would make another.
        self._when_arrived: Callback = self._arrive
        self._when_due: Callback = self._wake

        # As of _at_s, and valid until the next event:
        self._at_s = events.now_s
        self._sent_bits = 0.0
        self.rate_bits_per_s = 0.0
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
    def is_full(self) -> bool:
        """True if transfers wait and all of the capacity is used."""
        return self._foreground.is_late and self.rate_bits_per_s >= _NEARLY * self._capacity_bits_per_s

    @property
    def sent_bits(self) -> float:
        """All that was sent so far, of cancelled transfers too."""
        return self._sent_bits + self.rate_bits_per_s * (self._events.now_s - self._at_s)

    @property
    def residual_bytes(self) -> float:
        """Accepted and not sent; a stream counts wholly from its start on."""
        return max(0.0, self._accepted_bits - self.sent_bits) / BITS_PER_BYTE

    def stream(
        self,
        route: Route,
        streamed_bytes: float,
        last_bytes: float,
        prefill_s: float,
        done: Callable[[Any], None],
        argument: Any = None,
        ends_by_itself: bool = True,
    ) -> FluidTransfer:
        """A prefill starts: `streamed_bytes` come evenly over `prefill_s`, `last_bytes` all at its end.

        `done(argument)` is called when all of it has arrived. Where a stream does not end by itself, its caller has an
        event for the end of the prefill anyway, and calls `end_production` first in it.
        """
        if prefill_s <= 0:
            return self.send(route, streamed_bytes + last_bytes, done, argument)
        now_s = self._events.now_s
        if self._unwatched:
            self._watch(now_s)
        if self._filler is not None:
            self.cancel(self._filler)
        queue = self._queues.get(route)
        if queue is None:
            queue = self._queue(self._queues, self._foreground, route)
        streamed_bits = streamed_bytes * 8.0
        last_bits = last_bytes * 8.0
        total_bits = streamed_bits + last_bits
        self._number = number = self._number + 1
        transfer = FluidTransfer(
            queue,
            number,
            streamed_bits / prefill_s,
            last_bits,
            total_bits,
            start_s=now_s,
            done=done,
            argument=argument,
        )
        self.open_transfers += 1
        self._active += 1
        self._accepted_bits += total_bits
        self._advance(now_s)
        queue.begin(transfer)
        foreground = self._foreground
        rate = foreground.bits_per_s
        if foreground.is_late or self._background.is_late or rate > self._capacity_bits_per_s:
            self._share(now_s)
        else:
            self.rate_bits_per_s = rate
        if ends_by_itself:
            self._events.at(now_s + prefill_s, self.end_production, transfer)
        return transfer

    def send(
        self,
        route: Route,
        num_bytes: float,
        done: Callable[[Any], None],
        argument: Any = None,
        *,
        background: bool = False,
    ) -> FluidTransfer:
        """All of it is there at once. `done(argument)` when it has arrived. `background`: a prefix cache that moves."""
        now_s = self._events.now_s
        if self._unwatched:
            self._watch(now_s)
        if self._filler is not None:
            self.cancel(self._filler)
        if background:
            queue = self._queue(self._queues_behind, self._background, route)
        else:
            queue = self._queue(self._queues, self._foreground, route)
        bits = num_bytes * 8.0
        self._number += 1
        transfer = FluidTransfer(
            queue, self._number, 0.0, bits, bits, start_s=now_s, done=done, argument=argument
        )
        self.open_transfers += 1
        if not bits:
            transfer.state = ARRIVING
            self._events.at(now_s + self._rtt_s, self._when_arrived, transfer)
            return transfer
        self._accepted_bits += bits
        self._active += 1
        self._advance(now_s)
        self._finish(transfer, bits, now_s)
        self._share(now_s)
        return transfer

    def fill(self, num_bytes: float) -> None:
        """Send filler, to see what the link carries. The next transfer ends it."""
        if not self._active:
            self._filler = self.send(_FILLER, num_bytes, self._filled)

    def produce_at(self, transfer: FluidTransfer, bits_per_s: float) -> bool:
        """The prefill of a stream produces so much from now on. False, and nothing happens, where it has ended."""
        if transfer.state > BEHIND or transfer.has_stopped:
            return False
        now_s = self._events.now_s
        self._advance(now_s)
        transfer.queue.produce_at(transfer, bits_per_s, now_s)
        self._share(now_s)
        return True

    def end_production(self, transfer: FluidTransfer) -> None:
        """The prefill of a stream ends now. Nothing happens where the stream was cancelled, or came all at once."""
        if transfer.state >= PRODUCED:
            return
        now_s = self._events.now_s
        self._advance(now_s)
        if transfer.is_held:
            transfer.queue.hold(transfer, now_s)
            transfer.queue.forget()
            self._share(now_s)
        else:
            self._end(transfer, now_s)

    def hold(self, transfer: FluidTransfer) -> None:
        """Keep back the bytes that come at the end of its production until `release`; it keeps its turn."""
        transfer.is_held = transfer.state <= BEHIND

    def release(self, transfer: FluidTransfer) -> None:
        """Send the bytes of it that are held back."""
        if not transfer.is_held or transfer.state >= PRODUCED:
            return
        now_s = self._events.now_s
        transfer.is_held = False
        self._advance(now_s)
        self._end(transfer, now_s)

    def sent_bytes(self, transfer: FluidTransfer) -> float:
        """Bytes of it that have left by now: they arrive whatever becomes of their sender."""
        now_s = self._events.now_s
        self._advance(now_s)
        if transfer.state == ABREAST:
            bits = transfer.produced_bits(now_s)
        else:
            bits = transfer.total_bits if transfer.state >= ARRIVING else transfer.sent_bits
        return min(bits, transfer.total_bits) / BITS_PER_BYTE

    def cancel(self, transfer: FluidTransfer) -> None:
        """It ends here, and its `done` is not called. Nothing happens where it has been called already."""
        state = transfer.state
        if state == OVER:
            return
        now_s = self._events.now_s
        self._advance(now_s)
        queue = transfer.queue
        if state <= BEHIND:
            queue.stop(transfer, now_s)
        transfer.state = OVER
        self.open_transfers -= 1
        if transfer is self._filler:
            self._filler = None
        if state == ARRIVING:
            return
        queue.forget()
        self._active -= 1
        self._accepted_bits -= transfer.total_bits - transfer.sent_bits
        self._share(now_s)

    def _queue(self, queues: dict[Route, SendQueue], flow: SharedFlow, route: Route) -> SendQueue:
        """That of a sender and a consumer; made for the first transfer between them."""
        queue = queues.get(route)
        if queue is None:
            sender = self._senders.get((flow, route[0]))
            if sender is None:
                sender = SharedFlow(flow, is_limited=self._limit_bits_per_s < math.inf)
                self._senders[flow, route[0]] = sender
                flow.members.append(sender)
            queues[route] = queue = SendQueue(sender, self._limit_bits_per_s, self._late_queues)
            sender.members.append(queue)
        return queue

    def _end(self, transfer: FluidTransfer, now_s: float) -> None:
        """All of a stream is there."""
        state, queue = transfer.state, transfer.queue
        if state == ABREAST:
            transfer.sent_bits = transfer.total_bits - transfer.last_bits
            left_bits = transfer.last_bits
        else:
            left_bits = transfer.total_bits - transfer.sent_bits
        if state != HELD:
            # Of one that is abreast nothing more is asked.
            transfer.state = BEHIND
            if left_bits <= transfer.bits_per_s * _SLACK_S:
                self._sent_bits += left_bits
                left_bits = 0.0
            queue.stop(transfer, now_s)
        if left_bits:
            self._finish(transfer, left_bits, now_s)
            self._share(now_s)
            return
        queue.forget()
        transfer.state = ARRIVING
        self._active -= 1
        self._share(now_s)
        self._sent(transfer)

    def _finish(self, transfer: FluidTransfer, left_bits: float, now_s: float) -> None:
        """Give the turn of one of which all is there."""
        left_bytes = left_bits / BITS_PER_BYTE
        pace = transfer.queue.pace_bits_per_s(self.paced_bits_per_s)
        transfer.queue.end(transfer, order_of_ended(now_s, left_bytes, pace, transfer.number))

    def _sent(self, transfer: FluidTransfer) -> None:
        if self._rtt_s:
            self._events.at(self._events.now_s + self._rtt_s, self._when_arrived, transfer)
        else:
            self._arrive(transfer)

    def _arrive(self, transfer: FluidTransfer) -> None:
        if transfer.state != OVER:
            transfer.state = OVER
            self.open_transfers -= 1
            transfer.done(transfer.argument)

    def _filled(self, _argument: object) -> None:
        """Filler has arrived: nobody needs it."""
        self._filler = None

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        self._at_s = now_s
        self._sent_bits += self.rate_bits_per_s * passed_s
        for queue in self._late_queues:
            head = queue.head
            if head is not None:
                head.sent_bits += queue.head_bits_per_s * passed_s

    def _share(self, now_s: float) -> None:
        """Divide the capacity from now on, and put an event for when that changes."""
        if not self._active:
            self.rate_bits_per_s = 0.0
            self._sent_bits = self._accepted_bits  # without the rounding of many sums
            return
        foreground, capacity = self._foreground, self._capacity_bits_per_s
        rate, next_s = foreground.bits_per_s, math.inf
        if foreground.is_late or rate > capacity:
            next_s = foreground.serve(capacity, now_s)
            rate = foreground.rate_bits_per_s
        background = self._background
        if background.is_late:
            next_s = min(next_s, background.serve(max(capacity - rate, 0.0), now_s))
            rate += background.rate_bits_per_s
        self.rate_bits_per_s = rate
        # An event that comes too early will put another.
        if next_s < self._armed_s:
            self._armed_s = next_s = next_s if next_s > now_s else now_s
            self._events.at(next_s, self._when_due, next_s)

    def _wake(self, armed_s: float) -> None:
        if armed_s != self._armed_s:
            return  # another event was put before this one
        self._armed_s = math.inf
        self._advance(armed_s)
        slack_s = _SLACK_S + armed_s * _SLACK
        over: list[FluidTransfer] = []
        for queue in list(self._late_queues):
            self._sent_bits += queue.settle(armed_s, slack_s, over)
        self._active -= len(over)
        self._share(armed_s)
        for transfer in over:
            self._sent(transfer)

    def _watch(self, now_s: float) -> None:
        """A transfer is about to start: from now on each change of the capacity has an event."""
        self._take_changes(now_s)
        self._unwatched = False
        if self._next_change_s < math.inf:
            self._events.at(self._next_change_s, self._changed)

    def _changed(self, _: None) -> None:
        now_s = self._events.now_s
        if not self._active:
            self._unwatched = True
            return
        self._advance(now_s)
        self._watch(now_s)
        self._share(now_s)

    def _take_changes(self, now_s: float) -> None:
        while self._next_change_s <= now_s:
            self._capacity_bits_per_s = self._next_bits_per_s
            self._next_change_s, self._next_bits_per_s = next(self._pieces, (math.inf, 0.0))
