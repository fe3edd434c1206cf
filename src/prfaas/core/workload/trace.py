"""Files of traces, packed or not, read by columns: some thousand requests at once, whatever the format.

Errors name the line.
"""

import csv
import gzip
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from prfaas.core.arrays import FloatArray, np
from prfaas.core.workload.lengths import WorkloadError

_ROWS = 1 << 14
# A line of a prompt of a million tokens, with an id for every 16, has half a million characters.
_MOST_OF_A_LINE = 4 << 20
_MOST_IN_ONE = 1 << 30


@contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """The text of a trace; `.gz` is unpacked.

    Raises:
        WorkloadError: the file can't be read, or isn't text.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as raw:
            yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
    except FileNotFoundError:
        raise WorkloadError(f"{path}: there is no such trace") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: can't be read as a trace ({error})") from error


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """The lines of a file; one without end is none."""
    number = 0
    while line := file.readline(_MOST_OF_A_LINE + 1):
        number += 1
        if len(line) > _MOST_OF_A_LINE:
            raise bad_line(str(path), number, f"has more than {_MOST_OF_A_LINE} characters")
        yield line


def bad_line(where: str, number: int, problem: str) -> WorkloadError:
    """The error about one line of a file."""
    return WorkloadError(f"{where}:{number}: {problem}")


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows of a file, column by column. A cell that a row lacks is None."""

    where: str
    """Of the file."""
    lines: Sequence[int]
    """Of every row."""
    cells: Mapping[str, Sequence[Any]]
    """By the column's name."""

    def picked(self, rows: Sequence[int]) -> "Batch":
        """Only these rows."""
        cells = {name: [column[row] for row in rows] for name, column in self.cells.items()}
        return Batch(self.where, [self.lines[row] for row in rows], cells)

    def bad(self, row: int, problem: str) -> WorkloadError:
        """The error about one row."""
        return bad_line(self.where, self.lines[row], problem)

    def tokens(self, column: str) -> FloatArray:
        """Whole numbers, 0 or more. Raises WorkloadError."""
        tokens = self._numbers(column)
        is_whole = (tokens >= 0) & (tokens < 2**31) & (tokens % 1 == 0)
        return self._checked(column, tokens, is_whole, "a whole number of tokens")

    def seconds(self, column: str, unit_s: float) -> FloatArray:
        """Times in seconds: numbers of `unit_s`, or dates and times, as the first one. Raises WorkloadError."""
        first = self.cells[column][0]
        if isinstance(first, str) and math.isnan(_number(first, str)):
            times = np.array([_date_s(cell) for cell in self.cells[column]], dtype=np.float64)
        else:
            times = self._numbers(column) * unit_s
        like = "; all must be numbers, or all like 2023-11-16 18:17:03.979"
        return self._checked(column, times, np.isfinite(times), "a time", like)

    def _numbers(self, column: str) -> FloatArray:
        """NaN for what is none."""
        cells = self.cells[column]
        kind = str if isinstance(cells[0], str) else int | float
        try:
            # A CSV file's cells are all texts: at once that takes a fifth of the time.
            if kind is str:
                return np.array(cells, dtype=np.float64)
        except ValueError:
            pass
        return np.array([_number(cell, kind) for cell in cells], dtype=np.float64)

    def _checked(
        self, column: str, numbers: FloatArray, is_good: Any, wanted: str, more: str = ""
    ) -> FloatArray:
        if not is_good.all():
            row = int(np.argmin(is_good))
            cell = self.cells[column][row]
            given = "is missing" if cell is None else f"must be {wanted}, not {cell!r:.40}{more}"
            raise self.bad(row, f"{column} {given}")
        return numbers


def _number(cell: Any, kind: Any) -> float:
    try:
        return float(cell) if isinstance(cell, kind) and not isinstance(cell, bool) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _date_s(cell: Any) -> float:
    try:
        date = datetime.fromisoformat(cell)
    except (TypeError, ValueError):
        return math.nan
    # Without a time zone as if in UTC: only differences count.
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def csv_batches(path: Path) -> Iterator[Batch]:
    """Batches of a CSV file: a header, then a line per request. The first batch has no rows.

    Raises:
        WorkloadError: the file is empty or no CSV file, or a line has another number of cells than the header.
    """
    with opened(path) as file:
        reader = csv.reader(_lines(file, path), skipinitialspace=True)
        header: list[str] = []

        def rows() -> Iterator[tuple[int, list[str]]]:
            try:
                for row in reader:
                    if len(row) == len(header) or not header:
                        yield reader.line_num, row
                    elif "".join(row).strip():
                        problem = f"has {len(row)} values for {len(header)} columns"
                        raise bad_line(str(path), reader.line_num, problem)
            except csv.Error as error:
                problem = f"is no line of a CSV file ({error})"
                raise bad_line(str(path), reader.line_num, problem) from None

        lines = rows()
        while not any(header):
            at, header = next(lines, (0, [""]))
            if not at:
                raise WorkloadError(f"{path}: is empty; the first line must name the columns")
            header = [name.strip() for name in header]
        if twice := [name for name, count in Counter(header).items() if name and count > 1]:
            raise bad_line(str(path), at, f"the header has {twice[0]} twice")
        yield Batch(str(path), [at], {name: [] for name in header})
        while batch := list(islice(lines, _ROWS)):
            numbers, cells = zip(*batch, strict=True)
            yield Batch(str(path), numbers, dict(zip(header, zip(*cells, strict=True), strict=True)))


def json_batches(path: Path, names: Sequence[str], rows: int = _ROWS) -> Iterator[Batch]:
    """Batches of a file with one JSON object per line, or of one object with a list per column.

    Args:
        path: Of the file.
        names: Columns that are read; "a.b" is field b of an object a. Other fields that are no lists or objects make
            columns, too.
        rows: Of a batch at most.

    Raises:
        WorkloadError: the file can't be read, or a line is no JSON object.
    """
    with opened(path) as file:
        if path.name.lower().removesuffix(".gz").endswith(".json"):
            text = file.read(_MOST_IN_ONE + 1)
            if len(text) > _MOST_IN_ONE:
                raise WorkloadError(
                    f"{path}: has more than {_MOST_IN_ONE} characters; give a line for each request"
                )
            yield _in_one(path, _object(path, 1, text))
            return
        lines = ((number, line) for number, line in enumerate(_lines(file, path), 1) if line.strip())
        while batch := [(number, _object(path, number, line)) for number, line in islice(lines, rows)]:
            cells: dict[str, Sequence[Any]] = {
                name: [_field(row, name) for _, row in batch] for name in names
            }
            roots = {name.split(".")[0] for name in names}
            for name in dict.fromkeys(key for _, row in batch for key in row if key not in roots):
                column = [row.get(name) for _, row in batch]
                if not any(isinstance(cell, list | dict) for cell in column):
                    cells[name] = column
            yield Batch(str(path), [number for number, _ in batch], cells)


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise bad_line(str(path), number, "is not JSON") from None
    if not isinstance(row, dict):
        raise bad_line(str(path), number, "must be a JSON object")
    return row


def _in_one(path: Path, document: dict[str, Any]) -> Batch:
    columns = {name: cells for name, cells in document.items() if isinstance(cells, list)}
    count = max(map(len, columns.values()), default=0)
    if not count:
        raise WorkloadError(f"{path}: must be one object with a list of values for each column")
    kept = {name: cells for name, cells in columns.items() if len(cells) == count}
    return Batch(f"{path}: entry", range(1, count + 1), kept)


def _field(row: Any, name: str) -> Any:
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row
