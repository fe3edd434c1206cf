"""Loops over KV in host memory, compiled by numba, which comes with vLLM.

numpy can do the same only in several passes over memory, with copies between them. While a loop runs, other threads of
the engine may run Python. A loop is compiled when it is asked for, best before the first request needs it: that takes
up to a second where numba has not kept what it compiled on this machine before.

To be imported where pages are made, not sooner: when a worker of vLLM 0.32 registers its kernels for CPUs, it looks at
what all modules hold, and fails on what llvmlite does.

Wire pages have numbers: those in dense page p begin with p · (how many are in one). Neighbours in one dense page are a
stretch, whose runs are taken in the order in which they lie there.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import boolean, from_dtype, int64, njit, types, void
from numba.extending import intrinsic

from prfaas.serving.engines.page_digests import LINE_BYTES, WORD_BYTES

Numbers = npt.NDArray[np.int64]
Items = npt.NDArray[np.void]
_SumPages = Callable[[Numbers, Numbers, Numbers, Numbers, int, Numbers, Numbers, Numbers], None]
_FillPages = Callable[[Numbers, Numbers, Numbers, Numbers, int, Numbers, Numbers, Numbers], None]
_CopyRuns = Callable[[Items, Items, Numbers, Numbers, Numbers, bool], None]

# A shorter run takes longer to begin than to add up.
_SHORT_RUN_WORDS = 32

_LINE_WORDS = LINE_BYTES // WORD_BYTES
# Words of each quarter of a page that are summed up, and then written.
_ROW_WORDS = 64

_LINE, _TABLE = (types.Array(int64, dimensions, "C", readonly=True) for dimensions in (1, 2))


@cache
def page_summing() -> _SumPages:
    """`_sum_pages`, compiled."""
    sums = types.Array(int64, 1, "C")
    compiled: _SumPages
    compiled = _compiled(_sum_pages, void(_LINE, _LINE, _LINE, _TABLE, int64, _LINE, _LINE, sums))
    return compiled


@cache
def page_filling() -> _FillPages:
    """`_fill_pages`, compiled."""
    written = types.Array(int64, 1, "C")
    compiled: _FillPages
    compiled = _compiled(_fill_pages, void(_LINE, written, _LINE, _LINE, int64, _LINE, _LINE, written))
    return compiled


@cache
def run_copying(item_bytes: int) -> _CopyRuns:
    """`_copy_runs`, compiled for items of so many bytes."""
    item = from_dtype(item_type(item_bytes))
    source, target = (types.Array(item, 1, "C", readonly=readonly) for readonly in (True, False))
    compiled: _CopyRuns
    compiled = _compiled(_copy_runs, void(source, target, _LINE, _LINE, _TABLE, boolean))
    return compiled


def _compiled(loop: Callable[..., None], signature: Any) -> Any:
    """From numba's files, which are beside Python's own or in the user's cache and of one CPU; else compiled now."""
    try:
        return njit(signature, nogil=True, cache=True)(loop)
    except (OSError, RuntimeError):
        # There is no place that can be written to.
        return njit(signature, nogil=True)(loop)


def item_type(nbytes: int) -> np.dtype[np.void]:
    """The type of items of `nbytes` bytes, which are copied together."""
    return np.dtype([("bytes", np.uint8, nbytes)])


def short_words(runs: Numbers) -> int:
    """Words of each of the runs that `_sum_pages` adds up in rows; 0: there are none.

    Args:
        runs: as of `_sum_pages`.
    """
    short = {words for _, step, words in runs.tolist() if step == words < _SHORT_RUN_WORDS}
    return int(short.pop()) if len(short) == 1 else 0


@njit  # type: ignore[untyped-decorator]  # numba has no types
def _neighbours(ids: Numbers, at: int, dense: Numbers) -> tuple[int, int, int]:
    """(dense page, first wire page in it, number) of the stretch that begins there."""
    pages, per_page = dense[2], dense[3]
    page, first = ids[at] // per_page, ids[at] % per_page
    if not 0 <= page < pages:
        raise IndexError("there is no such page")
    number = 1
    while at + number < len(ids) and first + number < per_page and ids[at + number] == ids[at] + number:
        number += 1
    return page, first, number


