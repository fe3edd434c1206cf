"""The event loop: a heap of callbacks on a simulated clock."""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Callback = Callable[[Any], None]
Entry = tuple[float, int, Callback, Any]


class Events:
    """Callbacks in the order of their times; equal times in the order in which they were asked for."""

    heap: list[Entry]
    """(time, number, callback, argument); code in a hurry may put its own."""
    now_s: float
    """The simulated time, from 0 on."""
    number: int
    """Events that were asked for so far."""
    watch: Callable[[], None] | None
    """Called after each of them."""

    def __init__(self) -> None:
        self.heap = []
        self.now_s = 0.0
        self.number = 0
        self.watch = None

    def at(self, time_s: float, callback: Callback, argument: Any = None) -> None:
        """Call `callback(argument)` at `time_s`, which must not be in the past."""
        self.number = number = self.number + 1
        heappush(self.heap, (time_s, number, callback, argument))

    def run(self, until_s: float) -> None:
        """Everything up to and including `until_s`, where the clock is left (or at the last event, for infinity)."""
        heap, watch = self.heap, self.watch
        while heap and heap[0][0] <= until_s:
            self.now_s, _, callback, argument = heappop(heap)
            callback(argument)
            if watch is not None:
                watch()
        if self.now_s < until_s < math.inf:
            self.now_s = until_s
