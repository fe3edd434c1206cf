"""Sums of wire pages out of an engine's dense pages, as they lie there.

A sum does not depend on the order of the words, if each keeps its weight. So the weights are brought once into the
order of the engine's pages. Then all wire pages in a page cost what the sum of the page as a whole would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from prfaas.serving.engines.page_digests import WORD_BYTES, Weights, word_weights
from prfaas.serving.engines.vllm.part_runs import PartRuns

Words = npt.NDArray[np.int64]

# Bytes that are gathered for nothing, between the parts of wire pages that hold some of an engine's heads.
_MOST_GAPS = 0.25
# A sum over fewer words that lie together takes longer to begin than to add up. So what some rows of them have at the
# same place is added up first.
_FEW_WORDS = 32
_ROWS = 8


@dataclass(frozen=True, slots=True)
class _Weighed:
    """One part of all wire pages in a dense page, in the order of the engine's memory."""

    shape: tuple[int, ...]
    """In words; one dimension counts the wire pages."""
    strides: tuple[int, ...]
    """In bytes."""
    offset_bytes: int
    """In what is gathered of a dense page."""
    cut_axis: int
    kept_axes: range
    """What lies in these is added up at the end, but for wire pages."""
    low: Weights
    high: Weights

    def sums(self, rows: Words, weights: Weights) -> Words:
        """Of each dense page's wire pages: shape (pages, wire pages in one)."""
        pages, *axes = range(len(self.shape) + 1)
        strides = (rows.strides[0], *self.strides)
        words: Words = np.ndarray((len(rows), *self.shape), np.int64, rows.data, self.offset_bytes, strides)
        kept = [axes[axis] for axis in self.kept_axes]
        sums: Words = np.einsum(words, [pages, *axes], weights, axes, [pages, *kept])
        inside = tuple(place for place, axis in enumerate(self.kept_axes, 1) if axis != self.cut_axis)
        found: Words = sums.sum(axis=inside)
        return found


class DenseSums:
    """Computes the sums of all wire pages in an engine's dense pages."""

    def __init__(self, memory: memoryview, offset_bytes: int, pages: int, runs: Sequence[PartRuns]) -> None:
        """
        Args:
            memory: the engine's.
            offset_bytes: of the first dense page in it.
            pages: how many dense pages there are.
            runs: of all parts of wire pages; all of them lie on words of the memory.
        """
        begin, end = _extent(runs)
        self.page_bytes = end - begin
        """Of what is read of a dense page."""
        self._cuts = runs[0].cuts
        self._parts = _weighed(tuple(runs))
        self._rows: Words = np.ndarray(
            (pages, self.page_bytes // WORD_BYTES),
            np.int64,
            memory,
            offset_bytes + begin,
            (runs[0].page_stride_bytes, WORD_BYTES),
        )

    @staticmethod
    def suit(runs: Sequence[PartRuns]) -> bool:
        """What is read of a dense page is nearly all of wire pages."""
        begin, end = _extent(runs)
        content_bytes = runs[0].cuts * sum(each.nbytes for each in runs)
        return end - begin <= (1 + _MOST_GAPS) * content_bytes

    def of(self, pages: npt.NDArray[np.int64]) -> Words:
        """The sums of the wire pages in these dense pages, as `page_sums` gives them but for the sign.

        Args:
            pages: their numbers; best not more than the processor's cache holds.

        Returns:
            Shape (pages, wire pages in one).
        """
        rows = self._rows[pages]
        sums = np.zeros((len(pages), self._cuts), dtype=np.int64)
        for part in self._parts:
            sums += part.sums(rows, part.low)
        np.right_shift(rows, 32, out=rows)
        for part in self._parts:
            sums += part.sums(rows, part.high)
        return sums


def _extent(runs: Sequence[PartRuns]) -> tuple[int, int]:
    """From the first to behind the last byte of all parts in a dense page."""
    return min(each.offset_bytes for each in runs), max(each.end_bytes for each in runs)


# Layers that are alike share them.
@lru_cache(maxsize=16)
def _weighed(runs: tuple[PartRuns, ...]) -> tuple[_Weighed, ...]:
    begin, end = _extent(runs)
    wire_words = sum(each.nbytes for each in runs) // WORD_BYTES
    both: list[Weights] = []
    for weights in word_weights(wire_words):
        there = np.zeros((end - begin) // WORD_BYTES, dtype=np.int64)
        for each in runs:
            shape = each.shape(WORD_BYTES)
            at, wire_at = each.offset_bytes - begin, each.wire_offset_bytes
            own = _words(there, (each.cuts, *shape), (*each.strides()[1:], WORD_BYTES), at)
            own[...] = _words(weights, shape, (*each.wire_strides(), WORD_BYTES), wire_at)
        both.append(there)
    return tuple(_part(each, begin, *both) for each in runs)


def _part(runs: PartRuns, begin_bytes: int, low: Weights, high: Weights) -> _Weighed:
    words = (runs.run_bytes // WORD_BYTES, WORD_BYTES)
    dimensions = [*((number, stride) for number, stride, _ in runs.inner), words]
    is_inside = [runs.cuts == 1 or stride < runs.cut_stride_bytes for _, stride in dimensions]
    inside = [each for each, within in zip(dimensions, is_inside, strict=True) if within]
    outside = [each for each, within in zip(dimensions, is_inside, strict=True) if not within]
    before, behind = _joined(outside), _joined(inside)
    cut_axis = len(before)
    kept_axes = range(cut_axis, cut_axis + 1)
    if before and len(behind) == 1 and behind[0][0] < _FEW_WORDS:
        number, stride = before.pop()
        rows = gcd(number, _ROWS)
        before += [(number // rows, rows * stride), (rows, stride)]
        kept_axes = range(cut_axis, cut_axis + 3)
        cut_axis += 1
    shape, strides = (
        tuple(each) for each in zip(*before, (runs.cuts, runs.cut_stride_bytes), *behind, strict=True)
    )
    at = runs.offset_bytes - begin_bytes
    return _Weighed(
        shape,
        strides,
        at,
        cut_axis,
        kept_axes,
        low=_words(low, shape, strides, at),
        high=_words(high, shape, strides, at),
    )


def _joined(dimensions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same words in fewer dimensions: (number, distance in bytes), from outside in."""
    joined: list[tuple[int, int]] = []
    for number, stride in sorted(dimensions, key=lambda dimension: -dimension[1]):
        if joined and joined[-1][1] == number * stride:
            joined[-1] = (joined[-1][0] * number, stride)
        else:
            joined.append((number, stride))
    return joined


def _words(words: Words, shape: tuple[int, ...], strides: tuple[int, ...], offset_bytes: int) -> Words:
    return np.ndarray(shape, np.int64, words.data, offset_bytes, strides)
