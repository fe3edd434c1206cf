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
# Processors fetch ahead within 4 KiB only: lines are asked for so many bytes before they are read, and pages of at
# least _LONG_WORDS are read at several places in turn. Of what was tried this took the least time for most pages.
_AHEAD_BYTES = 1024
_LONG_WORDS = 8192
_PLACES = 4

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
def _load_line(
    _: Any, target: Any, at: Any, source: Any, source_at: Any, low: Any, high: Any, first: Any, totals: Any
) -> Any:
    """Copy a line of the processor's cache straight to memory, and add what its words give to `totals`.

    A loaded page is read much later. A usual write would fetch what is overwritten first, which takes as long as the
    rest of a copy.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = ir.VectorType(ir.IntType(64), _LINE_WORDS)

        def place(array: int, *index: int) -> Any:
            data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            first = builder.gep(data, [arguments[each] for each in index]) if index else data
            return builder.bitcast(first, words.as_pointer())

        def read(*of: int) -> Any:
            return builder.load(place(*of), align=WORD_BYTES)

        x = read(2, 3)
        store = builder.store(x, place(0, 1), align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        upper = builder.ashr(x, ir.Constant(words, [32] * _LINE_WORDS))
        given = builder.add(builder.mul(x, read(4, 6)), builder.mul(upper, read(5, 6)))
        builder.store(builder.add(read(7), given), place(7), align=WORD_BYTES)
        # What is asked for need not be there. To be read, kept in all caches, and data.
        number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        form = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], form)
        ahead = builder.gep(builder.bitcast(place(2, 3), byte), [ir.IntType(64)(_AHEAD_BYTES)])
        builder.call(fetch, [ahead, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(target, at, source, source_at, low, high, first, totals), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _finish_writes(_: Any) -> Any:
    """Have other threads see lines that were written before."""

    def generate(context: Any, builder: Any, *_: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


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
    """Fill pages from a part of a run, and add up what is written.

    Args:
        source: the part, pages one behind the other; whole lines of the cache.
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
    totals = np.empty(_LINE_WORDS, np.int64)
    done = 0
    while done < len(source):
        index, first = (start + done) // len(low), (start + done) % len(low)
        page = ids[index] if index < len(ids) else -1
        if not 0 <= page < dense[2]:
            raise IndexError("there is no such page")
        count = min(len(low) - first, len(source) - done)
        x, a, b = source[done:], low[first:], high[first:]
        own = dense[0] + page * dense[1] + first
        apart = count // (_PLACES * _LINE_WORDS) * _LINE_WORDS if count >= _LONG_WORDS else 0
        totals[:] = 0
        for begin in range(0, apart, _LINE_WORDS):
            for place in range(_PLACES):
                at = begin + place * apart
                _load_line(words, own + at, x, at, a, b, at, totals)
        for at in range(_PLACES * apart, count, _LINE_WORDS):
            _load_line(words, own + at, x, at, a, b, at, totals)
        sums[index] += totals.sum()
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
