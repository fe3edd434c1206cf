"""Traces with one JSON object per line: Mooncake's, and our own."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prfaas.workload.lines import bad_line, lines_of
from prfaas.workload.trace import Trace, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
_MS_PER_S = 1000.0


def read_mooncake(path: Path) -> Trace:
    """Mooncake's format (FAST'25 release): timestamp in ms, input_length, output_length and hash_ids, one per
    block of 512 tokens, each standing for its block and all before it.

    Raises:
        WorkloadError: a file or line that isn't that, with its number.
    """
    seen: set[int] = set()
    requests = []
    for number, row in _objects(path):
        where = (str(path), number)
        prompt = _tokens(where, row, "input_length")
        blocks = row.get("hash_ids")
        if not isinstance(blocks, list) or not all(_is_whole(block) for block in blocks):
            raise bad_line(*where, "hash_ids must be a list of whole numbers")
        known = 0
        while known < len(blocks) and blocks[known] in seen:
            known += 1
        seen.update(blocks)
        requests.append(
            TraceRequest(
                arrival_s=_seconds(where, row, "timestamp") / _MS_PER_S,
                input_tokens=prompt,
                output_tokens=_tokens(where, row, "output_length"),
                cached_tokens=min(known * MOONCAKE_BLOCK_TOKENS, prompt),
            )
        )
    return Trace.of(str(path), tuple(requests))


def read_jsonl(path: Path) -> Trace:
    """Our own format: arrival_s, input_tokens, output_tokens, and cached_tokens if it is known.

    Raises:
        WorkloadError: a file or line that isn't that, with its number.
    """
    requests = []
    for number, row in _objects(path):
        where = (str(path), number)
        prompt = _tokens(where, row, "input_tokens")
        cached = _tokens(where, row, "cached_tokens") if "cached_tokens" in row else None
        if cached is not None and cached > prompt:
            raise bad_line(*where, f"cached_tokens ({cached}) can't be more than input_tokens ({prompt})")
        requests.append(
            TraceRequest(
                _seconds(where, row, "arrival_s"), prompt, _tokens(where, row, "output_tokens"), cached
            )
        )
    return Trace.of(str(path), tuple(requests))


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in lines_of(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise bad_line(str(path), number, "is not JSON") from None
        if not isinstance(row, dict):
            raise bad_line(str(path), number, "must be a JSON object")
        yield number, row


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(where: tuple[str, int], row: dict[str, Any], field: str) -> int:
    value = row.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        given = "is missing" if field not in row else f"must be a whole number of tokens, not {value!r:.40}"
        raise bad_line(*where, f"{field} {given}")
    return value


def _seconds(where: tuple[str, int], row: dict[str, Any], field: str) -> float:
    value = row.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        given = "is missing" if field not in row else f"must be a time, not {value!r:.40}"
        raise bad_line(*where, f"{field} {given}")
    return float(value)
