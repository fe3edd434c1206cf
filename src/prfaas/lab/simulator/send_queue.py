"""The transfers of one sender to one consumer, and the order in which their bits leave."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from prfaas.core.link.send_order import SendOrder
from prfaas.lab.simulator.flow import Flow, SharedFlow

# The states of a transfer.
ABREAST = 0  # all that is produced has been sent, more is to come
BEHIND = 1  # more has been produced than sent, and more is to come
HELD = 2  # production has ended but for what is held back, and all else has been sent
PRODUCED = 3  # all is there, not all has been sent
ARRIVING = 4  # all has been sent, the last byte is on its way
OVER = 5

# A stream that is behind catches up only where its part is more than its production by more than rounding.
_ROUNDING = 1e-9

Route = tuple[str, str]
"""Who sends, and who receives: the names of two instances, or of two pools."""


@dataclass(slots=True, eq=False, repr=False)
class FluidTransfer:
    """One transfer of a `FluidLink`, which alone changes it; its caller can hold it back or cancel it there."""

    queue: "SendQueue"
    """Where it has its turn."""
    number: int
    """Counts the link's transfers."""
    bits_per_s: float
    """Production while the prefill runs, up to `total_bits` less `last_bits`."""
    last_bits: float
    """What comes at the end of production."""
    total_bits: float
    start_s: float
    done: Callable[[Any], None]
    argument: Any
    state: int = field(init=False, default=ABREAST)
    made_bits: float = field(init=False, default=0.0)
    """What was there at `start_s`."""
    sent_bits: float = field(init=False, default=0.0)
    """Kept while it is behind or produced. Abreast it is what has been produced."""
    is_held: bool = field(init=False, default=False)
    """What comes at the end of production is held back."""
    has_stopped: bool = field(init=False, default=False)
    """There is nothing more to come but what is held back."""

    def produced_bits(self, now_s: float) -> float:
        """Bits of it that have been produced, while production goes on or is held back."""
        return self.made_bits + self.bits_per_s * (now_s - self.start_s)

    def fall_behind(self, now_s: float) -> None:
        """From now on it gets less than it produces."""
        self.sent_bits = self.made_bits + self.bits_per_s * (now_s - self.start_s)
        self.state = BEHIND


