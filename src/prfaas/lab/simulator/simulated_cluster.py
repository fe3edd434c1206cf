"""The instances of one cluster as they are simulated, from what the planner knows of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from prfaas.core.deployment import PlannedCluster, PlannedDeployment
from prfaas.core.kv.model import KvModel
from prfaas.core.latency.profile import LatencyProfile
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

    @property
    def full_step_s(self) -> float:
        """Seconds of a decode step of a full batch; 0 where nothing decodes."""
        return 0.0 if self.decode_step_s is None else self.decode_step_s(self.decode_slots)


def cluster_of(
    planned: PlannedDeployment, cluster: PlannedCluster, prefill: Mapping[str, int], problem: PlanProblem
) -> SimulatedCluster:
    """The instances of a deployment's cluster.

    Args:
        planned: The deployment: it has the prices.
        cluster: As the file describes it.
        prefill: How many prefill at first, by PD cluster.
        problem: What the planner makes of the file: it has the decode batches.

    Raises:
        ValueError: more prefill instances than there are, or not the whole of a group.
    """
    count = cluster.instance_count
    prefills = SimulatedCluster(
        cluster.name,
        cluster.kind,
        count,
        count,
        ServiceCurve.of_profile(cluster.profile),
        instance_price_per_hour=planned.prices.get(cluster.hardware, 0.0) * cluster.gpus_per_instance,
        kills_per_hour=cluster.kills_per_hour,
        kv_model=cluster.kv_model,
        group_ranks=cluster.group_ranks,
    )
    if cluster.kind == "prfaas":
        return prefills
    if not 0 <= prefill[cluster.name] < count:
        raise ValueError(
            f'cluster "{cluster.name}" has {count} instances: 0 to {count - 1} of them can prefill, not '
            f"{prefill[cluster.name]}"
        )
    if prefill[cluster.name] % cluster.group_ranks:
        raise ValueError(
            f'cluster "{cluster.name}" has groups of {cluster.group_ranks} instances: {prefill[cluster.name]} that '
            "prefill are not whole groups"
        )
    decode, workload = cluster.profile.decode, problem.workload
    mean_tokens = workload.lengths.mean() + workload.output_tokens / 2
    return replace(
        prefills,
        prefill_instances=prefill[cluster.name],
        decode_step_s=_decode_step_of(cluster.profile),
        decode_slots=next(int(pd.decode_batch) for pd in problem.pd if pd.name == cluster.name),
        context_s=0.0 if decode is None else decode.context_s,
        measured_context_tokens=0.0 if decode is None else decode.context_tokens or mean_tokens,
    )


def _decode_step_of(profile: LatencyProfile) -> Callable[[int], float]:
    """Seconds over the batch; beyond what was measured as at the nearest end."""
    low, high = profile.range_batch
    return lambda batch: profile.decode_step_s(min(max(batch, low), high))
