"""Whole requests in files: Mooncake's and Azure's formats, and our own for reading and writing."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

from prfaas.workload.azure import read_azure
from prfaas.workload.errors import WorkloadError
from prfaas.workload.json_lines import Where, block_ids_of, objects_of, seconds_of, tokens_of
from prfaas.workload.json_traces import MOONCAKE_BLOCK_TOKENS, MS_PER_S
from prfaas.workload.lines import bad_line
from prfaas.workload.requests import BLOCK_TOKENS, RequestTrace, TracedRequest, blocks_begun
from prfaas.workload.traces import TraceFormat, guess_format

_LARGEST_ID = (1 << 63) - 1


def read_requests(path: Path, form: TraceFormat | None = None) -> RequestTrace:
    """The requests of a file, from the first arrival on. Without a format, see `traces.read_trace`.

    Where a file doesn't say which prompts begin alike, none do.

    Raises:
        WorkloadError: no such file, a format without single requests, or a malformed line, which is named.
    """
    return _READERS[form or guess_format(path)](path)


def write_requests(path: Path, requests: Iterable[TracedRequest]) -> int:
    """Our own format, packed if the name ends in .gz; returns how many there were.

    Raises:
        WorkloadError: the file can't be written.
    """
    written = 0
    try:
        # The same requests give the same bytes: no name and no time in the packed file.
        with path.open("wb") as raw, _packed(path, raw) as file:
            for request in requests:
                file.write(json.dumps(request.to_json(), separators=(",", ":")).encode() + b"\n")
                written += 1
    except OSError as error:
        raise WorkloadError(f"{path}: can't be written ({error.strerror})") from error
    return written


def _packed(path: Path, raw: IO[bytes]) -> IO[bytes] | gzip.GzipFile:
    return gzip.GzipFile("", "wb", 9, raw, mtime=0) if path.suffix == ".gz" else raw


def _read_mooncake(path: Path) -> RequestTrace:
    requests = []
    for where, row in objects_of(path):
        prompt = tokens_of(where, row, "input_length")
        blocks = block_ids_of(where, row, "hash_ids")
        _check_blocks(where, "hash_ids", blocks, prompt, MOONCAKE_BLOCK_TOKENS)
        arrival_s = seconds_of(where, row, "timestamp") / MS_PER_S
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
    fresh = count()
    requests = []
    for each in read_azure(path).requests:
        blocks = _new_ids(fresh, each.input_tokens)
        requests.append(
            TracedRequest(each.arrival_s, each.input_tokens, each.output_tokens, blocks, BLOCK_TOKENS)
        )
    return RequestTrace.of(str(path), requests, "Azure's: times of day; no two prompts begin alike")


def _read_servegen(path: Path) -> RequestTrace:
    raise WorkloadError(f"{path}: ServeGen's archives have rates and lengths but no single requests")


_READERS: dict[TraceFormat, Callable[[Path], RequestTrace]] = {
    "mooncake": _read_mooncake,
    "azure": _read_azure,
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
