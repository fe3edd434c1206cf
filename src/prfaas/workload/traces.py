"""A trace in any of the formats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from prfaas.workload.azure import read_azure
from prfaas.workload.errors import WorkloadError
from prfaas.workload.json_traces import read_jsonl, read_mooncake
from prfaas.workload.lines import lines_of
from prfaas.workload.servegen import read_servegen
from prfaas.workload.trace import Trace

TraceFormat = Literal["mooncake", "azure", "servegen", "jsonl"]

_READERS: dict[TraceFormat, Callable[[Path], Trace]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "servegen": read_servegen,
    "jsonl": read_jsonl,
}


def read_trace(path: Path, form: TraceFormat | None = None) -> Trace:
    """The trace in a file. Without a format: .csv is Azure's, .tar.gz and .tgz ServeGen's, and of .jsonl (or
    .jsonl.gz) the first line's fields tell.

    Raises:
        WorkloadError: no such file, another format, or a malformed line, which is named.
    """
    return _READERS[form or guess_format(path)](path)


def guess_format(path: Path) -> TraceFormat:
    """What a file's name, or its first line, says about its format.

    Raises:
        WorkloadError: nothing, or the file can't be read.
    """
    name = path.name.lower()
    if name.endswith((".tar.gz", ".tgz", ".tar")):
        return "servegen"
    if name.endswith((".csv", ".csv.gz")):
        return "azure"
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
