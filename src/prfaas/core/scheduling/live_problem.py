"""A planning problem from what a running deployment knows of itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PdCluster, PlanError, PlanLink, PlanProblem, PrfaasCluster
from prfaas.core.scheduling.view import ClusterKind
from prfaas.core.workload import LengthDistribution, Workload

if TYPE_CHECKING:
    from prfaas.core.planner.problem import OfLength


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """One cluster as it is now.

    `instances`: the healthy ones, whatever their role. `decode_batch` requests decode together on one instance of a
    PD cluster in steps of `decode_step_s`: BS_max and T_decode of Eq. 5; PrfaaS clusters have none.
    """

    name: str
    kind: ClusterKind
    instances: int
    curve: ServiceCurve
    decode_batch: float = 0.0
    decode_step_s: float = 1.0


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What a directed link can carry now; 0 when it is down."""

    source: str
    target: str
    bandwidth_bits_per_s: float


def problem_now(
    clusters: Iterable[ClusterFacts],
    links: Iterable[LinkFacts],
    lengths: LengthDistribution,
    output_tokens: float,
    kv_bytes: "OfLength",
) -> PlanProblem:
    """The problem that the present instances, links and traffic pose.

    `lengths` are uncached lengths, so nothing of them is found in a cache (hit ratio 0); `kv_bytes` is S_kv for
    arrays of tokens. Clusters without a healthy instance and links that carry nothing, or lead nowhere, are left out.
    Curves are taken as they are now: the problem may be solved in another thread.

    Raises:
        PlanError: no PD cluster has a healthy instance.
        WorkloadError: `output_tokens` is not above 0.
    """
    there = [cluster for cluster in clusters if cluster.instances > 0]
    names = {cluster.name for cluster in there}
    decoders = [cluster for cluster in there if cluster.kind == "pd"]
    if not decoders:
        raise PlanError("no PD cluster has a healthy instance")
    return PlanProblem(
        name="now",
        prfaas=tuple(
            PrfaasCluster(cluster.name, cluster.name, cluster.instances, 1, cluster.curve.at_rest())
            for cluster in there
            if cluster.kind == "prfaas"
        ),
        pd=tuple(
            PdCluster(
                cluster.name,
                cluster.name,
                cluster.instances,
                1,
                cluster.curve.at_rest(),
                cluster.decode_batch,
                cluster.decode_step_s,
            )
            for cluster in decoders
        ),
        links=tuple(
            PlanLink(link.source, link.target, link.bandwidth_bits_per_s)
            for link in links
            if link.bandwidth_bits_per_s > 0 and {link.source, link.target} <= names
        ),
        workload=Workload(lengths, output_tokens),
        kv_bytes=kv_bytes,
    )
