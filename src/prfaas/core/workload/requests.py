"""Recorded requests with their times, and which prompts begin alike; their files."""

import gzip
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, get_args

from prfaas.core.arrays import FloatArray, Int32Array, IntArray, NDArray, np
from prfaas.core.workload.empirical import Empirical
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.trace import Batch
from prfaas.core.workload.trace_columns import (
    BLOCK_TOKENS,
    FORMATS,
    TraceColumns,
    TraceFormat,
    guess_format,
)

# So many requests come from one service within a second only where a file's times have another unit: of the published
# traces the busiest has a tenth of it. It takes some requests to say so.
_MOST_PER_S, _FEW = 1000.0, 100


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of recorded or made-up traffic."""

    arrival_s: float
    """Seconds after the beginning of the traffic."""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """The prompt's text, one id per block begun; the last block may be cut short. Prompts share as many tokens as
    their ids agree from the first one on."""
    block_tokens: int
    """Tokens of a whole block."""


def starts_of(counts: "IntArray | Int32Array") -> IntArray:
    """Where each of consecutive runs of these lengths begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def places_in(counts: "IntArray | Int32Array") -> IntArray:
    """0, 1, … for each of consecutive runs of these lengths."""
    starts = starts_of(counts)
    return np.arange(starts[-1]) - np.repeat(starts[:-1], counts)


def single_requests(
    columns: Sequence["NDArray[Any]"], block_ids: IntArray, block_starts: IntArray, block_tokens: int
) -> Iterator[TracedRequest]:
    """Of columns of arrivals, prompts and answers; the blocks of request i are those from its start to the next."""
    rows = (*columns, block_starts[:-1], block_starts[1:])
    for arrival_s, prompt, answer, start, end in zip(*(each.tolist() for each in rows), strict=True):
        yield TracedRequest(arrival_s, prompt, answer, tuple(block_ids[start:end].tolist()), block_tokens)


