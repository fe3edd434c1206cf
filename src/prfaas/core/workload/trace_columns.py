"""Formats of traces: which columns of a file have arrivals, tokens and blocks, and how a format is recognised."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, cast, get_args

from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.trace import Batch, bad_line, csv_batches, json_batches

TraceFormat = Literal["mooncake", "qwen", "azure", "burstgpt", "servegen", "vllm", "aiperf", "jsonl"]

BLOCK_TOKENS = 512
"""Tokens per block where a source doesn't say which prompts begin alike: Mooncake's."""

# Seconds of a number in the column that the key names.
_ARRIVALS = {"arrival": 1.0, "arrival_ms": 1e-3}
_FORM = "arrival=COLUMN,input=COLUMN,output=COLUMN"


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """The names of a trace's columns."""

    arrival: str
    """When a request came: a number, or a date and time."""
    input: str
    """Tokens of the prompt."""
    output: str
    """Tokens of the answer."""
    unit_s: float = 1.0
    """Seconds that a number in `arrival` counts."""
    blocks: str | None = None
    """Ids of the prompt's blocks: prompts begin alike as far as these agree. None: no two prompts begin alike."""
    block_tokens: int | str = BLOCK_TOKENS
    """Of a block, or the column that has them."""
    title: str = "as named"
    """Whose format it is."""
    source: str = ""
    """Where the format is published."""
    only_answered: bool = False
    """Requests without an answer failed, and are left out."""

    @classmethod
    def of(cls, names: Mapping[str, str]) -> "TraceColumns":
        """From the names by `arrival` (seconds, or a date and time) or `arrival_ms`, `input` and `output`.

        Raises:
            WorkloadError: one is missing, or there is another.
        """
        arrivals = [key for key in _ARRIVALS if key in names]
        others = names.keys() - _ARRIVALS.keys()
        if len(arrivals) != 1 or others != {"input", "output"} or not all(names.values()):
            given = ", ".join(f"{key}={column}" for key, column in names.items()) or "nothing"
            raise WorkloadError(
                f"columns of a trace are named as {_FORM} (arrival_ms for milliseconds), not {given}"
            )
        (arrival,) = arrivals
        return cls(names[arrival], names["input"], names["output"], _ARRIVALS[arrival])

    @classmethod
    def parse(cls, text: str) -> "TraceColumns":
        """From "arrival=Timestamp,input=Request tokens,output=Response tokens". Names may have commas and "=".

        Raises:
            WorkloadError: another form, a name that is missing, or one too many.
        """
        names: dict[str, str] = {}
        for part in re.split(rf",(?=\s*(?:{'|'.join((*_ARRIVALS, 'input', 'output'))})\s*=)", text):
            key, sign, column = (each.strip() for each in part.partition("="))
            if not sign or key in names:
                raise WorkloadError(f'columns of a trace are named as {_FORM}, not "{text}"')
            names[key] = column
        return cls.of(names)

    @property
    def names(self) -> list[str]:
        """All columns that mean something here; a file must have the first three."""
        given = (self.arrival, self.input, self.output, self.blocks, self.block_tokens)
        return [each for each in given if isinstance(each, str)]

    @property
    def units(self) -> str:
        """How the numbers are read, for people."""
        unit = {1.0: "s", 1e-3: "ms", 1e-9: "ns"}[self.unit_s]
        return f"{self.title}: {self.arrival} as date and time, or in {unit}"

    def batches(self, path: Path) -> Iterator[Batch]:
        """The rows of a file with these columns.

        Raises:
            WorkloadError: the file can't be read, or lacks one of them.
        """
        if not _is_csv(path):
            yield from json_batches(path, self.names)
            return
        rows = csv_batches(path)
        header = next(rows)
        if missing := [column for column in self.names[:3] if column not in header.cells]:
            text = f"the header has no {', '.join(missing)}; it has {', '.join(header.cells)}"
            raise header.bad(
                0, text if len(header.cells) > 1 else f"{text}; cells must be separated by commas"
            )
        yield from rows


FORMATS: Mapping[str, TraceColumns] = {
    name: TraceColumns(**columns)
    for name, columns in json.loads(
        (resources.files(__package__) / "data" / "formats.json").read_bytes()
    ).items()
}
"""Published formats by their names in `TraceFormat`, but for ServeGen's; the file names their sources."""


def _is_csv(path: Path) -> bool:
    name = path.name.lower().removesuffix(".gz")
    return not name.endswith((".json", ".jsonl"))


def guess_format(path: Path) -> TraceFormat:
    """The format of a trace, from its file's name and its header or first line.

    Raises:
        WorkloadError: it is none of those that are known, or the file can't be read.
    """
    if not path.exists():
        raise WorkloadError(f"{path}: there is no such trace")
    name = path.name.lower()
    if name.endswith((".tar.gz", ".tgz", ".tar")):
        return "servegen"
    if not name.removesuffix(".gz").endswith((".csv", ".json", ".jsonl")):
        formats = ", ".join(get_args(TraceFormat))
        raise WorkloadError(f"{path}: its name doesn't say what format it has; give one of {formats}")
    found = next(csv_batches(path) if _is_csv(path) else json_batches(path, _ALL_NAMES, 1), None)
    if found is None:
        raise WorkloadError(f"{path}: has no request with a prompt")
    has = {key for key, cells in found.cells.items() if not len(cells) or cells[0] is not None}
    if "hash_ids" in has:
        # Both have the same fields but for these.
        return "qwen" if {"chat_id", "turn"} & has else "mooncake"
    for form, columns in FORMATS.items():
        if set(columns.names[:3]) <= has:
            return cast("TraceFormat", form)
    known = "; ".join(f"{columns.title} ({', '.join(columns.names[:3])})" for columns in FORMATS.values())
    raise bad_line(
        str(path),
        found.lines[0],
        f"has {', '.join(sorted(has)) or 'nothing':.200}, which is no format that is known: {known}; name its columns: "
        f"{_FORM}",
    )


_ALL_NAMES = list(dict.fromkeys(name for columns in FORMATS.values() for name in columns.names))
