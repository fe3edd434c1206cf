"""Files with one JSON object per line: their rows, and fields that must be numbers of something."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prfaas.workload.lines import bad_line, lines_of

Where = tuple[str, int]
"""File and line number."""


def objects_of(path: Path) -> Iterator[tuple[Where, dict[str, Any]]]:
    """Every line's object and where it stands.

    Raises:
        WorkloadError: the file can't be read, or a line is no JSON object.
    """
    for number, line in lines_of(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise bad_line(str(path), number, "is not JSON") from None
        if not isinstance(row, dict):
            raise bad_line(str(path), number, "must be a JSON object")
        yield (str(path), number), row


def tokens_of(where: Where, row: dict[str, Any], field: str) -> int:
    """A whole number, 0 or more. Raises WorkloadError."""
    value = row.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        given = "is missing" if field not in row else f"must be a whole number of tokens, not {value!r:.40}"
        raise bad_line(*where, f"{field} {given}")
    return value


def seconds_of(where: Where, row: dict[str, Any], field: str) -> float:
    """A finite number. Raises WorkloadError."""
    value = row.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        given = "is missing" if field not in row else f"must be a time, not {value!r:.40}"
        raise bad_line(*where, f"{field} {given}")
    return float(value)


def block_ids_of(where: Where, row: dict[str, Any], field: str) -> tuple[int, ...]:
    """A list of whole numbers. Raises WorkloadError."""
    blocks = row.get(field)
    if not isinstance(blocks, list) or not all(
        isinstance(block, int) and not isinstance(block, bool) for block in blocks
    ):
        raise bad_line(*where, f"{field} must be a list of whole numbers")
    return tuple(blocks)