@dataclass(frozen=True, slots=True)
class OwnColumn:
    """A column of a trace that means nothing here: the words in it, each kept once."""

    codes: Int32Array
    """Of every request, as an index into `words`."""
    words: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RequestTrace:
    """Recorded requests, in the order of arrival. Arrays have one entry per request: 16 bytes in all, without blocks.

    Read it with `read_requests`, or make it of single ones with `of`. Iterating gives single ones again.
    """

    name: str
    arrival_s: FloatArray
    """The first is 0."""
    input_tokens: Int32Array
    output_tokens: Int32Array
    block_ids: "IntArray | None"
    """Of all requests, one after the other; None: no two prompts begin alike."""
    block_tokens: int
    """Of every request."""
    units: str
    """How the file's numbers were read."""
    empty: int = 0
    """How many requests without a prompt were left out."""
    own: Mapping[str, OwnColumn] = field(default_factory=dict)
    """The file's other columns."""

    @classmethod
    def of(cls, name: str, requests: Iterable[TracedRequest], units: str) -> "RequestTrace":
        """From requests in any order and with any beginning of time; at least one must have a prompt.

        Raises:
            WorkloadError: none has, or their blocks differ in size.
        """
        prompts = [each for each in requests if each.input_tokens > 0]
        sizes = {each.block_tokens for each in prompts} or {BLOCK_TOKENS}
        _check_sizes(name, sizes)
        return _in_order(
            name,
            np.array([each.arrival_s for each in prompts]),
            np.array([each.input_tokens for each in prompts], dtype=np.int32),
            np.array([each.output_tokens for each in prompts], dtype=np.int32),
            np.fromiter(chain.from_iterable(each.block_ids for each in prompts), dtype=np.int64),
            block_tokens=sizes.pop(),
            units=units,
        )

    def __repr__(self) -> str:
        return f"RequestTrace({self.name}: {len(self):,} requests in {self.span_s:,.0f} s; {self.units})"

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[TracedRequest]:
        starts = starts_of(self.block_counts)
        ids = np.arange(starts[-1]) if self.block_ids is None else self.block_ids
        return single_requests(
            (self.arrival_s, self.input_tokens, self.output_tokens), ids, starts, self.block_tokens
        )

    @property
    def requests(self) -> tuple[TracedRequest, ...]:
        """All of them as objects: some hundred bytes each."""
        return tuple(self)

    @property
    def block_counts(self) -> Int32Array:
        """Blocks of every prompt, the last one perhaps cut short."""
        counts: Int32Array = -(-self.input_tokens // self.block_tokens)
        return counts

    @property
    def lengths(self) -> Empirical:
        """Of whole prompts."""
        return _empirical(self.input_tokens)

    @property
    def uncached(self) -> Empirical:
        """What an endless prefix cache leaves of them."""
        return _empirical(self.uncached_tokens())

    @property
    def mean_output_tokens(self) -> float:
        """Of answers."""
        return float(self.output_tokens.mean())

    def uncached_tokens(self) -> "Int32Array | IntArray":
        """Per request, the tokens that no earlier request began with; at least 1, which is always computed."""
        if self.block_ids is None:
            return self.input_tokens
        seen: set[int] = set()
        ids, starts = self.block_ids.tolist(), starts_of(self.block_counts).tolist()
        known = np.zeros(len(self), dtype=np.int64)
        for number, (start, end) in enumerate(pairwise(starts)):
            at = start
            while at < end and ids[at] in seen:
                at += 1
            known[number] = at - start
            seen.update(ids[at:end])
        left: IntArray = np.maximum(self.input_tokens - known * self.block_tokens, 1)
        return left

    @property
    def span_s(self) -> float:
        """Time of the last arrival."""
        return float(self.arrival_s[-1])

    @property
    def quantum_s(self) -> float:
        """The step of a coarse clock: the median time between arrivals that differ, if most do not; else 0."""
        steps = np.diff(self.arrival_s)
        steps = steps[steps > 0]
        if not len(steps) or 2 * (len(steps) + 1) > len(self):
            return 0.0
        return float(np.sort(steps)[len(steps) // 2])


def _empirical(tokens: "Int32Array | IntArray") -> Empirical:
    lengths, counts = np.unique(tokens, return_counts=True)
    return Empirical.counted(lengths.astype(np.float64), counts.astype(np.float64))


def read_requests(
    path: Path, form: TraceFormat | str | None = None, columns: TraceColumns | None = None
) -> RequestTrace:
    """The requests of a file, from the first arrival on. Where it doesn't say which prompts begin alike, none do.

    Of ServeGen's archives, which have rates and lengths but no single requests, up to a million are drawn, always the
    same.

    Args:
        path: Of the file.
        form: Without it and without columns `guess_format` tells.
        columns: Whatever the file's header; a format can't be given with them.

    Raises:
        WorkloadError: no such file or format, a malformed line, which is named, or a guessed format that gives more
            requests per second than there can be.
    """
    if columns is not None and form is not None:
        raise WorkloadError(f"{path}: its columns are named; leave out the format {form}")
    if form is not None and form not in get_args(TraceFormat):
        formats = ", ".join(get_args(TraceFormat))
        raise WorkloadError(f'a trace has one of the formats {formats}, not "{form}"')
    if columns is None:
        used = form or guess_format(path)
        if used == "servegen":
            # Needs what the base installation lacks.
            from prfaas.core.workload.servegen import read_servegen

            arrival_s, prompts, answers, units = read_servegen(path)
            return _in_order(str(path), arrival_s, prompts, answers, None, units=units)
        trace = _read(path, FORMATS[used])
    else:
        trace = _read(path, columns)
    per_s = len(trace) / trace.span_s if trace.span_s > 0 else 0.0
    if form is None and columns is None and len(trace) >= _FEW and per_s > _MOST_PER_S:
        raise WorkloadError(
            f"{path}: has {per_s:,.0f} requests/s if it is {trace.units}; its times are probably of another unit: "
            "give its format, or name its columns"
        )
    return trace


def _read(path: Path, columns: TraceColumns) -> RequestTrace:
    arrivals, inputs, outputs, blocks = array("d"), array("i"), array("i"), array("q")
    own: dict[str, tuple[array[int], dict[Any, int]]] = {}
    sizes: set[int] = set()
    has_blocks: bool | None = None
    failed = 0
    for batch in columns.batches(path):
        answered = _answered(batch, columns)
        failed += len(batch.lines) - len(answered.lines)
        if not answered.lines:
            continue
        arrivals.frombytes(answered.seconds(columns.arrival, columns.unit_s).tobytes())
        prompts = answered.tokens(columns.input)
        for column, tokens in ((inputs, prompts), (outputs, answered.tokens(columns.output))):
            column.frombytes(tokens.astype(np.int32).tobytes())
        given = answered.cells.get(columns.blocks or "", [None])
        has_blocks = given[0] is not None if has_blocks is None else has_blocks
        if has_blocks:
            sizes |= _gather_blocks(answered, columns, prompts, blocks)
        elif any(each is not None for each in given):
            raise answered.bad(0, f"all lines must have {columns.blocks}, or none")
        for name in answered.cells.keys() - set(columns.names):
            codes, known = own.setdefault(
                name, (array("i", bytes(4 * (len(inputs) - len(prompts)))), {"": 0})
            )
            words = ("" if cell is None else str(cell) for cell in answered.cells[name])
            codes.extend([known.setdefault(word, len(known)) for word in words])
    _check_sizes(str(path), sizes)
    alike = (
        f"{columns.blocks} of {max(sizes, default=0)}-token blocks"
        if has_blocks
        else "no two prompts begin alike"
    )
    notes = [columns.units, alike]
    notes += [f"{failed:,} requests that failed are left out"] if failed else []
    return _in_order(
        str(path),
        np.frombuffer(arrivals),
        np.frombuffer(inputs, dtype=np.int32),
        np.frombuffer(outputs, dtype=np.int32),
        np.frombuffer(blocks, dtype=np.int64) if has_blocks else None,
        block_tokens=sizes.pop() if sizes else BLOCK_TOKENS,
        units="; ".join(notes),
        own={
            name: OwnColumn(np.frombuffer(codes, dtype=np.int32), list(known))
            for name, (codes, known) in sorted(own.items())
        },
    )


def _answered(batch: Batch, columns: TraceColumns) -> Batch:
    if not columns.only_answered:
        return batch
    return batch.picked(
        [row for row, cell in enumerate(batch.cells[columns.output]) if cell not in _NO_ANSWER]
    )


_NO_ANSWER = (None, 0, "", "0", "0.0")


def _gather_blocks(
    batch: Batch, columns: TraceColumns, prompts: FloatArray, blocks: "array[int]"
) -> set[int]:
    """Adds the ids of these prompts' blocks; returns the tokens of a block."""
    assert columns.blocks is not None
    sizes = (
        batch.tokens(columns.block_tokens)
        if isinstance(columns.block_tokens, str)
        else np.full(len(prompts), columns.block_tokens)
    )
    for row, (ids, prompt, size) in enumerate(zip(batch.cells[columns.blocks], prompts, sizes, strict=True)):
        if ids is None:
            raise batch.bad(row, f"all lines must have {columns.blocks}, or none")
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise batch.bad(row, f"{columns.blocks} must be a list of whole numbers")
        if not size:
            raise batch.bad(row, f"{columns.block_tokens} must be above 0")
        begun = -(-int(prompt) // int(size))
        if len(ids) != begun:
            raise batch.bad(
                row,
                f"has {len(ids)} {columns.blocks} for {prompt:.0f} tokens, which begin {begun} blocks of {size:.0f}",
            )
        if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST_ID:
            raise batch.bad(row, f"{columns.blocks} must be from 0 to 2^63 - 1")
        blocks.extend(ids)
    return {int(size) for size, prompt in zip(sizes, prompts, strict=True) if prompt}


_LARGEST_ID = (1 << 63) - 1


def _check_sizes(name: str, sizes: set[int]) -> None:
    if len(sizes) > 1:
        raise WorkloadError(
            f"{name}: has blocks of {min(sizes)} and of {max(sizes)} tokens; one size is needed"
        )


def _in_order(
    name: str,
    arrival_s: FloatArray,
    inputs: Int32Array,
    outputs: Int32Array,
    blocks: "IntArray | None",
    *,
    units: str,
    block_tokens: int = BLOCK_TOKENS,
    own: Mapping[str, OwnColumn] | None = None,
) -> RequestTrace:
    """Without empty prompts, in the order of arrival, the first at 0 s."""
    own = own or {}
    empty = int(np.count_nonzero(inputs == 0))
    if empty == len(inputs):
        raise WorkloadError(f"{name}: has no request with a prompt")
    if empty or not (arrival_s[1:] >= arrival_s[:-1]).all():
        order = np.argsort(arrival_s, kind="stable")
        order = order[inputs[order] > 0]
        if blocks is not None:
            counts = -(-inputs // block_tokens)
            starts = starts_of(counts)
            blocks = blocks[np.repeat(starts[order], counts[order]) + places_in(counts[order])]
        arrival_s, inputs, outputs = arrival_s[order], inputs[order], outputs[order]
        own = {key: replace(column, codes=column.codes[order]) for key, column in own.items()}
    if arrival_s[0]:
        arrival_s = arrival_s - arrival_s[0]
    return RequestTrace(
        name=name,
        arrival_s=arrival_s,
        input_tokens=inputs,
        output_tokens=outputs,
        block_ids=blocks,
        block_tokens=block_tokens,
        units=units,
        empty=empty,
        own=own,
    )


def write_requests(path: Path, requests: Iterable[TracedRequest]) -> int:
    """Our own format, packed if the name ends in .gz; returns how many there were."""
    written = 0
    # The same requests give the same bytes: no name and no time in the packed file.
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=0) if path.suffix == ".gz" else raw as file,
    ):
        for request in requests:
            file.write(json.dumps(asdict(request), separators=(",", ":")).encode() + b"\n")
            written += 1
    return written
