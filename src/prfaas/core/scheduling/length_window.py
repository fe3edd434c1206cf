"""The uncached lengths of the last minutes, in constant memory: what a running deployment knows of its traffic."""

import math
from array import array

from prfaas.core.arrays import FloatArray, np
from prfaas.core.workload.empirical import Empirical

_BINS_PER_OCTAVE = 256
_OCTAVES = 22
_BINS = _BINS_PER_OCTAVE * _OCTAVES
# Rates over less than this would be those of single requests.
_LEAST_SPAN_S = 1.0
_NEVER = -(1 << 62)
_EMPTY = array("d", bytes(8 * _BINS))


class _Slot:
    """The histogram of one part of the window: how many lengths fell into each bin, and their sum in tokens."""

    __slots__ = ("counts", "number", "tokens", "total")

    def __init__(self, counts: "memoryview[float]", tokens: "memoryview[float]") -> None:
        # Counts are whole numbers, but floating-point ones are summed in a fraction of the time.
        self.counts, self.tokens = counts, tokens
        self.number, self.total = _NEVER, 0

    def restart(self, number: int) -> None:
        self.number, self.total = number, 0
        self.counts[:] = self.tokens[:] = _EMPTY


class LengthWindow:
    """Uncached lengths of the last `window_s` seconds.

    The window is a ring of `slots` histograms, and the oldest goes as a whole: what is answered covers between
    (slots − 1) / slots and all of `window_s`. Bins are geometric, 256 to an octave from 1 to 4 million tokens: a
    length is known to 0.3 %, the mean of each bin, and so that of all, exactly. Memory: 90 KB per slot, whatever
    comes. Below `min_count` lengths there is no distribution.
    Times are seconds of any one clock and may come a little out of order.
    """

    def __init__(self, window_s: float, *, slots: int = 12, min_count: int = 50) -> None:
        if not (window_s > 0 and slots > 0):
            raise ValueError(f"a window needs a time above 0 and slots, not {window_s!r} s and {slots!r}")
        self.window_s = window_s
        self.min_count = max(min_count, 1)
        self._slot_s = window_s / slots
        # All slots in one piece, each its counts and then its tokens, so that they are summed at once.
        self._histograms = array("d", bytes(2 * 8 * _BINS * slots))
        parts: memoryview[float] = memoryview(self._histograms).cast("B").cast("d")
        self._ring = [
            _Slot(parts[start : start + _BINS], parts[start + _BINS : start + 2 * _BINS])
            for start in range(0, 2 * _BINS * slots, 2 * _BINS)
        ]
        self._first_s = math.inf
        # The histograms that the last distribution was of, and this one; together, since threads may ask.
        self._known: tuple[list[tuple[int, int, int]], Empirical] | None = None

    def add(self, tokens: float, now_s: float) -> None:
        """One request of `tokens` uncached tokens; less than 1 counts as 1. About 0.6 µs."""
        number = int(now_s // self._slot_s)
        slot = self._ring[number % len(self._ring)]
        if slot.number != number:
            if slot.number > number:
                return  # older than the window
            slot.restart(number)
            self._first_s = min(self._first_s, now_s)
        length = float(tokens) if tokens > 1 else 1.0
        bin_ = int(math.log2(length) * _BINS_PER_OCTAVE)
        if bin_ >= _BINS:
            bin_ = _BINS - 1
        slot.counts[bin_] += 1
        slot.tokens[bin_] += length
        slot.total += 1

    def count(self, now_s: float) -> int:
        """Requests in the window."""
        return sum(self._ring[row].total for row in self._live(now_s))

    def rate_per_s(self, now_s: float) -> float:
        """Requests per second in the window, or since the first one if that is less; 0 without any."""
        count = self.count(now_s)
        if count == 0:
            return 0.0
        oldest = (int(now_s // self._slot_s) - len(self._ring) + 1) * self._slot_s
        return count / max(now_s - max(oldest, self._first_s), _LEAST_SPAN_S)

    def histogram(self, now_s: float) -> list[int]:
        """How many lengths of the window lie in each half octave: from 1, from √2, from 2 tokens on, and so on."""
        counts, _ = self._sums(self._live(now_s))
        halves = counts.reshape(-1, _BINS_PER_OCTAVE // 2).sum(axis=1)
        return [int(count) for count in halves]

    def lengths(self, now_s: float) -> Empirical | None:
        """The distribution of the window's lengths, one atom per bin at its mean; None below `min_count`."""
        live = self._live(now_s)
        # Histograms only grow until they begin anew, so these say what is in them.
        held = [(row, self._ring[row].number, self._ring[row].total) for row in live]
        if sum(total for _, _, total in held) < self.min_count:
            return None
        known = self._known
        if known is not None and known[0] == held:
            return known[1]
        sums = self._sums(live)
        counts, tokens = sums.take(sums[0].nonzero()[0], axis=1)
        found = Empirical.counted(tokens / counts, counts)
        self._known = (held, found)
        return found

    def _sums(self, live: list[int]) -> FloatArray:
        """Two rows, over the window's histograms: lengths in each bin, and their tokens."""
        histograms = np.frombuffer(self._histograms).reshape(-1, 2, _BINS)
        if len(live) < len(self._ring):
            histograms = histograms[live]
        sums: FloatArray = histograms.sum(axis=0)
        return sums

    def _live(self, now_s: float) -> list[int]:
        """The places in the ring of the window's histograms."""
        oldest = int(now_s // self._slot_s) - len(self._ring)
        return [row for row, slot in enumerate(self._ring) if slot.total and oldest < slot.number]
