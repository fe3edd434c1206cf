"""What all studies of one call share: the deployment, its plan, and how much to simulate."""

from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.deployment import PlannedDeployment
from prfaas.planner import OperatingPoint, PlanProblem, best_operation, problem_of
from prfaas.workload import LengthDistribution, RequestTrace, fixed
from prfaas.workload.traffic import Arrivals, IndependentTraffic, Poisson

# Of `--quick`: enough to see that everything works, too few to believe.
_QUICK_SHARE = 0.05
_QUICK_SEEDS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """`optimum`: the planner's best operation of the deployment. `trace`: recorded traffic for what needs prefixes."""

    planned: PlannedDeployment
    problem: PlanProblem
    optimum: OperatingPoint
    trace: RequestTrace
    seed: int = 0
    is_quick: bool = False

    @property
    def lambda_max(self) -> float:
        """Requests per second at most, by the planner."""
        return self.optimum.lambda_max

    @property
    def trace_name(self) -> str:
        """The trace's file, without folders."""
        return Path(self.trace.name).name

    @property
    def pd(self) -> str:
        """The name of the PD cluster."""
        return self.problem.pd[0].name

    @property
    def range_tokens(self) -> tuple[float, float]:
        """The lengths that every profile covers."""
        ranges = [cluster.profile.range_tokens for cluster in self.planned.clusters]
        return max(low for low, _ in ranges), min(high for _, high in ranges)

    def requests(self, count: int) -> int:
        """How many to simulate where a study in earnest has `count`."""
        return max(int(count * _QUICK_SHARE), 50) if self.is_quick else count

    def seeds(self, count: int) -> range:
        """As many seeds from the setting's own on; fewer if it is quick."""
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


def setting_of(
    planned: PlannedDeployment, trace: RequestTrace, *, seed: int = 0, is_quick: bool = False
) -> Setting:
    """The setting of a deployment with one PrfaaS and one PD cluster.

    Raises:
        ValueError: another number of clusters, PD instances too few to divide, or nothing can be served.
        DeploymentError, PlanError: as the planner.
    """
    if len(planned.prfaas_clusters) != 1 or len(planned.pd_clusters) != 1 or len(planned.links) != 1:
        raise ValueError("studies are for one prfaas and one pd cluster with one link between them")
    if planned.pd_clusters[0].instance_count < 2:
        raise ValueError("studies need a pd cluster of two instances or more, to prefill and to decode")
    problem = problem_of(planned)
    optimum = best_operation(problem)
    if optimum.lambda_max <= 0:
        raise ValueError("by `prfaas plan` it can serve nothing")
    return Setting(planned, problem, optimum, trace, seed, is_quick)


def with_bandwidth(planned: PlannedDeployment, bits_per_s: float) -> PlannedDeployment:
    """The deployment with another link."""
    links = tuple(replace(link, bandwidth_bits_per_s=bits_per_s) for link in planned.links)
    return replace(planned, links=links)


def times(planned: PlannedDeployment, factor: int) -> PlannedDeployment:
    """So many times the instances and the link."""
    return replace(
        planned,
        clusters=tuple(
            replace(cluster, instance_count=cluster.instance_count * factor) for cluster in planned.clusters
        ),
        links=tuple(
            replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s * factor) for link in planned.links
        ),
    )


def pd_only(planned: PlannedDeployment, instances: int) -> PlannedDeployment:
    """Only the PD cluster, with so many instances."""
    pd = replace(planned.pd_clusters[0], instance_count=instances)
    return replace(planned, clusters=(pd,), links=())
