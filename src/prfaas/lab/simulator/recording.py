"""A recorded trace, made to fit a deployment: cut to what its profiles cover, and planned for."""

from dataclasses import dataclass
from pathlib import Path

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import PlanProblem, best_operation, problem_of_trace, range_tokens
from prfaas.core.workload import CsvColumns, RequestTrace, read_requests
from prfaas.core.workload.traffic import ReplayedTraffic

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
            best_operation(problem_of_trace(problem, trace, lengths, are_cached=are_cached)).lambda_max
            for are_cached in (False, True)
        )
        return cls(trace, most, cut, plain, cached)

    def at_rate(self, rate_rps: float) -> ReplayedTraffic:
        """The trace again and again, its times scaled to a mean rate, arrivals spread over the step of a coarse clock.

        Raises:
            WorkloadError: the trace has no duration and so no rate.
        """
        return ReplayedTraffic.at_rate(self.trace, rate_rps)
