"""A recorded trace, planned for on a deployment."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import PlanProblem, best_operation, problem_of, problem_of_trace, range_tokens
from prfaas.core.workload.arrivals import Arrivals, Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.requests import RequestTrace, read_requests
from prfaas.core.workload.trace_columns import TraceColumns
from prfaas.core.workload.traffic import IndependentTraffic, ReplayedTraffic, Traffic
from prfaas.lab.simulator.prefix_caches import CacheOptions

CACHE_BYTES = 64 << 30
"""Of every instance for its prefix cache, where a trace is simulated and nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace, and what the planner finds for it on a deployment."""

    trace: RequestTrace
    range_tokens: tuple[float, float]
    """Lengths that all profiles cover."""
    lambda_max_rps: float
    """Of the trace's lengths with nothing cached."""
    lambda_max_cached_rps: float
    """Behind a prefix cache that forgets nothing."""

    @classmethod
    def of(cls, deployment: PlannedDeployment, problem: PlanProblem, trace: RequestTrace) -> "Recording":
        """Plan for a trace; `problem` is the deployment's own."""
        covered = range_tokens(deployment)
        plain = best_operation(problem_of_trace(problem, trace, covered[0])).lambda_max
        cached = plain
        if trace.block_ids is not None:
            behind = problem_of_trace(problem, trace, covered[0], trace.uncached_tokens())
            cached = best_operation(behind).lambda_max
        return cls(trace, covered, plain, cached)


def caches_for(
    deployment: PlannedDeployment, num_bytes: int | None, *, has_trace: bool
) -> CacheOptions | None:
    """Prefix caches of so much memory on every instance; None: `CACHE_BYTES` with a trace, no caches without."""
    kept = (CACHE_BYTES if has_trace else 0) if num_bytes is None else num_bytes
    return CacheOptions.of_memory(deployment.kv_model, kept) if kept else None


def traffic_for(
    deployment: PlannedDeployment,
    load: float | None,
    requests_per_s: float | None,
    trace: Path | str | None,
    columns: Mapping[str, str] | None,
    form: str | None = None,
    arrivals_at: Callable[[float], Arrivals] | None = None,
) -> Traffic:
    """A trace or made-up prompts, at a rate, or at a load (0.7) of what the planner finds for them.

    `arrivals_at`: those of made-up prompts at a mean rate; None: Poisson.

    Raises:
        ValueError: both a load and a rate, a rate of 0 or less, or a trace that is to have other arrivals.
        WorkloadError: a trace that can't be read.
    """
    if load is not None and requests_per_s is not None:
        raise ValueError("give a load or requests_per_s, not both")
    problem = problem_of(deployment)
    named = None if columns is None else TraceColumns.of(columns)
    recorded = None if trace is None else read_requests(Path(trace), form, named)
    recording = None if recorded is None else Recording.of(deployment, problem, recorded)
    rate = requests_per_s
    if rate is None:
        most_rps = best_operation(problem).lambda_max if recording is None else recording.lambda_max_rps
        rate = (0.7 if load is None else load) * most_rps
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"requests must arrive at a rate above 0, not {rate:g} per second")
    if recording is not None:
        if arrivals_at is not None:
            raise ValueError("bursts, day and night are of made-up arrivals; a trace has its own")
        return ReplayedTraffic.at_rate(recording.trace, rate)
    workload = problem.workload
    return IndependentTraffic(
        (arrivals_at or Poisson)(rate), workload.uncached, fixed(workload.output_tokens)
    )
