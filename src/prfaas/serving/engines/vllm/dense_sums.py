"""Sums of wire pages out of an engine's dense pages, as they lie there.

A sum does not depend on the order of the words, if each keeps its weight. So the weights are brought once into the
order of the engine's pages. Then all wire pages in a page cost what the sum of the page as a whole would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from prfaas.serving.engines.page_digests import WORD_BYTES, Sums, Weights, word_weights
from prfaas.serving.engines.vllm.pages import BlockIds
from prfaas.serving.engines.vllm.part_runs import PartRuns

_Words = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Weighed:
    """The weights of the words of all wire pages in a dense page, in the order of the engine's memory."""

    low: Weights
    high: Weights
    runs: _Words
    """(place of one of the first wire page, distance to that of the next, length), in the order of memory."""


class DenseSums:
    """Computes the sums of wire pages in an engine's dense pages."""

    def __init__(self, memory: memoryview, offset_bytes: int, pages: int, runs: Sequence[PartRuns]) -> None:
        """
        Args:
            memory: the engine's.
            offset_bytes: of the first dense page in it.
            pages: how many dense pages there are.
            runs: of all parts of wire pages; all of them lie on words of the memory.
        """
        from prfaas.serving.engines.vllm.host_loops import page_summing, short_words

        self._words: _Words = np.frombuffer(memory[: len(memory) // WORD_BYTES * WORD_BYTES], dtype=np.int64)
        begin = (offset_bytes + _extent(runs)[0]) // WORD_BYTES
        stride, cuts = runs[0].page_stride_bytes // WORD_BYTES, runs[0].cuts
        self._dense = np.array([begin, stride, pages, cuts], dtype=np.int64)
        self._weighed = _weighed(tuple(runs))
        self._short_words = short_words(self._weighed.runs)
        self._sum_pages = page_summing()

    def of(self, ids: BlockIds) -> Sums:
        """The sums of wire pages by their numbers, as `page_sums` gives them.

        Raises:
            IndexError: a page is not there.
        """
        sums, weighed = np.zeros(len(ids), dtype=np.int64), self._weighed
        self._sum_pages(
            self._words, self._dense, ids, weighed.runs, self._short_words, weighed.low, weighed.high, sums
        )
        return sums.view(np.uint64)


def _extent(runs: Sequence[PartRuns]) -> tuple[int, int]:
    """From the first to behind the last byte of all parts in a dense page."""
    return min(each.offset_bytes for each in runs), max(each.end_bytes for each in runs)


# Layers that are alike share them.
@lru_cache(maxsize=16)
def _weighed(runs: tuple[PartRuns, ...]) -> _Weighed:
    begin, end = _extent(runs)
    wire_words = sum(each.nbytes for each in runs) // WORD_BYTES
    low, high = (np.zeros((end - begin) // WORD_BYTES, dtype=np.int64) for _ in range(2))
    for weights, there in zip(word_weights(wire_words), (low, high), strict=True):
        for each in runs:
            shape = each.shape(WORD_BYTES)
            at, wire_at = each.offset_bytes - begin, each.wire_offset_bytes
            own = _words(there, (each.cuts, *shape), (*each.strides()[1:], WORD_BYTES), at)
            own[...] = _words(weights, shape, (*each.wire_strides(), WORD_BYTES), wire_at)
    table = [each for part in runs for each in _runs(part, begin)]
    return _Weighed(low, high, np.array(sorted(table), dtype=np.int64) // WORD_BYTES)


def _runs(part: PartRuns, begin_bytes: int) -> list[tuple[int, int, int]]:
    inner, run_bytes = sorted((stride, number) for number, stride, _ in part.inner), part.run_bytes
    # Those of a wire page that follow each other at once are one.
    while inner and inner[0][0] == run_bytes:
        run_bytes *= inner.pop(0)[1]
    places = product(*([number * stride for number in range(count)] for stride, count in inner))
    first = part.offset_bytes - begin_bytes
    return [(first + sum(place), part.cut_stride_bytes, run_bytes) for place in places]


def _words(words: _Words, shape: tuple[int, ...], strides: tuple[int, ...], offset_bytes: int) -> _Words:
    return np.ndarray(shape, np.int64, words.data, offset_bytes, strides)
