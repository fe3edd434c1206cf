"""A recorded trace, made to fit a deployment: cut to what its profiles cover, and planned for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import PlanProblem, best_operation, problem_of, problem_of_trace, range_tokens
from prfaas.core.workload import CsvColumns, RequestTrace, fixed, read_requests
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.traffic import IndependentTraffic, ReplayedTraffic, Traffic

CACHE_BYTES = 64 << 30
"""Of every instance for its prefix cache, where a trace is simulated and nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace that fits a deployment, and what the planner finds for it."""

    trace: RequestTrace
    most_tokens: int
    """No prompt has more."""
    cut: int
    """How many prompts were cut to that."""
    lambda_max_rps: float
    """Of the trace's lengths with nothing cached."""
    lambda_max_cached_rps: float
    """Behind a prefix cache that forgets nothing."""

    @classmethod
    def read(
        cls,
        deployment: PlannedDeployment,
        problem: PlanProblem,
        path: Path,
        columns: CsvColumns | None = None,
    ) -> "Recording":
        """Read a trace and plan for it.

        Args:
            deployment: Whose profiles must cover the prompts.
            problem: The deployment's own.
            path: Of a file in a format that is known, or of a CSV file with these columns.
            columns: What a CSV file's columns are called; None: as its header tells.

        Raises:
            WorkloadError: the trace can't be read.
        """
        lengths = range_tokens(deployment)
        most = int(lengths[1])
        trace = read_requests(path, columns=columns)
        cut = sum(each.input_tokens > most for each in trace.requests)
        trace = trace.cut_to(most)
        plain, cached = (
            best_operation(problem_of_trace(problem, trace, lengths, uncached)).lambda_max
            for uncached in (None, trace.uncached_tokens())
        )
        return cls(trace, most, cut, plain, cached)

    def at_rate(self, rate_rps: float) -> ReplayedTraffic:
        """The trace again and again, its times scaled to a mean rate, arrivals spread over the step of a coarse clock.

        Raises:
            WorkloadError: the trace has no duration and so no rate.
        """
        return ReplayedTraffic.at_rate(self.trace, rate_rps)


def traffic_for(
    deployment: PlannedDeployment,
    load: float | None,
    requests_per_s: float | None,
    trace: Path | str | None,
    columns: Mapping[str, str] | None,
) -> Traffic:
    """A trace or made-up prompts, at a rate, or at a load (0.7) of what the planner finds for them.

    Raises:
        ValueError: both a load and a rate, or a rate of 0 or less.
        WorkloadError: a trace that can't be read.
    """
    if load is not None and requests_per_s is not None:
        raise ValueError("give a load or requests_per_s, not both")
    problem = problem_of(deployment)
    named = None if columns is None else CsvColumns.of(columns)
    recording = None if trace is None else Recording.read(deployment, problem, Path(trace), named)
    rate = requests_per_s
    if rate is None:
        most_rps = best_operation(problem).lambda_max if recording is None else recording.lambda_max_rps
        rate = (0.7 if load is None else load) * most_rps
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"requests must arrive at a rate above 0, not {rate:g} per second")
    if recording is not None:
        return recording.at_rate(rate)
    workload = problem.workload
    return IndependentTraffic(Poisson(rate), workload.uncached, fixed(workload.output_tokens))
