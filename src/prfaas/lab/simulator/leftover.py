"""What gets only what others leave of a link: cache transfers, all of whose bytes are there from the start."""

import math
from heapq import heappop, heappush

from prfaas.lab.simulator.transfer import FluidTransfer


class Leftover:
    """Transfers that share alike what is left of a link, of which a `FluidLink` tells it.

    As in a `FluidLink`, the bits that a transfer there from the beginning would have sent give the progress of all.
    """

    __slots__ = ("_heap", "_number", "_sent_each_bits", "share_bits_per_s", "transfers")

    transfers: dict[FluidTransfer, None]
    """Those that are not over, in the order in which they came."""
    share_bits_per_s: float
    """What each of them gets."""

    def __init__(self) -> None:
        self.transfers = {}
        self._heap: list[tuple[float, int, FluidTransfer]] = []  # by _sent_each_bits at the end
        self._number = 0
        self._sent_each_bits = 0.0
        self.share_bits_per_s = 0.0

    def add(self, transfer: FluidTransfer) -> None:
        """All of it waits from now on."""
        transfer.offset_bits = self._sent_each_bits
        self.transfers[transfer] = None
        self._number += 1
        heappush(self._heap, (self._sent_each_bits + transfer.total_bits, self._number, transfer))

    def remove(self, transfer: FluidTransfer) -> float:
        """It ends here; returns the bits that it has sent."""
        del self.transfers[transfer]
        return self._sent_each_bits - transfer.offset_bits

    def advance(self, passed_s: float) -> None:
        """They have sent for so long, at the rate of the last `share`."""
        self._sent_each_bits += self.share_bits_per_s * passed_s

    def share(self, left_bits_per_s: float, limit_bits_per_s: float) -> float:
        """Divide what is left from now on, no more than the limit to each; returns what they take together."""
        if not self.transfers:
            self._heap.clear()
            self._sent_each_bits = self.share_bits_per_s = 0.0
            return 0.0
        self.share_bits_per_s = min(max(left_bits_per_s, 0.0) / len(self.transfers), limit_bits_per_s)
        return self.share_bits_per_s * len(self.transfers)

    def next_end_s(self, now_s: float) -> float:
        """When the next one has sent everything; infinite if none does at this rate."""
        while self._heap and self._heap[0][2] not in self.transfers:
            heappop(self._heap)
        if not self._heap or not self.share_bits_per_s:
            return math.inf
        return now_s + (self._heap[0][0] - self._sent_each_bits) / self.share_bits_per_s

    def ended(self, slack_s: float) -> list[tuple[FluidTransfer, float]]:
        """Take out those that have sent everything, or will in a moment; with the bits that they still had."""
        reached_bits = self._sent_each_bits + slack_s * self.share_bits_per_s
        found = []
        while self._heap and self._heap[0][0] <= reached_bits:
            end_bits, _, transfer = heappop(self._heap)
            if transfer in self.transfers:
                del self.transfers[transfer]
                found.append((transfer, end_bits - self._sent_each_bits))
        return found
