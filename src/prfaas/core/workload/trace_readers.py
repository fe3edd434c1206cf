"""Traces in any of the formats that `TraceFormat` names.

Mooncake's and our own have one JSON object per line. Azure's and BurstGPT's are CSV files, see `csv_traces`.
ServeGen's published workloads are archives of rates and length distributions per client and window of time, without
single requests.
"""

import json
import math
import re
import tarfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

from prfaas.core.workload.csv_traces import CsvColumns, csv_format, read_azure, read_burstgpt, read_csv
from prfaas.core.workload.empirical import Empirical
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.trace import (
    EndlessCache,
    Trace,
    TraceRequest,
    bad_line,
    block_ids_of,
    lines_of,
    objects_of,
    seconds_of,
    tokens_of,
)

MOONCAKE_BLOCK_TOKENS = 512
MS_PER_S = 1000.0


def read_mooncake(path: Path) -> Trace:
    """Mooncake's format (FAST'25 release): timestamp in ms, input_length, output_length and hash_ids, one per
    block of 512 tokens, each standing for its block and all before it.

    Raises:
        WorkloadError: a file or line that isn't that, with its number.
    """
    cache = EndlessCache()
    requests = []
    for where, row in objects_of(path):
        prompt = tokens_of(where, row, "input_length")
        blocks = block_ids_of(where, row, "hash_ids")
        requests.append(
            TraceRequest(
                arrival_s=seconds_of(where, row, "timestamp") / MS_PER_S,
                input_tokens=prompt,
                output_tokens=tokens_of(where, row, "output_length"),
                cached_tokens=min(cache.known_blocks(blocks) * MOONCAKE_BLOCK_TOKENS, prompt),
            )
        )
    return Trace.of(str(path), tuple(requests))


def read_jsonl(path: Path) -> Trace:
    """Our own format: arrival_s, input_tokens, output_tokens, and cached_tokens if it is known.

    Raises:
        WorkloadError: a file or line that isn't that, with its number.
    """
    requests = []
    for where, row in objects_of(path):
        prompt = tokens_of(where, row, "input_tokens")
        cached = tokens_of(where, row, "cached_tokens") if "cached_tokens" in row else None
        if cached is not None and cached > prompt:
            raise bad_line(*where, f"cached_tokens ({cached}) can't be more than input_tokens ({prompt})")
        requests.append(
            TraceRequest(
                seconds_of(where, row, "arrival_s"), prompt, tokens_of(where, row, "output_tokens"), cached
            )
        )
    return Trace.of(str(path), tuple(requests))


_MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)")
_KEY = re.compile(r"(\d{1,9})\s*:")
_MOST_BYTES = 1 << 30

Histogram = dict[int, float]
"""Probability by tokens."""


def read_servegen(path: Path) -> Trace:
    """A .tar.gz of chunk-N-trace.csv (window start in s, requests/s, CV, family, two parameters) and
    chunk-N-dataset.json (window start → {"input_tokens": "{tokens: probability}", "output_tokens": …}).

    Lengths of all clients and windows are mixed in proportion to their requests, and the rate is the mean over
    the windows. Clients without a dataset, and windows with requests but without lengths, are `skipped`.

    Raises:
        WorkloadError: an archive, file or line that isn't that, with its number.
    """
    members = _members(path)
    numbers = sorted({number for number, _ in members})
    inputs: Histogram = defaultdict(float)
    outputs: Histogram = defaultdict(float)
    requests = 0.0
    span_s = 0.0
    skipped = []
    for number in numbers:
        trace, dataset = members.get((number, "trace.csv")), members.get((number, "dataset.json"))
        name = f"{path}!chunk-{number}"
        if trace is None or dataset is None:
            skipped.append(f"client {number} has no {'trace' if trace is None else 'dataset'}")
            continue
        windows = _windows(f"{name}-trace.csv", trace)
        lengths = _lengths(f"{name}-dataset.json", dataset)
        span_s = max(span_s, max((end for _, end, _ in windows), default=0.0))
        without = 0.0
        for index, count in _requests_by_window(windows, lengths[0]).items():
            prompt, answer = lengths[1][index] if index >= 0 else ({}, {})
            if not prompt or not answer:
                without += count
                continue
            requests += count
            for tokens, share in prompt.items():
                inputs[tokens] += count * share
            for tokens, share in answer.items():
                outputs[tokens] += count * share
        if without:
            skipped.append(f"client {number} has about {without:.0f} requests without lengths")
    prompts = {tokens: weight for tokens, weight in inputs.items() if tokens > 0 and weight > 0}
    if not prompts or requests <= 0:
        raise WorkloadError(f"{path}: has no client with requests and lengths")
    return Trace(
        name=str(path),
        lengths=Empirical(prompts.keys(), prompts.values()),
        uncached=None,
        output_tokens=sum(tokens * weight for tokens, weight in outputs.items()) / sum(outputs.values()),
        requests_per_s=requests / span_s if span_s > 0 else 0.0,
        skipped=tuple(skipped),
    )


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


TraceFormat = Literal["mooncake", "azure", "burstgpt", "servegen", "jsonl"]

_READERS: dict[TraceFormat, Callable[[Path], Trace]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "servegen": read_servegen,
    "jsonl": read_jsonl,
}


def read_trace(path: Path, form: TraceFormat | None = None, columns: CsvColumns | None = None) -> Trace:
    """The trace in a file.

    Args:
        path: Of the file.
        form: Without it and without columns: .tar.gz and .tgz are ServeGen's, of .csv the header tells, and of
            .jsonl the first line's fields (.csv.gz and .jsonl.gz too).
        columns: Of a CSV file, whatever its header; a format can't be given with them.

    Raises:
        WorkloadError: no such file, another format, or a malformed line, which is named.
    """
    if columns is not None:
        check_no_format(path, form)
        return read_csv(path, columns)
    return _READERS[form or guess_format(path)](path)


def check_no_format(path: Path, form: TraceFormat | None) -> None:
    """Raise WorkloadError if a format is given besides the columns of a CSV file."""
    if form is not None:
        raise WorkloadError(f"{path}: columns are named of a CSV file; leave out the format {form}")


def guess_format(path: Path) -> TraceFormat:
    """The format of a trace, from its file's name or first line.

    Raises:
        WorkloadError: nothing, or the file can't be read.
    """
    name = path.name.lower()
    if name.endswith((".tar.gz", ".tgz", ".tar")):
        return "servegen"
    if name.endswith((".csv", ".csv.gz")):
        return csv_format(path)
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
