"""Runs of these studies: with tails, with TTFT by classes of lengths, and with the course of a day."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas.core.arrays import FloatArray
from prfaas.core.planner import best_operation, problem_of_trace
from prfaas.lab.simulator.result import Result
from prfaas.lab.studies.context import StudyContext
from prfaas.lab.studies.study import Run as PlainRun
from prfaas.lab.studies.study import StudyOutcome

_LONG_TOKENS, _LONGEST_TOKENS = 32_768.0, 100_000.0


@dataclass(frozen=True, slots=True)
class LengthClasses:
    """Classes of prompts by their length, the same for all that is compared."""

    edges_tokens: tuple[float, ...]
    """Each is the longest prompt of its class, growing; one class more has all that are longer."""

    @property
    def labels(self) -> tuple[str, ...]:
        """A name per class: "≤ 19.4K", "19.4K–32.8K", "> 32.8K"."""
        edges = [f"{edge / 1000:.3g}K" for edge in self.edges_tokens]
        if not edges:
            return ("all",)
        between = (f"{low}–{high}" for low, high in pairwise(edges))
        return (f"≤ {edges[0]}", *between, f"> {edges[-1]}")

    def of(self, tokens: NDArray[Any]) -> NDArray[np.int64]:
        """The number of each length's class, from 0."""
        return np.searchsorted(np.array(self.edges_tokens), tokens, side="left").astype(np.int64)


def length_classes(context: StudyContext) -> LengthClasses:
    """Up to the plan's threshold, from there to 32,768 tokens, to 100,000, and longer."""
    low, high = context.range_tokens
    edges = {_LONG_TOKENS, _LONGEST_TOKENS}
    if context.optimum.threshold_tokens is not None:
        edges.add(context.optimum.threshold_tokens)
    return LengthClasses(tuple(sorted(edge for edge in edges if low < edge < high)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(PlainRun):
    """A run that tells the P99.9 of the TTFT, too."""

    classes: LengthClasses | None = None
    """Classes of prompts with a TTFT of their own; None: none."""
    course_parts: int = 0
    """Into how many equal parts of the counted time `course` is cut; 0: there is none."""

    def numbers(self, result: Result) -> dict[str, Any]:
        """The summary with `ttft_p999_s`; `ttft_by_length`, an entry per class; and `course`.

        `course` has by name a value per part of the counted time: `at_s` (its middle), `ttft_s` (mean of what arrived
        then), and thresholds and roles.
        """
        numbers = PlainRun.numbers(self, result)
        numbers["ttft_p999_s"] = _quantile(result.ttft_s[result.counted], 0.999)
        if self.classes is not None:
            numbers["ttft_by_length"] = _by_length(result, self.classes)
        if self.course_parts:
            numbers["course"] = _course(result, self.course_parts)
        return numbers


def of_class(outcome: StudyOutcome, index: int, name: str) -> float:
    """A number of one class of lengths (`mean_s`, `p90_s`, `p99_s`, `requests`); NaN where there is none."""
    value = outcome.numbers["ttft_by_length"][index][name]
    return float("nan") if value is None else float(value)


def trace_name(context: StudyContext) -> str:
    """The trace's file, without folders."""
    return Path(context.trace.name).name


def trace_lambda_max(context: StudyContext) -> float:
    """Λ_max that the planner finds for the trace's lengths, if nothing is cached; requests per second."""
    return best_operation(
        problem_of_trace(context.problem, context.trace, context.range_tokens[0])
    ).lambda_max


def _quantile(values: FloatArray, share: float) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, share)) if len(known) else None


def _by_length(result: Result, classes: LengthClasses) -> list[dict[str, float | None]]:
    found = classes.of(result.input_tokens)
    groups = [
        result.ttft_s[result.counted & (found == number) & ~np.isnan(result.ttft_s)]
        for number in range(len(classes.labels))
    ]
    return [
        {
            "requests": len(group),
            "mean_s": float(group.mean()) if len(group) else None,
            "p90_s": _quantile(group, 0.9),
            "p99_s": _quantile(group, 0.99),
        }
        for group in groups
    ]


def _course(result: Result, parts: int) -> dict[str, list[float | None]]:
    edges = np.linspace(result.start_s, result.end_s, parts + 1)
    groups = np.split(result.ttft_s, np.searchsorted(result.arrival_s, edges))[1:-1]
    course = {
        "at_s": _plain((edges[:-1] + edges[1:]) / 2 - result.start_s),
        "ttft_s": _plain(np.array([group.mean() if len(group) else np.nan for group in groups])),
    }
    time_s = result.series["time_s"]
    latest = np.clip(np.searchsorted(time_s, (edges[:-1] + edges[1:]) / 2, side="right") - 1, 0, None)
    for name, values in result.series.items():
        if name.startswith(("threshold_tokens_", "prefill_instances_")):
            course[name] = _plain(values[latest])
    return course


def _plain(values: FloatArray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
