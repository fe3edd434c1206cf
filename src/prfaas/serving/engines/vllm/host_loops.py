"""Loops over KV in host memory, compiled by numba, which comes with vLLM.

numpy can do the same only in several passes over memory, with copies between them. While a loop runs, other threads of
the engine may run Python. A loop is compiled when it is asked for, which takes up to a second: best before the first
request needs it.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
from numba import from_dtype, int64, njit, types, void

Numbers = npt.NDArray[np.int64]
Items = npt.NDArray[np.void]

# A shorter run takes longer to begin than to add up.
_SHORT_RUN_WORDS = 32

_LINE, _TABLE = (types.Array(int64, dimensions, "C", readonly=True) for dimensions in (1, 2))


@cache
def page_summing() -> Callable[
    [Numbers, Numbers, Numbers, Numbers, Numbers, int, Numbers, Numbers, Numbers], None
]:
    """`_sum_pages`, compiled."""
    form = void(_LINE, _LINE, _LINE, _TABLE, _TABLE, int64, _LINE, _LINE, types.Array(int64, 1, "C"))
    compiled: Callable[
        [Numbers, Numbers, Numbers, Numbers, Numbers, int, Numbers, Numbers, Numbers], None
    ] = njit(form, nogil=True)(_sum_pages)
    return compiled


@cache
def run_copying(item_bytes: int) -> Callable[[Items, Items, Numbers, Numbers, Numbers, Numbers], None]:
    """`_copy_runs`, compiled for items of so many bytes."""
    item = from_dtype(item_type(item_bytes))
    source, target = (types.Array(item, 1, "C", readonly=readonly) for readonly in (True, False))
    compiled: Callable[[Items, Items, Numbers, Numbers, Numbers, Numbers], None]
    compiled = njit(void(source, target, _LINE, _LINE, _TABLE, _TABLE), nogil=True)(_copy_runs)
    return compiled


def item_type(nbytes: int) -> np.dtype[np.void]:
    """Of so many bytes that are copied together."""
    return np.dtype([("bytes", np.uint8, nbytes)])


def check_pages(ids: Numbers, count: int) -> None:
    """Compiled loops read and write wherever they are told to.

    Raises:
        IndexError: there are not so many pages.
    """
    if len(ids) and (ids.min() < 0 or ids.max() >= count):
        raise IndexError(f"pages {ids.min()} to {ids.max()} of {count}")


def stretches(ids: Numbers, per_page: int, pages: int) -> tuple[Numbers, Numbers, Numbers]:
    """Neighbours in one dense page, of wire pages by their numbers; those of dense page p begin with p · per_page.

    Args:
        ids: of wire pages.
        per_page: how many a dense page has.
        pages: how many dense pages there are.

    Returns:
        For each stretch: the dense page, the place of the first one in `ids`, and (first, end) of them in the page.

    Raises:
        IndexError: there are not so many pages.
    """
    check_pages(ids, pages * per_page)
    dense, cuts = np.divmod(ids, per_page)
    apart = np.flatnonzero((np.diff(dense) != 0) | (np.diff(cuts) != 1)) + 1
    bounds = np.concatenate(([0], apart, [len(ids)])) if len(ids) else np.zeros(1, dtype=np.int64)
    at, first = bounds[:-1], cuts[bounds[:-1]]
    return dense[at], at, np.stack((first, first + np.diff(bounds)), axis=1)


def row_words(runs: Numbers, per_page: int) -> int:
    """Of the rows in which `_sum_pages` adds up short runs; 0: there are none."""
    short = {words for _, step, words in runs.tolist() if step == words < _SHORT_RUN_WORDS}
    return per_page * short.pop() if len(short) == 1 else 0


def _sum_pages(
    words: Numbers,
    begins: Numbers,
    ends: Numbers,
    cuts: Numbers,
    runs: Numbers,
    row_words: int,
    low: Numbers,
    high: Numbers,
    sums: Numbers,
) -> None:
    """Compute the sums of wire pages, one stretch of neighbours after the other (see `page_digests`).

    Args:
        words: the engine's memory.
        begins: of the dense page of each stretch.
        ends: where the sum of its wire page 0 would be in `sums`.
        cuts: (first, end) of the wire pages of each stretch.
        runs: (place of a run of wire page 0 in a dense page, distance to that of the next, length).
        row_words: of such runs of all wire pages, where they are short and follow each other at once.
        low: weights of a dense page's words.
        high: those of their upper halves.
        sums: added to.
    """
    row = np.zeros(row_words, np.int64)
    for stretch in range(len(begins)):
        first, end = cuts[stretch]
        row[:] = 0
        for number in range(len(runs)):
            place, step, count = runs[number]
            if row_words and step == count and (end - first) * count == row_words:
                x, a, b = words[begins[stretch] + place :], low[place:], high[place:]
                for at in range(row_words):
                    row[at] += x[at] * a[at] + (x[at] >> 32) * b[at]
                continue
            for cut in range(first, end):
                begin = place + cut * step
                x, a, b = words[begins[stretch] + begin :], low[begin:], high[begin:]
                total = np.int64(0)
                for at in range(count):
                    total += x[at] * a[at] + (x[at] >> 32) * b[at]
                sums[ends[stretch] + cut] += total
        for at in range(row_words):
            sums[ends[stretch] + first + at * (end - first) // row_words] += row[at]


def _copy_runs(
    source: Items, target: Items, begins: Numbers, ends: Numbers, cuts: Numbers, runs: Numbers
) -> None:
    """Copy the runs of wire pages, one stretch of neighbours after the other.

    Args:
        source: memory, in items.
        target: the same.
        begins: what places in the source count from, for each stretch.
        ends: the same in the target.
        cuts: (first, end) of the wire pages of each stretch.
        runs: (place in the source of a run of wire page 0, distance to that of the next, the same two in the target,
            length).
    """
    for stretch in range(len(begins)):
        for number in range(len(runs)):
            place, step, target_place, target_step, count = runs[number]
            for cut in range(cuts[stretch, 0], cuts[stretch, 1]):
                here = begins[stretch] + place + cut * step
                there = ends[stretch] + target_place + cut * target_step
                for at in range(count):
                    target[there + at] = source[here + at]
