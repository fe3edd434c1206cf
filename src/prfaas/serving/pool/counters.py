"""What a pool has done since its start, and how long it took."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class PoolCounters:
    """What a store did since its start."""

    lookups: int = 0
    pinned_matches: int = 0
    hit_memory_tokens: int = 0
    hit_ssd_tokens: int = 0
    stored_pages: int = 0
    stored_bytes: int = 0
    refused_pages: int = 0
    """There was no room: everything was in use."""
    aborted_pages: int = 0
    evicted_pages: int = 0
    evicted_bytes: int = 0
    promoted_pages: int = 0
    promoted_bytes: int = 0
    failed_promotions: int = 0
    recovered_pages: int = 0
    wrong_pages: int = 0
    """Their bytes did not have their checksums."""


class BusyClock:
    """Counts the seconds in which at least one piece of work was open: with bytes, a bandwidth that was reached.

    Not thread-safe.
    """

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
