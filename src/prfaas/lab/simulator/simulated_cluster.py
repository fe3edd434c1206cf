"""The instances of one cluster as they are simulated, from what the planner knows of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from prfaas.core.deployment import PlannedCluster
from prfaas.core.kv import KvModel
from prfaas.core.latency import LatencyProfile
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PlanProblem


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Equal instances that share a network."""

    name: str
    kind: Literal["prfaas", "pd"]
    instances: int
    prefill_instances: int
    """How many prefill at first, while the others decode; all in a "prfaas" cluster."""
    curve: ServiceCurve
    """Seconds of a prefill over uncached tokens."""
    decode_step_s: Callable[[int], float] | None = None
    """Seconds of a decode step over the batch; None where nothing decodes."""
    decode_slots: int = 1
    """Requests that decode together on one instance; the others wait."""
    chunk_tokens: int = 0
    """Of a prefill step: what a prompt leaves of its last steps is filled up with the next one that waits at the same
    instance; 0: it is not."""
    kv_block_tokens: int = 0
    """Of a block of the KVCache: where a model has linear states, a step ends at a prompt's last full block."""
    mixed_tokens: int = 0
    """Of a prompt that an instance computes in each step of its answers; 0: answers go on undisturbed."""
    context_s: float = 0.0
    """Seconds that a decode step takes longer per token of context in its batch."""
    measured_context_tokens: float = 0.0
    """The context per request at which `decode_step_s` holds."""
    instance_price_per_hour: float = 0.0
    """In the currency of the deployment's prices; 0 where it has none."""
    kills_per_hour: float = 0.0
    """How often policies expect that an instance is taken away; the failures themselves are the scenario's."""
    kv_model: KvModel | None = None
    """What it holds of a request's KVCache, where that is less than the scenario's `kv_model`."""
    group_ranks: int = 1
    """Instances that fail and change their role together: ranks of a data-parallel group."""


def cluster_of(cluster: PlannedCluster, prefill: Mapping[str, int], problem: PlanProblem) -> SimulatedCluster:
    """The instances of a deployment's cluster.

    Args:
        cluster: As the file describes it.
        prefill: How many prefill at first, by PD cluster.
        problem: What the planner makes of the file: it has the decode batches.

    Raises:
        ValueError: more prefill instances than there are, or not the whole of a group.
    """
    curve = ServiceCurve.of_profile(cluster.profile)
    if cluster.kind == "prfaas":
        count = cluster.instance_count
        return SimulatedCluster(cluster.name, "prfaas", count, count, curve, group_ranks=cluster.group_ranks)
    if not 0 <= prefill[cluster.name] < cluster.instance_count:
        raise ValueError(
            f'cluster "{cluster.name}" has {cluster.instance_count} instances: 0 to {cluster.instance_count - 1} of '
            f"them can prefill, not {prefill[cluster.name]}"
        )
    if prefill[cluster.name] % cluster.group_ranks:
        raise ValueError(
            f'cluster "{cluster.name}" has groups of {cluster.group_ranks} instances: {prefill[cluster.name]} that '
            "prefill are not whole groups"
        )
    slots = next(int(pd.decode_batch) for pd in problem.pd if pd.name == cluster.name)
    return SimulatedCluster(
        cluster.name,
        "pd",
        cluster.instance_count,
        prefill[cluster.name],
        curve,
        decode_step_s=_decode_step_of(cluster.profile),
        decode_slots=slots,
        group_ranks=cluster.group_ranks,
    )


def _decode_step_of(profile: LatencyProfile) -> Callable[[int], float]:
    """Seconds over the batch; beyond what was measured as at the nearest end."""
    low, high = profile.range_batch
    return lambda batch: profile.decode_step_s(min(max(batch, low), high))


def context_of(cluster: PlannedCluster, problem: PlanProblem) -> tuple[float, float]:
    """By how many seconds a token of context makes its decode steps longer, and beyond how many tokens a request."""
    decode = cluster.profile.decode
    if cluster.kind != "pd" or decode is None:
        return 0.0, 0.0
    workload = problem.workload
    mean_tokens = workload.lengths.mean() + workload.output_tokens / 2
    return decode.context_s, decode.context_tokens or mean_tokens
