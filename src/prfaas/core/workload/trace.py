"""Lines of request traces, whatever their format.

Traces are text files, packed or not; errors name the line. Of files with one JSON object per line the fields must be
numbers of something.
"""

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from prfaas.core.workload.lengths import WorkloadError


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines without their ends; empty lines are left out. `.gz` is unpacked.

    Raises:
        WorkloadError: the file can't be read, or isn't text.
    """
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except FileNotFoundError:
        raise WorkloadError(f"{path}: there is no such trace") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: can't be read as a trace ({error})") from error


def bad_line(where: str, number: int, problem: str) -> WorkloadError:
    """The error about one line of a file."""
    return WorkloadError(f"{where}:{number}: {problem}")


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


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


class EndlessCache:
    """A prefix cache that forgets nothing: how many blocks of each prompt some prompt before it began with."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def known_blocks(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks are known; from now on all of them are."""
        seen, known = self._seen, 0
        while known < len(blocks) and blocks[known] in seen:
            known += 1
        seen.update(blocks)
        return known
