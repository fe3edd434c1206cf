"""Coverage of a region: the bytes that are in place, as merged intervals."""

from bisect import bisect_left, bisect_right


class Coverage:
    """Half-open intervals of byte offsets, disjoint and not touching, in order. Not thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """Number of intervals."""
        return len(self._starts)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """All intervals, as (start, end)."""
        return tuple(zip(self._starts, self._ends, strict=True))

    def overlap_bytes(self, start: int, end: int) -> int:
        """Number of bytes in [start, end) that are in place."""
        total = 0
        index = bisect_right(self._ends, start)
        while index < len(self._starts) and self._starts[index] < end:
            total += min(end, self._ends[index]) - max(start, self._starts[index])
            index += 1
        return total

    def end_from(self, start: int) -> int:
        """End of the interval that contains `start`; `start` itself if that byte is not in place."""
        index = bisect_right(self._starts, start) - 1
        return max(start, self._ends[index]) if index >= 0 else start

    def add(self, start: int, end: int) -> int:
        """Add [start, end).

        Returns:
            The number of its bytes that are new.
        """
        if start >= end:
            return 0
        # All intervals that overlap or touch become one.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        new_bytes = end - start
        for index in range(first, last):
            new_bytes -= min(end, self._ends[index]) - max(start, self._starts[index])
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        return new_bytes
