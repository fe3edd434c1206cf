"""How long something was going on, and how much of it was done: together a bandwidth that was really reached."""

import time
from collections.abc import Callable


class BusyClock:
    """Counts the seconds in which at least one piece of work was open. Not thread-safe."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.done_bytes = 0
        self.busy_s = 0.0
        """Up to the last moment at which nothing was open."""
        self._now_s = now_s
        self._open = 0
        self._since_s = 0.0

    def begin(self) -> None:
        """A piece of work is open."""
        if not self._open:
            self._since_s = self._now_s()
        self._open += 1

    def end(self, done_bytes: int) -> None:
        """One that was open is not any more; `done_bytes` of it were done."""
        self.done_bytes += done_bytes
        self._open -= 1
        if not self._open:
            self.busy_s += self._now_s() - self._since_s
