"""The context that all studies of one call share: the deployment, its plan, and how much to simulate."""

from dataclasses import dataclass, replace

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import (
    OperatingPoint,
    PlanProblem,
    best_operation,
    problem_of,
    range_tokens,
)
from prfaas.core.workload.arrivals import Arrivals, Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import LengthDistribution
from prfaas.core.workload.requests import RequestTrace
from prfaas.core.workload.traffic import IndependentTraffic, ReplayedTraffic

# Of `--quick`: enough to see that everything works, too few to believe.
_QUICK_SHARE = 0.05
_QUICK_SEEDS = 2
SEEDS = 5
"""Of whatever is stated with an interval."""


@dataclass(frozen=True, slots=True, eq=False)
class StudyContext:
    """A deployment with one PrfaaS and one PD cluster, and how much to simulate of it.

    Each is equal to itself only: what studies plan for one is kept by it.
    """

    planned: PlannedDeployment
    problem: PlanProblem
    optimum: OperatingPoint
    """The planner's best operation of the deployment."""
    trace: RequestTrace
    """Recorded traffic, for what needs prefixes."""
    seed: int = 0
    """The first of the seeds."""
    is_quick: bool = False
    """Whether a twentieth of the requests is enough: only to see that it works."""

    @property
    def lambda_max(self) -> float:
        """Requests per second at most, by the planner."""
        return self.optimum.lambda_max

    @property
    def pd(self) -> str:
        """The name of the PD cluster."""
        return self.problem.pd[0].name

    @property
    def range_tokens(self) -> tuple[float, float]:
        """The lengths that every profile covers."""
        return range_tokens(self.planned)

    def requests(self, count: int) -> int:
        """How many to simulate where a whole study has `count`."""
        return max(int(count * _QUICK_SHARE), 50) if self.is_quick else count

    def seeds(self, count: int = SEEDS) -> range:
        """The seeds of repeats, from its own on; fewer if it is quick."""
        return range(self.seed, self.seed + (min(count, _QUICK_SEEDS) if self.is_quick else count))

    def poisson(self, load: float) -> IndependentTraffic:
        """The file's lengths at a share of Λ_max."""
        return self.traffic(Poisson(load * self.lambda_max))

    def traffic(self, arrivals: Arrivals, lengths: LengthDistribution | None = None) -> IndependentTraffic:
        """The file's workload (or other lengths), arriving as a process says."""
        workload = self.problem.workload
        return IndependentTraffic(
            arrivals, workload.uncached if lengths is None else lengths, fixed(workload.output_tokens)
        )

    def replayed(self, rate_rps: float) -> ReplayedTraffic:
        """The trace without end, at a mean rate."""
        return ReplayedTraffic.at_rate(self.trace, rate_rps)


def context_of(
    planned: PlannedDeployment, trace: RequestTrace, *, seed: int = 0, is_quick: bool = False
) -> StudyContext:
    """The context of a deployment with one PrfaaS and one PD cluster.

    Raises:
        ValueError: another number of clusters, PD instances too few to divide, or nothing can be served.
        DeploymentError, PlanError: as the planner.
    """
    if len(planned.prfaas_clusters) != 1 or len(planned.pd_clusters) != 1 or len(planned.links) != 1:
        raise ValueError("studies are for one prfaas and one pd cluster with one link between them")
    if planned.pd_clusters[0].instance_count < 2:
        raise ValueError("studies need a pd cluster of two instances or more, to prefill and to decode")
    # Caches and pools are the paper's too, which counts every byte once; those of ranks keep what each has.
    planned = replace(
        planned,
        kv_model=planned.sent_model,
        wire_model=None,
        clusters=tuple(replace(cluster, kv_model=None) for cluster in planned.clusters),
    )
    problem = problem_of(planned)
    optimum = best_operation(problem)
    if optimum.lambda_max <= 0:
        raise ValueError("by `prfaas plan` it can serve nothing")
    return StudyContext(planned, problem, optimum, trace, seed, is_quick=is_quick)
