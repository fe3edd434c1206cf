"""Azure's LLM inference traces (2023): CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

import csv
import re
from datetime import datetime
from pathlib import Path

from prfaas.workload.errors import WorkloadError
from prfaas.workload.lines import bad_line, lines_of
from prfaas.workload.trace import Trace, TraceRequest

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Seven digits of a second, one more than datetime knows.
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(?:Z|[+-]\d\d:?\d\d)?")


def read_azure(path: Path) -> Trace:
    """Arrivals count from the first line.

    Raises:
        WorkloadError: a file or line that isn't that, with its number.
    """
    header: list[str] | None = None
    requests: list[TraceRequest] = []
    first_s = 0.0
    for number, line in lines_of(path):
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if header is None:
            header = cells
            if missing := [column for column in _COLUMNS if column not in header]:
                raise bad_line(str(path), number, f"the header has no {', '.join(missing)}")
            continue
        if len(cells) != len(header):
            raise bad_line(str(path), number, f"has {len(cells)} values for {len(header)} columns")
        row = dict(zip(header, cells, strict=True))
        time_s = _time_s(str(path), number, row["TIMESTAMP"])
        if not requests:
            first_s = time_s
        requests.append(
            TraceRequest(
                time_s - first_s,
                _tokens(str(path), number, row, "ContextTokens"),
                _tokens(str(path), number, row, "GeneratedTokens"),
            )
        )
    if header is None:
        raise WorkloadError(f"{path}: is empty; the first line must be {','.join(_COLUMNS)}")
    return Trace.of(str(path), tuple(requests))


def _time_s(where: str, number: int, text: str) -> float:
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        # As if in UTC: only differences count.
        return datetime.fromisoformat(f"{match[1]}+00:00").timestamp() + float(match[2] or 0)
    except ValueError:
        raise bad_line(
            where, number, f'TIMESTAMP "{text[:40]}" is no time like 2023-11-16 18:17:03.979'
        ) from None


def _tokens(where: str, number: int, row: dict[str, str], column: str) -> int:
    text = row[column]
    # Their exports write whole numbers with a fraction now and then: "374.0".
    if not re.fullmatch(r"\d{1,12}(\.0+)?", text):
        raise bad_line(where, number, f'{column} "{text[:40]}" must be a whole number of tokens')
    return int(float(text))
