"""Recorded requests with their times, and which prompts begin alike; their files.

Mooncake's format, and CSV files as of Azure and BurstGPT, are read; our own is read and written.
"""

import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from pathlib import Path
from typing import IO, Any, Literal, get_args

from prfaas.core.workload.csv_traces import AZURE, BURSTGPT, CsvColumns, CsvRequest, csv_format, read_csv
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.trace import (
    EndlessCache,
    Where,
    bad_line,
    block_ids_of,
    lines_of,
    objects_of,
    seconds_of,
    tokens_of,
)

MOONCAKE_BLOCK_TOKENS = 512
_MS_PER_S = 1000.0

TraceFormat = Literal["mooncake", "azure", "burstgpt", "servegen", "jsonl"]

BLOCK_TOKENS = 512
"""Tokens per block where a source doesn't say which prompts begin alike: Mooncake's."""


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

    def to_json(self) -> dict[str, Any]:
        """One line of our own format."""
        return {
            "arrival_s": self.arrival_s,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "block_tokens": self.block_tokens,
            "block_ids": list(self.block_ids),
        }


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Recorded requests."""

    name: str
    requests: tuple[TracedRequest, ...]
    """In the order of arrival, the first at 0 s."""
    block_tokens: int
    """Of every request."""
    units: str
    """How the file's numbers were read."""
    empty: int = 0
    """How many requests without a prompt were left out."""

    @classmethod
    def of(cls, name: str, requests: list[TracedRequest], units: str) -> "RequestTrace":
        """From requests in any order and with any beginning of time; at least one must have a prompt.

        Raises:
            WorkloadError: none has, or their blocks differ in size.
        """
        prompts = sorted(
            (each for each in requests if each.input_tokens > 0), key=lambda each: each.arrival_s
        )
        if not prompts:
            raise WorkloadError(f"{name}: has no request with a prompt")
        sizes = {each.block_tokens for each in prompts}
        if len(sizes) > 1:
            raise WorkloadError(
                f"{name}: has blocks of {min(sizes)} and of {max(sizes)} tokens; one size is needed"
            )
        first_s = prompts[0].arrival_s
        moved = tuple(replace(each, arrival_s=each.arrival_s - first_s) for each in prompts)
        return cls(name, moved, sizes.pop(), units, len(requests) - len(prompts))

    def cut_to(self, most_tokens: int) -> "RequestTrace":
        """The same requests with no prompt above `most_tokens` tokens."""
        return replace(self, requests=tuple(_cut(each, most_tokens) for each in self.requests))

    def uncached_tokens(self) -> list[int]:
        """Per request, the tokens that no earlier request began with; at least 1, which is always computed."""
        cache = EndlessCache()
        return [
            max(each.input_tokens - cache.known_blocks(each.block_ids) * each.block_tokens, 1)
            for each in self.requests
        ]

    @property
    def span_s(self) -> float:
        """Time of the last arrival."""
        return self.requests[-1].arrival_s

    @property
    def quantum_s(self) -> float:
        """The step of a coarse clock: the median time between arrivals that differ, if most do not; else 0."""
        times = sorted({each.arrival_s for each in self.requests})
        if len(times) < 2 or 2 * len(times) > len(self.requests):
            return 0.0
        steps = sorted(after - before for before, after in pairwise(times))
        return steps[len(steps) // 2]


def _cut(request: TracedRequest, most_tokens: int) -> TracedRequest:
    if request.input_tokens <= most_tokens:
        return request
    blocks = request.block_ids[: blocks_begun(most_tokens, request.block_tokens)]
    return replace(request, input_tokens=most_tokens, block_ids=blocks)


def blocks_begun(input_tokens: int, block_tokens: int) -> int:
    """Blocks of a prompt, the last one perhaps cut short."""
    return math.ceil(input_tokens / block_tokens)


_LARGEST_ID = (1 << 63) - 1


def read_requests(
    path: Path, form: TraceFormat | None = None, columns: CsvColumns | None = None
) -> RequestTrace:
    """The requests of a file, from the first arrival on. Where it doesn't say which prompts begin alike, none do.

    Args:
        path: Of the file.
        form: Without it and without columns `guess_format` tells.
        columns: Of a CSV file, whatever its header; a format can't be given with them.

    Raises:
        WorkloadError: no such file, a format without single requests, or a malformed line, which is named.
    """
    if columns is not None:
        if form is not None:
            raise WorkloadError(f"{path}: columns are named of a CSV file; leave out the format {form}")
        unit = "date and time, or s" if columns.unit_s == 1 else "ms"
        return _of_csv(path, read_csv(path, columns), f"a CSV file's: {columns.arrival} as {unit}")
    return _READERS[form or guess_format(path)](path)


def write_requests(path: Path, requests: Iterable[TracedRequest]) -> int:
    """Our own format, packed if the name ends in .gz; returns how many there were."""
    written = 0
    # The same requests give the same bytes: no name and no time in the packed file.
    with path.open("wb") as raw, _packed(path, raw) as file:
        for request in requests:
            file.write(json.dumps(request.to_json(), separators=(",", ":")).encode() + b"\n")
            written += 1
    return written


def _packed(path: Path, raw: IO[bytes]) -> IO[bytes] | gzip.GzipFile:
    return gzip.GzipFile("", "wb", 9, raw, mtime=0) if path.suffix == ".gz" else raw


def _read_mooncake(path: Path) -> RequestTrace:
    requests = []
    for where, row in objects_of(path):
        prompt = tokens_of(where, row, "input_length")
        blocks = block_ids_of(where, row, "hash_ids")
        _check_blocks(where, "hash_ids", blocks, prompt, MOONCAKE_BLOCK_TOKENS)
        arrival_s = seconds_of(where, row, "timestamp") / _MS_PER_S
        answer = tokens_of(where, row, "output_length")
        requests.append(TracedRequest(arrival_s, prompt, answer, blocks, MOONCAKE_BLOCK_TOKENS))
    units = f"Mooncake's: times in ms, hash_ids of {MOONCAKE_BLOCK_TOKENS}-token blocks"
    return RequestTrace.of(str(path), requests, units)


def _read_jsonl(path: Path) -> RequestTrace:
    requests = []
    has_blocks = None
    fresh = count()
    for where, row in objects_of(path):
        if has_blocks is None:
            has_blocks = "block_ids" in row
        elif has_blocks != ("block_ids" in row):
            raise bad_line(*where, "all lines must have block_ids, or none")
        prompt = tokens_of(where, row, "input_tokens")
        size, blocks = (
            _blocks_of(where, row, prompt) if has_blocks else (BLOCK_TOKENS, _new_ids(fresh, prompt))
        )
        arrival_s = seconds_of(where, row, "arrival_s")
        requests.append(
            TracedRequest(arrival_s, prompt, tokens_of(where, row, "output_tokens"), blocks, size)
        )
    units = "our own: times in s" + (
        "" if has_blocks else "; no block_ids, so that no two prompts begin alike"
    )
    return RequestTrace.of(str(path), requests, units)


def _read_azure(path: Path) -> RequestTrace:
    return _of_csv(path, read_csv(path, AZURE), "Azure's: times of day")


def _read_burstgpt(path: Path) -> RequestTrace:
    requests = list(read_csv(path, BURSTGPT))
    # Those that failed have no answer.
    answered = [each for each in requests if each.output_tokens > 0]
    failed = len(requests) - len(answered)
    notes = [f"{failed:,} requests that failed are left out"] if failed else []
    return _of_csv(path, answered, "BurstGPT's: times in s", *notes)


def _of_csv(path: Path, rows: Iterable[CsvRequest], units: str, *notes: str) -> RequestTrace:
    fresh = count()
    requests = [
        TracedRequest(
            **each._asdict(), block_ids=_new_ids(fresh, each.input_tokens), block_tokens=BLOCK_TOKENS
        )
        for each in rows
    ]
    return RequestTrace.of(str(path), requests, "; ".join([units, "no two prompts begin alike", *notes]))


def _read_servegen(path: Path) -> RequestTrace:
    raise WorkloadError(f"{path}: ServeGen's archives have rates and lengths but no single requests")


_READERS: dict[TraceFormat, Callable[[Path], RequestTrace]] = {
    "mooncake": _read_mooncake,
    "azure": _read_azure,
    "burstgpt": _read_burstgpt,
    "servegen": _read_servegen,
    "jsonl": _read_jsonl,
}


def _blocks_of(where: Where, row: dict[str, Any], input_tokens: int) -> tuple[int, tuple[int, ...]]:
    block_tokens = tokens_of(where, row, "block_tokens")
    if block_tokens == 0:
        raise bad_line(*where, "block_tokens must be above 0")
    blocks = block_ids_of(where, row, "block_ids")
    _check_blocks(where, "block_ids", blocks, input_tokens, block_tokens)
    return block_tokens, blocks


def _check_blocks(
    where: Where, field: str, blocks: tuple[int, ...], input_tokens: int, block_tokens: int
) -> None:
    if len(blocks) != blocks_begun(input_tokens, block_tokens):
        raise bad_line(
            *where,
            f"has {len(blocks)} {field} for {input_tokens} tokens, which begin "
            f"{blocks_begun(input_tokens, block_tokens)} blocks of {block_tokens}",
        )
    if blocks and not 0 <= min(blocks) <= max(blocks) <= _LARGEST_ID:
        raise bad_line(*where, f"{field} must be from 0 to 2^63 - 1")


def _new_ids(fresh: Iterator[int], input_tokens: int) -> tuple[int, ...]:
    return tuple(islice(fresh, blocks_begun(input_tokens, BLOCK_TOKENS)))


def guess_format(path: Path) -> TraceFormat:
    """The format of a trace, from its file's name or first line.

    Raises:
        WorkloadError: nothing, or the file can't be read.
    """
    name = path.name.lower()
    if name.endswith((".tar.gz", ".tgz", ".tar")):
        return "servegen"
    if name.endswith((".csv", ".csv.gz")):
        return csv_format(path)
    if name.endswith((".jsonl", ".jsonl.gz")):
        for _, line in lines_of(path):
            try:
                first = json.loads(line)
            except (ValueError, RecursionError):
                break
            return "mooncake" if isinstance(first, dict) and "hash_ids" in first else "jsonl"
        return "jsonl"
    formats = ", ".join(get_args(TraceFormat))
    raise WorkloadError(f"{path}: its name doesn't say what format it has; give one of {formats}")
