"""A running deployment as a planning problem: its instances, links and traffic as they are now."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PdCluster, PlanError, PlanLink, PlanProblem, PrfaasCluster
from prfaas.core.scheduling.view import ClusterKind, InstanceView
from prfaas.core.workload.lengths import LengthDistribution, Workload

if TYPE_CHECKING:
    from prfaas.core.arrays import OfLength


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """One cluster as it is now."""

    name: str
    kind: ClusterKind
    instances: int
    """Healthy ones, whatever their role."""
    curve: ServiceCurve
    decode_batch: float = 0.0
    """Requests that decode together on one instance of a PD cluster: BS_max of Eq. 5. PrfaaS clusters have none."""
    decode_step_s: float = 1.0
    """Seconds of one decode step: T_decode of Eq. 5."""
    group_ranks: int = 1
    """Instances that have their role together, as `group_ranks` finds."""


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What a directed link can carry now."""

    source: str
    target: str
    bandwidth_bits_per_s: float
    """0 when it is down."""
    kv_bytes: "OfLength | None" = None
    """S_kv on it, where that is other than the deployment's."""


def prefill_instances(instances: Iterable[InstanceView]) -> int:
    """Available ones that prefill; those that drain count for the role that they will have."""
    return sum(each.prefills != each.draining and each.available for each in instances)


def group_ranks(instances: Iterable[InstanceView]) -> int:
    """How many instances change their role together; of several sizes of groups what divides them all."""
    return math.gcd(*(len(each.group) or 1 for each in instances)) or 1


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
                decode_batch=cluster.decode_batch,
                decode_step_s=cluster.decode_step_s,
                group_ranks=cluster.group_ranks,
            )
            for cluster in decoders
        ),
        links=tuple(
            PlanLink(link.source, link.target, link.bandwidth_bits_per_s, kv_bytes=link.kv_bytes)
            for link in links
            if link.bandwidth_bits_per_s > 0 and {link.source, link.target} <= names
        ),
        workload=Workload(lengths, output_tokens),
        kv_bytes=kv_bytes,
    )
