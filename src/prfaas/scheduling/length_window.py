"""The lengths that were seen lately, in constant memory: what the threshold is searched on."""

import math
from array import array
from dataclasses import dataclass, field

from prfaas.workload import Empirical

_BINS_PER_OCTAVE = 64
_OCTAVES = 22
_BINS = _BINS_PER_OCTAVE * _OCTAVES
# Rates over less than this would be those of single requests.
_LEAST_SPAN_S = 1.0
_NEVER = -(1 << 62)


@dataclass(slots=True)
class _Slot:
    """The histogram of one part of the window: how many lengths fell into each bin, and their sum in tokens."""

    number: int
    total: int = 0
    counts: "array[int]" = field(default_factory=lambda: array("I", bytes(4 * _BINS)))
    tokens: "array[float]" = field(default_factory=lambda: array("d", bytes(8 * _BINS)))

    def restart(self, number: int) -> None:
        self.number, self.total = number, 0
        self.counts = array("I", bytes(4 * _BINS))
        self.tokens = array("d", bytes(8 * _BINS))


class LengthWindow:
    """Uncached lengths of the last `window_s` seconds.

    The window is a ring of `slots` histograms, and the oldest goes as a whole: what is answered covers between
    (slots − 1) / slots and all of `window_s`. Bins are geometric, 64 to an octave from 1 to 4 million tokens: a
    length is known to 1.1 %, the mean of each bin, and so that of all, exactly. Memory: 17 KB per slot, whatever
    comes. Below `min_count` lengths there is no distribution.
    Times are seconds of any one clock and may come a little out of order.
    """

    def __init__(self, window_s: float, *, slots: int = 12, min_count: int = 50) -> None:
        if not (window_s > 0 and slots > 0):
            raise ValueError(f"a window needs a time above 0 and slots, not {window_s!r} s and {slots!r}")
        self.window_s = window_s
        self.min_count = max(min_count, 1)
        self._slot_s = window_s / slots
        self._ring = [_Slot(_NEVER) for _ in range(slots)]
        self._first_s = math.inf

    def add(self, tokens: float, now_s: float) -> None:
        """One request of `tokens` uncached tokens; less than 1 counts as 1. About 0.6 µs."""
        number = int(now_s // self._slot_s)
        slot = self._ring[number % len(self._ring)]
        if slot.number != number:
            if slot.number > number:
                return  # older than the window
            slot.restart(number)
            self._first_s = min(self._first_s, now_s)
        length = max(float(tokens), 1.0)
        bin_ = min(int(math.log2(length) * _BINS_PER_OCTAVE), _BINS - 1)
        slot.counts[bin_] += 1
        slot.tokens[bin_] += length
        slot.total += 1

    def count(self, now_s: float) -> int:
        """Requests in the window."""
        return sum(slot.total for slot in self._live(now_s))

    def rate_per_s(self, now_s: float) -> float:
        """Requests per second in the window, or since the first one if that is less; 0 without any."""
        count = self.count(now_s)
        if count == 0:
            return 0.0
        oldest = (int(now_s // self._slot_s) - len(self._ring) + 1) * self._slot_s
        return count / max(now_s - max(oldest, self._first_s), _LEAST_SPAN_S)

    def lengths(self, now_s: float) -> Empirical | None:
        """The distribution of the window's lengths, one atom per bin at its mean; None below `min_count`."""
        import numpy as np

        live = self._live(now_s)
        if sum(slot.total for slot in live) < self.min_count:
            return None
        counts, tokens = np.zeros(_BINS, dtype=np.uint64), np.zeros(_BINS)
        for slot in live:
            counts += np.frombuffer(slot.counts, dtype=np.uint32)
            tokens += np.frombuffer(slot.tokens, dtype=np.float64)
        seen = counts > 0
        return Empirical(tokens[seen] / counts[seen], counts[seen])

    def _live(self, now_s: float) -> list[_Slot]:
        newest = int(now_s // self._slot_s)
        return [slot for slot in self._ring if slot.total and newest - len(self._ring) < slot.number]
