"""Traces as a planner reads them: how long prompts and answers are.

ServeGen's published workloads have no single requests: they are archives of rates and length distributions per client
and window of time. Of all other formats see `requests`.
"""

import json
import math
import re
import tarfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.workload.csv_traces import CsvColumns
from prfaas.core.workload.empirical import Empirical
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import TraceFormat, guess_format, read_requests
from prfaas.core.workload.trace import bad_line


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths of recorded traffic."""

    lengths: Empirical
    """Whole prompts; empty ones don't count."""
    uncached: Empirical
    """What an endless prefix cache leaves of them; all of it where the trace doesn't say which begin alike."""
    output_tokens: float
    """The mean length of answers."""


_MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)")
_KEY = re.compile(r"(\d{1,9})\s*:")
_MOST_BYTES = 1 << 30

Histogram = dict[int, float]
"""Probability by tokens."""


def read_servegen(path: Path) -> Trace:
    """A .tar.gz of chunk-N-trace.csv (window start in s, requests/s, CV, family, two parameters) and
    chunk-N-dataset.json (window start → {"input_tokens": "{tokens: probability}", "output_tokens": …}).

    Lengths of all clients and windows are mixed in proportion to their requests. Clients without a dataset, and windows
    with requests but without lengths, are passed over.

    Raises:
        WorkloadError: an archive, file or line that isn't that, with its number.
    """
    members = _members(path)
    inputs: Histogram = defaultdict(float)
    outputs: Histogram = defaultdict(float)
    requests = 0.0
    for number in sorted({number for number, _ in members}):
        trace, dataset = members.get((number, "trace.csv")), members.get((number, "dataset.json"))
        if trace is None or dataset is None:
            continue
        windows = _windows(f"{path}!chunk-{number}-trace.csv", trace)
        starts, lengths = _lengths(f"{path}!chunk-{number}-dataset.json", dataset)
        for index, count in _requests_by_window(windows, starts).items():
            prompt, answer = lengths[index] if index >= 0 else ({}, {})
            if not prompt or not answer:
                continue
            requests += count
            for tokens, share in prompt.items():
                inputs[tokens] += count * share
            for tokens, share in answer.items():
                outputs[tokens] += count * share
    prompts = {tokens: weight for tokens, weight in inputs.items() if tokens > 0 and weight > 0}
    if not prompts or requests <= 0:
        raise WorkloadError(f"{path}: has no client with requests and lengths")
    found = Empirical(prompts.keys(), prompts.values())
    mean = sum(tokens * weight for tokens, weight in outputs.items()) / sum(outputs.values())
    return Trace(lengths=found, uncached=found, output_tokens=mean)


def _members(path: Path) -> dict[tuple[int, str], str]:
    found = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                match = _MEMBER.fullmatch(Path(member.name).name)
                if match is None or not member.isfile():
                    continue
                if member.size > _MOST_BYTES:
                    raise WorkloadError(f"{path}!{member.name}: is larger than 1 GiB")
                file = archive.extractfile(member)
                assert file is not None
                found[int(match[1]), match[2]] = file.read().decode("utf-8")
    except FileNotFoundError:
        raise WorkloadError(f"{path}: there is no such trace") from None
    except (OSError, EOFError, tarfile.TarError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: can't be read as a ServeGen archive ({error})") from error
    if not found:
        raise WorkloadError(f"{path}: has no chunk-N-trace.csv and chunk-N-dataset.json")
    return found


def _windows(where: str, text: str) -> list[tuple[float, float, float]]:
    """(start, end, requests per second); the last window is as long as the one before it."""
    starts: list[float] = []
    rates: list[float] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        cells = line.split(",")
        try:
            start, rate = float(cells[0]), float(cells[1])
        except (ValueError, IndexError):
            raise bad_line(
                where, number, "must begin with a window's start in s and its requests/s"
            ) from None
        if not (math.isfinite(start) and math.isfinite(rate) and rate >= 0):
            raise bad_line(where, number, "the window's start and rate must be finite, the rate 0 or more")
        if starts and start <= starts[-1]:
            raise bad_line(where, number, f"window {start:g} must start after the one before, {starts[-1]:g}")
        starts.append(start)
        rates.append(rate)
    if not starts:
        return []
    last = starts[-1] - starts[-2] if len(starts) > 1 else 1.0
    return list(zip(starts, [*starts[1:], starts[-1] + last], rates, strict=True))


def _requests_by_window(windows: list[tuple[float, float, float]], starts: list[float]) -> dict[int, float]:
    """Requests by index of the dataset's window that their time is in, -1 before the first."""
    counts: dict[int, float] = defaultdict(float)
    for start_s, end_s, rate in windows:
        if rate > 0:
            counts[bisect_right(starts, start_s) - 1] += rate * (end_s - start_s)
    return counts


def _lengths(where: str, text: str) -> tuple[list[float], list[tuple[Histogram, Histogram]]]:
    """Window starts, ascending, and the distributions of prompts and answers from there on."""
    try:
        windows = json.loads(text)
    except (ValueError, RecursionError):
        raise WorkloadError(f"{where}: is not JSON") from None
    if not isinstance(windows, dict):
        raise WorkloadError(f"{where}: must be a JSON object by window start")
    rows = []
    for start, window in windows.items():
        if not re.fullmatch(r"\d{1,12}", start) or not isinstance(window, dict):
            raise WorkloadError(f'{where}: "{start[:40]}" must be a window\'s start in s with an object')
        prompts, answers = (
            _histogram(where, start, window, f"{side}_tokens") for side in ("input", "output")
        )
        rows.append((float(start), (prompts, answers)))
    rows.sort(key=lambda row: row[0])
    return [start for start, _ in rows], [pair for _, pair in rows]


def _histogram(where: str, start: str, window: Mapping[str, object], field: str) -> Histogram:
    text = window.get(field)
    problem = f'{where}: window {start}: {field} must be a text like "{{12: 0.5, 40: 0.5}}"'
    if not isinstance(text, str) or not (text.startswith("{") and text.endswith("}")):
        raise WorkloadError(problem)
    try:
        # JSON but for the keys, which are bare numbers; twice the same one would be lost, so pairs are kept.
        pairs = json.loads(_KEY.sub(r'"\1":', text), object_pairs_hook=list)
    except (ValueError, RecursionError):
        raise WorkloadError(problem) from None
    found: Histogram = {}
    for key, share in pairs:
        if not (key.isdecimal() and isinstance(share, int | float) and math.isfinite(share) and share >= 0):
            raise WorkloadError(f'{problem}; not "{key[:20]}: {share!r:.20}"')
        found[int(key)] = found.get(int(key), 0.0) + share
    total = sum(found.values())
    return {tokens: share / total for tokens, share in found.items()} if total > 0 else {}


def read_trace(path: Path, form: TraceFormat | None = None, columns: CsvColumns | None = None) -> Trace:
    """The lengths of the trace in a file. Arguments and errors as those of `read_requests`."""
    if columns is None and (form or guess_format(path)) == "servegen":
        return read_servegen(path)
    trace = read_requests(path, form, columns)
    return Trace(
        lengths=Empirical(each.input_tokens for each in trace.requests),
        uncached=Empirical(trace.uncached_tokens()),
        output_tokens=sum(each.output_tokens for each in trace.requests) / len(trace.requests),
    )