def _sum_pages(
    words: Numbers,
    dense: Numbers,
    ids: Numbers,
    runs: Numbers,
    short_words: int,
    low: Numbers,
    high: Numbers,
    sums: Numbers,
) -> None:
    """Compute the sums of wire pages (see `page_digests`).

    Args:
        words: the engine's memory.
        dense: of its dense pages: place of the first one, distance to the next, how many, and wire pages in each.
        ids: of wire pages.
        runs: (place of a run of a dense page's first wire page, distance to that of the next, length).
        short_words: of runs that are added up as one row, where those of all wire pages follow each other at once.
        low: weights of a dense page's words.
        high: those of their upper halves.
        sums: added to; one for each of `ids`.

    Raises:
        IndexError: a page is not there.
    """
    row = np.zeros(short_words * dense[3], np.int64)
    begin = 0
    while begin < len(ids):
        page, first, number = _neighbours(ids, begin, dense)
        row[:] = 0
        for run in range(len(runs)):
            place, step, count = runs[run]
            own = dense[0] + page * dense[1] + place
            if count == step == short_words and number == dense[3]:
                x, a, b = words[own:], low[place:], high[place:]
                for at in range(len(row)):
                    row[at] += x[at] * a[at] + (x[at] >> 32) * b[at]
                continue
            for cut in range(number):
                there = (first + cut) * step
                x, a, b = words[own + there :], low[place + there :], high[place + there :]
                total = np.int64(0)
                for at in range(count):
                    total += x[at] * a[at] + (x[at] >> 32) * b[at]
                sums[begin + cut] += total
        if number == dense[3]:
            for at in range(len(row)):
                sums[begin + at // short_words] += row[at]
        begin += number


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _write_line(_: Any, target: Any, at: Any, source: Any, source_at: Any) -> Any:
    """Copy a line of the processor's cache straight to memory.

    A loaded page is read much later. A usual write would fetch what is overwritten first, which takes as long as the
    rest of a copy.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE_WORDS).as_pointer()

        def place(array: int) -> Any:
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            return builder.bitcast(builder.gep(data, [arguments[array + 1]]), line)

        store = builder.store(builder.load(place(2), align=WORD_BYTES), place(0), align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(target, at, source, source_at), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _finish_writes(_: Any) -> Any:
    """Have other threads see lines that were written before."""

    def generate(context: Any, builder: Any, *_: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit  # type: ignore[untyped-decorator]  # numba has no types
def _sum_of_quarters(x: Numbers, a: Numbers, b: Numbers, quarter: int, begin: int, end: int) -> Any:
    """What words [begin, end) of each quarter add to a sum.

    Processors fetch ahead within 4 KiB only, so memory is waited for less where several places are read in turn.
    """
    x0, a0, b0 = x[begin:end], a[begin:end], b[begin:end]
    begin, end = begin + quarter, end + quarter
    x1, a1, b1 = x[begin:end], a[begin:end], b[begin:end]
    begin, end = begin + quarter, end + quarter
    x2, a2, b2 = x[begin:end], a[begin:end], b[begin:end]
    begin, end = begin + quarter, end + quarter
    x3, a3, b3 = x[begin:end], a[begin:end], b[begin:end]
    total = np.int64(0)
    for at in range(len(x0)):
        total += x0[at] * a0[at] + (x0[at] >> 32) * b0[at] + x1[at] * a1[at] + (x1[at] >> 32) * b1[at]
        total += x2[at] * a2[at] + (x2[at] >> 32) * b2[at] + x3[at] * a3[at] + (x3[at] >> 32) * b3[at]
    return total


def _fill_pages(
    source: Numbers,
    words: Numbers,
    dense: Numbers,
    ids: Numbers,
    start: int,
    low: Numbers,
    high: Numbers,
    sums: Numbers,
) -> None:
    """Fill pages from a part of a run, and add up what is written while it is in the processor's first cache.

    Args:
        source: the part, pages one behind the other.
        words: the engine's memory.
        dense: of its pages, as of `_sum_pages`; each lies on lines of the cache.
        ids: of all pages of the run.
        start: place of the part in the run, in words.
        low: weights of a page's words.
        high: those of their upper halves.
        sums: added to; one for each of `ids`.

    Raises:
        IndexError: a page is not there.
    """
    done = 0
    while done < len(source):
        index, first = (start + done) // len(low), (start + done) % len(low)
        page = ids[index] if index < len(ids) else -1
        if not 0 <= page < dense[2]:
            raise IndexError("there is no such page")
        count = min(len(low) - first, len(source) - done)
        x, a, b = (source[done : done + count], low[first : first + count], high[first : first + count])
        own = dense[0] + page * dense[1] + first
        quarter = count // (4 * _LINE_WORDS) * _LINE_WORDS
        for begin in range(0, quarter, _ROW_WORDS):
            end = min(quarter, begin + _ROW_WORDS)
            sums[index] += _sum_of_quarters(x, a, b, quarter, begin, end)
            for ahead in range(0, 4 * quarter, quarter):
                for at in range(ahead + begin, ahead + end, _LINE_WORDS):
                    _write_line(words, own + at, x, at)
        for at in range(4 * quarter, count):
            sums[index] += x[at] * a[at] + (x[at] >> 32) * b[at]
        for at in range(4 * quarter, count, _LINE_WORDS):
            _write_line(words, own + at, x, at)
        done += count
    _finish_writes()


def _copy_runs(
    source: Items, target: Items, dense: Numbers, ids: Numbers, runs: Numbers, gathers: bool
) -> None:
    """Copy wire pages out of dense pages, one behind the other, or into these.

    Args:
        source: memory.
        target: the same.
        dense: of the dense pages: place of the first one, distance to the next, how many, and wire pages in each.
        ids: of wire pages.
        runs: (place in the source of a run of a dense page's first wire page, distance to that of the next, the same
            two in the target, length).
        gathers: the source has the dense pages.

    Raises:
        IndexError: a page is not there.
    """
    begin = 0
    while begin < len(ids):
        page, first, number = _neighbours(ids, begin, dense)
        own = dense[0] + page * dense[1]
        for run in range(len(runs)):
            place, step, target_place, target_step, count = runs[run]
            # Wire pages lie one behind the other: where the dense page's first one would be.
            if gathers:
                here, there = own + place, target_place + (begin - first) * target_step
            else:
                here, there = place + (begin - first) * step, own + target_place
            for cut in range(first, first + number):
                from_item, to_item = here + cut * step, there + cut * target_step
                for at in range(count):
                    target[to_item + at] = source[from_item + at]
        begin += number
