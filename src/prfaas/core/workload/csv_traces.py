"""Traces as CSV files: a header, then a line per request with its arrival and its tokens.

Two published formats are known by their headers. Of any other file the columns must be named.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.trace import bad_line, lines_of

# Seconds of a number in the column that the key names.
_ARRIVALS = {"arrival": 1.0, "arrival_ms": 1e-3}
_FORM = "arrival=COLUMN,input=COLUMN,output=COLUMN"


@dataclass(frozen=True, slots=True)
class CsvColumns:
    """The names of a CSV trace's columns."""

    arrival: str
    """When a request came: a number, or a date and time."""
    input: str
    """Tokens of the prompt."""
    output: str
    """Tokens of the answer."""
    unit_s: float = 1.0
    """Seconds that a number in `arrival` counts."""

    @classmethod
    def of(cls, names: Mapping[str, str]) -> "CsvColumns":
        """From the names by `arrival` (seconds, or a date and time) or `arrival_ms`, `input` and `output`.

        Raises:
            WorkloadError: one is missing, or there is another.
        """
        arrivals = [key for key in _ARRIVALS if key in names]
        others = names.keys() - _ARRIVALS.keys()
        if len(arrivals) != 1 or others != {"input", "output"} or not all(names.values()):
            given = ", ".join(f"{key}={column}" for key, column in names.items()) or "nothing"
            raise WorkloadError(
                f"columns of a CSV trace are named as {_FORM} (arrival_ms for milliseconds), not {given}"
            )
        (arrival,) = arrivals
        return cls(names[arrival], names["input"], names["output"], _ARRIVALS[arrival])

    @classmethod
    def parse(cls, text: str) -> "CsvColumns":
        """From "arrival=Timestamp,input=Request tokens,output=Response tokens". Names may have commas and "=".

        Raises:
            WorkloadError: another form, a name that is missing, or one too many.
        """
        names: dict[str, str] = {}
        for part in re.split(rf",(?=\s*(?:{'|'.join((*_ARRIVALS, 'input', 'output'))})\s*=)", text):
            key, sign, column = (each.strip() for each in part.partition("="))
            if not sign or key in names:
                raise WorkloadError(f'columns of a CSV trace are named as {_FORM}, not "{text}"')
            names[key] = column
        return cls.of(names)

    def __str__(self) -> str:
        return f"{self.arrival}, {self.input}, {self.output}"


class CsvRequest(NamedTuple):
    """One line of a CSV trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


AZURE = CsvColumns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Azure's LLM inference traces of 2023 (github.com/Azure/AzurePublicDataset): times of day."""
BURSTGPT = CsvColumns("Timestamp", "Request tokens", "Response tokens")
"""BurstGPT (Wang et al., arXiv 2401.17644; github.com/HPMLL/BurstGPT), releases 1 and 2: seconds from midnight of the
first day. Further columns (model, session, elapsed time, total, log type) are not read."""

_KNOWN: dict[Literal["azure", "burstgpt"], CsvColumns] = {"azure": AZURE, "burstgpt": BURSTGPT}


def csv_format(path: Path) -> Literal["azure", "burstgpt"]:
    """Which published format a CSV file has, by its header.

    Raises:
        WorkloadError: none of them, or the file can't be read.
    """
    where, header = next(_cells_of(path), (0, None))
    if header is None:
        raise WorkloadError(f"{path}: is empty; the first line must name the columns")
    for form, columns in _KNOWN.items():
        if {columns.arrival, columns.input, columns.output} <= set(header):
            return form
    raise bad_line(
        str(path),
        where,
        f"the header ({', '.join(header):.200}) is neither Azure's ({AZURE}) nor BurstGPT's ({BURSTGPT}); "
        f"name its columns: {_FORM}",
    )


def read_csv(path: Path, columns: CsvColumns) -> Iterator[CsvRequest]:
    """The requests of a file, in its order. Arrivals count from the first line.

    Raises:
        WorkloadError: a file or line that isn't that, with its number.
    """
    cells = _cells_of(path)
    where, header = next(cells, (0, None))
    if header is None:
        raise WorkloadError(f"{path}: is empty; the first line must name the columns {columns}")
    wanted = (columns.arrival, columns.input, columns.output)
    if missing := [column for column in wanted if column not in header]:
        text = f"the header has no {', '.join(missing)}; it has {', '.join(header)}"
        raise bad_line(
            str(path), where, text if len(header) > 1 else f"{text}; cells must be separated by commas"
        )
    if twice := [column for column in wanted if header.count(column) > 1]:
        raise bad_line(str(path), where, f"the header has {twice[0]} twice")
    at, prompt, answer = (header.index(column) for column in wanted)
    first_s: float | None = None
    is_date = False
    for number, row in cells:
        if len(row) != len(header):
            raise bad_line(str(path), number, f"has {len(row)} values for {len(header)} columns")
        if first_s is None:
            is_date = _DATE_AND_TIME.fullmatch(row[at]) is not None
            first_s = _time_s(str(path), number, row[at], columns, is_date=is_date)
        yield CsvRequest(
            _time_s(str(path), number, row[at], columns, is_date=is_date) - first_s,
            _tokens(str(path), number, row[prompt], columns.input),
            _tokens(str(path), number, row[answer], columns.output),
        )


def _cells_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of the last line of each row, and its cells; one in quotes may go over several lines."""
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in lines_of(path):  # noqa: B007  # read by the caller
            yield line

    rows = csv.reader(lines())
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise bad_line(str(path), number, f"is no line of a CSV file ({error})") from None
        if row is None:
            return
        yield number, [cell.strip() for cell in row]


# Azure writes seven digits of a second, one more than datetime knows.
_DATE_AND_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


def _time_s(where: str, number: int, text: str, columns: CsvColumns, *, is_date: bool) -> float:
    match = _DATE_AND_TIME.fullmatch(text)
    try:
        if is_date and match is not None:
            # Without a time zone as if in UTC: only differences count.
            whole_s = datetime.fromisoformat(f"{match[1]}{match[3] or '+00:00'}").timestamp()
            return whole_s + float(match[2] or 0)
        if not is_date and math.isfinite(time_s := float(text) * columns.unit_s):
            return time_s
    except ValueError:
        pass
    raise bad_line(
        where,
        number,
        f'{columns.arrival} "{text[:40]}" is no time; all must be numbers, or all like 2023-11-16 18:17:03.979',
    )


def _tokens(where: str, number: int, text: str, column: str) -> int:
    # Azure's exports write whole numbers with a fraction now and then: "374.0".
    if not re.fullmatch(r"\d{1,12}(\.0+)?", text):
        raise bad_line(where, number, f'{column} "{text[:40]}" must be a whole number of tokens')
    return int(float(text))
