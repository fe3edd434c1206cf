"""Traffic of a simulation: made up, or a recorded trace that is planned for on a deployment."""

from dataclasses import dataclass

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import PlanProblem, best_operation, problem_of, problem_of_trace, range_tokens
from prfaas.core.workload.arrivals import arrivals_at
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import WorkloadError
from prfaas.core.workload.requests import RequestTrace
from prfaas.core.workload.traffic import IndependentTraffic, ReplayedTraffic
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


@dataclass(frozen=True, slots=True)
class Arriving:
    """What arrives at a deployment: made-up prompts of its file's lengths, or a recorded trace."""

    problem: PlanProblem
    recording: Recording | None = None

    @classmethod
    def of(cls, deployment: PlannedDeployment, trace: RequestTrace | None) -> "Arriving":
        """`trace`: None: made-up prompts."""
        problem = problem_of(deployment)
        return cls(problem, None if trace is None else Recording.of(deployment, problem, trace))

    @property
    def lambda_max_rps(self) -> float:
        """The highest throughput that the planner finds for it, of which a load is a share."""
        recording = self.recording
        return best_operation(self.problem).lambda_max if recording is None else recording.lambda_max_rps

    def at_rate(
        self, rate_rps: float, *, bursts: bool = False, diurnal: tuple[float, float] | None = None
    ) -> IndependentTraffic | ReplayedTraffic:
        """The traffic at a mean rate; made-up requests come as `arrivals_at` has them.

        Raises:
            WorkloadError: as `arrivals_at`, a trace that is to have other arrivals, or one without a rate.
        """
        if self.recording is None:
            workload = self.problem.workload
            arrivals = arrivals_at(rate_rps, bursts=bursts, diurnal=diurnal)
            return IndependentTraffic(arrivals, workload.uncached, fixed(workload.output_tokens))
        if bursts or diurnal is not None:
            raise WorkloadError("bursts, day and night are of made-up arrivals; a trace has its own")
        return ReplayedTraffic.at_rate(self.recording.trace, rate_rps)
