"""ServeGen's published workloads: archives of rates and length distributions per client and window of time."""

import math
import re
import tarfile
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prfaas.core.arrays import FloatArray, Int32Array, np
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.trace import bad_line

_MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)")
_KEY = re.compile(r"(\d{1,9})\s*:")
_MOST_BYTES = 4 << 30

MOST_DRAWN = 1_000_000
_LEAST_CV = 0.01

Histogram = dict[int, float]
"""Probability by tokens."""


def read_servegen(path: Path) -> tuple[FloatArray, Int32Array, Int32Array, str]:
    """A .tar.gz of chunk-N-trace.csv (window start in s, requests/s, CV, family, two parameters) and
    chunk-N-dataset.json (window start → {"input_tokens": "{tokens: probability}", "output_tokens": …}).

    Requests are drawn: in each client's window as many as its rate says, with gaps of a gamma distribution with its CV,
    and lengths of its distributions. Clients without a dataset, and windows with requests but without lengths, are
    passed over. Of more than a million requests every so many-th is drawn. The same file gives the same requests.

    Returns:
        Arrivals in seconds, tokens of prompts and of answers, in no order; and what was drawn, for people.

    Raises:
        WorkloadError: an archive, file or line that isn't that, with its number.
    """
    members = _members(path)
    used: list[tuple[_Window, Histogram, Histogram]] = []
    for number in sorted({number for number, _ in members}):
        trace, dataset = members.get((number, "trace.csv")), members.get((number, "dataset.json"))
        if trace is None or dataset is None:
            continue
        starts, lengths = _lengths(f"{path}!chunk-{number}-dataset.json", dataset)
        for window in _windows(f"{path}!chunk-{number}-trace.csv", trace):
            index = bisect_right(starts, window.start_s) - 1
            prompt, answer = lengths[index] if index >= 0 else ({}, {})
            if window.requests > 0 and prompt and answer:
                used.append((window, prompt, answer))
    requests = sum(window.requests for window, _, _ in used)
    if requests <= 0:
        raise WorkloadError(f"{path}: has no client with requests and lengths")
    every = max(requests / MOST_DRAWN, 1.0)
    rng = np.random.default_rng(0)
    parts = [
        (window.drawn_s(rng, count), _drawn(rng, prompt, count), _drawn(rng, answer, count))
        for window, prompt, answer in used
        if (count := int(window.requests / every + rng.random()))
    ]
    if not parts:
        raise WorkloadError(f"{path}: has no client with requests and lengths")
    arrival_s, prompts, answers = (np.concatenate(each) for each in zip(*parts, strict=True))
    drawn = f"one in {every:,.3g} of {requests:,.0f} requests is drawn" if every > 1 else "requests are drawn"
    return arrival_s, prompts, answers, f"ServeGen's: times in s; {drawn}; no two prompts begin alike"


def _drawn(rng: "np.random.Generator", histogram: Histogram, count: int) -> Int32Array:
    """So many lengths: each as often as its probability says, but for chance of one."""
    tokens = np.array(list(histogram), dtype=np.int32)
    cumulative = np.cumsum(np.array(list(histogram.values())))
    even = (rng.permutation(count) + rng.random()) / count
    picked: Int32Array = tokens[np.searchsorted(cumulative[:-1], even, side="right")]
    return picked


def _members(path: Path) -> dict[tuple[int, str], str]:
    found, left_bytes = {}, _MOST_BYTES
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                match = _MEMBER.fullmatch(Path(member.name).name)
                if match is None or not member.isfile():
                    continue
                left_bytes -= member.size
                if left_bytes < 0:
                    raise WorkloadError(f"{path}: has more than {_MOST_BYTES >> 30} GiB unpacked")
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


@dataclass(frozen=True, slots=True)
class _Window:
    start_s: float
    lasts_s: float
    requests: float
    cv: float
    """Of the gaps: their standard deviation over their mean."""

    def drawn_s(self, rng: "np.random.Generator", count: int) -> FloatArray:
        """So many arrivals in the window."""
        shape = 1 / max(self.cv, _LEAST_CV) ** 2
        gaps = np.cumsum(rng.standard_gamma(shape, count + 1))
        times: FloatArray = self.start_s + self.lasts_s * gaps[:-1] / max(gaps[-1], 1e-300)
        return times


def _windows(where: str, text: str) -> list[_Window]:
    """The last window is as long as the one before it."""
    rows: list[tuple[float, float, float]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        cells = line.split(",")
        try:
            start, rate = float(cells[0]), float(cells[1])
            cv = float(cells[2]) if rate > 0 and len(cells) > 2 else 1.0
        except (ValueError, IndexError):
            raise bad_line(
                where, number, "must begin with a window's start in s, its requests/s and their CV"
            ) from None
        if not (math.isfinite(start) and math.isfinite(rate) and rate >= 0 and 0 <= cv < math.inf):
            raise bad_line(where, number, "the window's start, rate and CV must be finite, both 0 or more")
        if rows and start <= rows[-1][0]:
            raise bad_line(
                where, number, f"window {start:g} must start after the one before, {rows[-1][0]:g}"
            )
        rows.append((start, rate, cv))
    starts = [start for start, _, _ in rows]
    last = starts[-1] - starts[-2] if len(starts) > 1 else 1.0
    ends = [*starts[1:], starts[-1] + last] if starts else []
    return [
        _Window(start, end - start, rate * (end - start), cv)
        for (start, rate, cv), end in zip(rows, ends, strict=True)
    ]


class _Lengths(msgspec.Struct):
    """What a dataset says of a window."""

    input_tokens: str
    output_tokens: str


def _lengths(where: str, text: str) -> tuple[list[float], list[tuple[Histogram, Histogram]]]:
    """Window starts, ascending, and the distributions of prompts and answers from there on."""
    try:
        windows = msgspec.json.decode(text, type=dict[int, _Lengths])
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where}: is not what ServeGen writes ({error})") from None
    starts = sorted(windows)
    pairs = [
        (_histogram(where, start, each.input_tokens), _histogram(where, start, each.output_tokens))
        for start, each in sorted(windows.items())
    ]
    return [float(start) for start in starts], pairs


def _histogram(where: str, start: int, text: str) -> Histogram:
    try:
        # JSON but for the keys, which are bare numbers.
        found = msgspec.json.decode(_KEY.sub(r'"\1":', text), type=dict[int, float])
    except (ValueError, RecursionError):
        found = {0: -1.0}
    if min(found.values(), default=0.0) < 0 or min(found, default=0) < 0:
        raise WorkloadError(
            f'{where}: window {start}: must have texts like "{{12: 0.5, 40: 0.5}}", not {text:.40}'
        )
    total = sum(found.values())
    return {tokens: share / total for tokens, share in found.items()} if total > 0 else {}
