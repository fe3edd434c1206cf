"""The two sides of the comparison, a deployment with PrfaaS and one without, and the burst that both get."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prfaas.core.deployment import Deployment, PlannedDeployment, load_deployment, load_planned
from prfaas.core.planner import OperatingPoint, best_operation, problem_of
from prfaas.core.workload.arrivals import Poisson
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.requests import TracedRequest
from prfaas.core.workload.traffic import IndependentTraffic, RequestChunk, take

BURST_REQUESTS = 400
"""To each side: at ten times the paper's speed 22 s, and two cores carry both sides."""
_SEED = 0
# Of what the side without PrfaaS can carry: it keeps up, but its queues show.
_LOAD = 0.85


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two deployments, to run and to simulate."""

    deployment: Deployment
    planned: PlannedDeployment

    @classmethod
    def of_file(cls, path: Path) -> "Side":
        """Raises DeploymentError as `load_deployment` and `load_planned` do."""
        return cls(load_deployment(path), load_planned(path))

    @property
    def prefill_instances(self) -> Mapping[str, int]:
        """By PD cluster, as the file gives roles."""
        return {
            cluster.name: sum(instance.has_role("prefill") for instance in cluster.instances)
            for cluster in self.deployment.pd_clusters
        }

    @property
    def speedup(self) -> float:
        """How much faster than in life everything goes."""
        return self.deployment.clusters[0].speedup

    @property
    def fleet(self) -> str:
        """Its machines in words: "4 H200 + 8 H20", by the profiles."""
        return " + ".join(
            f"{cluster.instance_count} {cluster.profile.hardware.upper()}"
            for cluster in self.planned.clusters
        )

    @property
    def operation(self) -> OperatingPoint:
        """How the planner would operate it at full load."""
        return best_operation(problem_of(self.planned))


@dataclass(frozen=True, slots=True)
class Burst:
    """The requests: independent prompts of the file's lengths, arriving by chance, the same every time."""

    traffic: IndependentTraffic
    count: int
    load: float
    """The rate as a share of what the side without PrfaaS can carry."""

    @classmethod
    def of(cls, paying: Side, without: Side, requests: int = BURST_REQUESTS) -> "Burst":
        """`requests` at 0.85 of what `without` can carry, with the lengths that `paying`'s file says."""
        workload = problem_of(paying.planned).workload
        arrivals = Poisson(_LOAD * without.operation.lambda_max)
        traffic = IndependentTraffic(arrivals, workload.lengths, fixed(round(workload.output_tokens)))
        return cls(traffic, requests, _LOAD)

    def chunks(self) -> Iterator[RequestChunk]:
        """The requests and, without end, those that would follow."""
        return self.traffic.chunks(np.random.default_rng(_SEED))

    def requests(self) -> Sequence[TracedRequest]:
        """In the order of arrival, the first one soon after 0 s."""
        return list(take(self.chunks(), limit=self.count))