class SendQueue(Flow):
    """The turns of `core.link.send_order`, as the live `ChunkSchedule` gives them, for a fluid.

    The first that has something to send gets all. A prefill that goes on has only what it has just produced, once all
    before that is sent: what it leaves is for the next one. So some may be abreast of their production, and behind
    them one gets the rest: the head.
    """

    __slots__ = ("_ended", "_late_queues", "head", "head_bits_per_s", "limit_bits_per_s", "streams")

    limit_bits_per_s: float
    """What the connections between the two carry."""
    streams: dict[FluidTransfer, None]
    """Those that are still produced, or held back with something to send, in the order in which they were opened."""
    head: FluidTransfer | None
    """Who gets what those abreast leave."""
    head_bits_per_s: float
    """That."""

    def __init__(
        self, parent: SharedFlow, limit_bits_per_s: float, late_queues: "dict[SendQueue, None]"
    ) -> None:
        """`late_queues`: those of the link, which this one enters and leaves."""
        super().__init__(parent)
        self._late_queues = late_queues
        self.limit_bits_per_s = limit_bits_per_s
        self.streams = {}
        self.head = None
        self.head_bits_per_s = 0.0
        self._ended: list[tuple[SendOrder, FluidTransfer]] = []

    def become_late(self) -> None:
        if not self.is_late:
            self._late_queues[self] = None
            Flow.become_late(self)

    def become_abreast(self) -> None:
        if self.is_late:
            del self._late_queues[self]
            Flow.become_abreast(self)

    def produce(self, bits_per_s: float) -> None:
        Flow.produce(self, bits_per_s)
        if self.bits_per_s > self.limit_bits_per_s:
            self.become_late()

    def begin(self, transfer: FluidTransfer) -> None:
        """A prefill begins."""
        if self.is_late:
            transfer.state = BEHIND
        self.streams[transfer] = None
        self.produce(transfer.bits_per_s)

    def produce_at(self, transfer: FluidTransfer, bits_per_s: float, now_s: float) -> None:
        """From now on its prefill produces so much."""
        transfer.made_bits = transfer.produced_bits(now_s)
        transfer.start_s = now_s
        self.cease(transfer.bits_per_s)
        transfer.bits_per_s = bits_per_s
        self.produce(bits_per_s)

    def end(self, transfer: FluidTransfer, turn: SendOrder) -> None:
        """All of a transfer is there, and something of it is left."""
        transfer.state = PRODUCED
        heappush(self._ended, (turn, transfer))
        self.become_late()

    def pace_bits_per_s(self, bandwidth_bits_per_s: float) -> float:
        """The share of the link's bandwidth that its sender may use."""
        sender = self.parent
        assert sender is not None and sender.parent is not None
        return sender.parent.pace_of(sender, bandwidth_bits_per_s)

    def stop(self, transfer: FluidTransfer, now_s: float) -> None:
        """Its production ends; what is left of it and when it leaves is for others to say."""
        if transfer.state == ABREAST:
            transfer.sent_bits = transfer.produced_bits(now_s)
        del self.streams[transfer]
        if transfer is self.head:
            self.head = None
        self.cease(transfer.bits_per_s)

    def hold(self, transfer: FluidTransfer, now_s: float) -> None:
        """Its production ends but for what is held back: it keeps its turn for what is left."""
        transfer.made_bits = transfer.total_bits - transfer.last_bits
        if transfer.state == ABREAST or transfer.sent_bits >= transfer.made_bits:
            self.stop(transfer, now_s)
            transfer.sent_bits = transfer.made_bits
            transfer.state = HELD
        else:
            self.cease(transfer.bits_per_s)
        transfer.bits_per_s = 0.0
        transfer.has_stopped = True

    def most_bits_per_s(self) -> float:
        return self.limit_bits_per_s

    def serve(self, bits_per_s: float, now_s: float) -> float:
        ended = self._ended
        while ended and ended[0][1].state != PRODUCED:
            heappop(ended)
        self.rate_bits_per_s = bits_per_s
        if ended:
            self.head = head = ended[0][1]
            self.head_bits_per_s = bits_per_s
            for stream in self.streams:
                if stream.state == ABREAST:
                    stream.fall_behind(now_s)
            if not bits_per_s:
                return math.inf
            return now_s + (head.total_bits - head.sent_bits) / bits_per_s
        return self._serve_streams(bits_per_s, now_s)

    def _serve_streams(self, bits_per_s: float, now_s: float) -> float:
        """As `serve`, where no prefill has ended."""
        self.head = None
        for stream in self.streams:
            if self.head is None and stream.state == ABREAST and stream.bits_per_s <= bits_per_s:
                bits_per_s -= stream.bits_per_s
                continue
            if stream.state == ABREAST:
                stream.fall_behind(now_s)
            if self.head is None:
                self.head = stream
                self.head_bits_per_s = bits_per_s
        head = self.head
        if head is None:
            # Rounding: it was late by the sum of its production. The last one waits.
            self.head = head = next(reversed(self.streams))
            head.fall_behind(now_s)
            self.head_bits_per_s = bits_per_s = bits_per_s + head.bits_per_s
        faster_bits_per_s = bits_per_s - head.bits_per_s
        if faster_bits_per_s <= head.bits_per_s * _ROUNDING or not bits_per_s:
            return math.inf
        return now_s + (head.produced_bits(now_s) - head.sent_bits) / faster_bits_per_s

    def settle(self, now_s: float, slack_s: float, over: list[FluidTransfer]) -> float:
        """Settle the transfer that has sent all its bits, or will in a moment.

        Args:
            now_s: Now.
            slack_s: The moment.
            over: Transfers of which all is sent are added.

        Returns:
            Bits that were still to be sent, and count as sent.
        """
        head = self.head
        if head is None:
            return 0.0
        if head.state == PRODUCED:
            left_bits = head.total_bits - head.sent_bits
            if left_bits > slack_s * self.head_bits_per_s:
                return 0.0
            head.state = ARRIVING
            over.append(head)
            self.forget()
            return left_bits
        left_bits = head.produced_bits(now_s) - head.sent_bits
        faster_bits_per_s = self.head_bits_per_s - head.bits_per_s
        if faster_bits_per_s <= head.bits_per_s * _ROUNDING or left_bits > slack_s * faster_bits_per_s:
            return 0.0
        self.head = None
        if not head.has_stopped:
            head.state = ABREAST
        else:
            head.state = HELD
            head.sent_bits = head.made_bits
            self.stop(head, now_s)
        self.forget()
        return left_bits

    def forget(self) -> None:
        """One that was late is not any more, or has gone: then the queue may not be late either."""
        ended = self._ended
        while ended and ended[0][1].state != PRODUCED:
            heappop(ended)
        if ended:
            return
        for stream in self.streams:
            if stream.state == BEHIND:
                return
        self.head = None
        self.become_abreast()
