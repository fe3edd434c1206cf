"""Text files line by line, packed or not, with errors that name the line."""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from prfaas.workload.errors import WorkloadError


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
