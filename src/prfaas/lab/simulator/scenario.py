"""What is simulated: clusters, links, roles, the policy and everything that will go wrong.

The board that policies read, as it is when a simulation begins.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prfaas.core.deployment import ControlConfig, PlannedCluster, PlannedDeployment, Slo
from prfaas.core.kv import KvModel
from prfaas.core.latency.service_curve import ServiceCurve
from prfaas.core.planner import PlanProblem, best_operation, problem_of
from prfaas.core.scheduling import ClusterView, InstanceView, KvFacts, LinkView, View
from prfaas.core.scheduling.threshold import ThresholdOptimiser
from prfaas.lab.simulator.capacity import CapacityProcess, Constant

# Engines keep a hybrid model's states at the ends of prefill chunks; this is vLLM's usual budget of a step.
_CHECKPOINT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Equal instances that share a network.

    `prefill_instances` of them prefill at first and the others decode (all prefill in a "prfaas" cluster). `curve`:
    seconds of a prefill over uncached tokens; up to `prefill_concurrency` share an instance's time evenly, as chunked
    prefill can (1: first come, first served). `decode_step_s`: seconds of a step over the batch; at most
    `decode_slots` requests decode together on one instance, the others wait.
    """

    name: str
    kind: Literal["prfaas", "pd"]
    instances: int
    prefill_instances: int
    curve: ServiceCurve
    decode_step_s: Callable[[int], float] | None = None
    decode_slots: int = 1
    prefill_concurrency: int = 1


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """A directed link. `bandwidth_bits_per_s`: as configured; `capacity`: what it really carries, over time.

    `transfer_limit_bits_per_s`: what one transfer gets at most, however empty the link is (its connections).
    """

    source: str
    target: str
    bandwidth_bits_per_s: float
    capacity: CapacityProcess
    rtt_s: float = 0.0
    transfer_limit_bits_per_s: float = math.inf

    @property
    def name(self) -> str:
        """ "source->target"."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The prefix cache of every instance.

    `capacity_tokens`: what one instance keeps. Hybrid models (`checkpoint_tokens` given) can go on only from a
    state: one is kept every so many tokens and at a prompt's last full block, each as large as `state_tokens` tokens.
    """

    capacity_tokens: int
    checkpoint_tokens: int | None = None
    state_tokens: int = 0

    @classmethod
    def of_memory(cls, model: KvModel, num_bytes: int) -> "CacheOptions":
        """As many tokens of the model as fit into so much memory of one instance, hybrid states as engines keep them.

        Raises:
            ValueError: the model keeps nothing per token.
        """
        if model.token_bytes == 0:
            raise ValueError(f"{model.name} has no full-attention layers, so no prefix of it can be kept")
        capacity_tokens = num_bytes // model.token_bytes
        if not model.is_hybrid:
            return cls(capacity_tokens)
        state_tokens = -(-(model.fixed_bytes + model.window_bytes) // model.token_bytes)
        return cls(capacity_tokens, _CHECKPOINT_TOKENS, state_tokens)

    def __post_init__(self) -> None:
        if self.capacity_tokens < 0 or self.state_tokens < 0:
            raise ValueError("a cache holds 0 tokens or more")
        if self.checkpoint_tokens is not None and self.checkpoint_tokens < 1:
            raise ValueError(f"states can be kept every 1 token or more, not every {self.checkpoint_tokens}")


@dataclass(frozen=True, slots=True)
class Failure:
    """`what`, an instance or a link by name, is gone from `at_s` for `lasts_s` seconds."""

    what: str
    at_s: float
    lasts_s: float

    def __post_init__(self) -> None:
        if not (self.at_s >= 0 and self.lasts_s > 0):
            raise ValueError(
                f"a failure begins at 0 s or later and lasts, not {self.at_s!r} s, {self.lasts_s!r} s"
            )


@dataclass(frozen=True, slots=True)
class Overheads:
    """Time beside the work itself: none in the paper's model.

    `request_s`: before a request is routed (tokenizing, HTTP). `hop_s`: more for each request that another instance
    prefills. `first_step`: the first token takes one decode step after the KV is there.
    """

    request_s: float = 0.0
    hop_s: float = 0.0
    first_step: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation, except its traffic.

    `threshold_tokens` by PD cluster is where the threshold starts; `adapts` False leaves it there. `allocation`
    False leaves the roles as they are. After `stall_limit_s` without capacity a link's transfers are given up, and
    the requests prefilled in their PD cluster.
    """

    name: str
    clusters: tuple[SimulatedCluster, ...]
    links: tuple[SimulatedLink, ...]
    kv_model: KvModel
    policy: str
    threshold_tokens: Mapping[str, float]
    output_tokens: float
    params: Mapping[str, object] = field(default_factory=dict)
    control: ControlConfig = field(default_factory=ControlConfig)
    adapts: bool = True
    allocation: bool = True
    caches: CacheOptions | None = None
    failures: Sequence[Failure] = ()
    overheads: Overheads = Overheads()
    slo: Slo = field(default_factory=lambda: Slo(None, None))
    stall_limit_s: float = 8.0

    def __post_init__(self) -> None:
        names = {link.name for link in self.links} | {
            instance for cluster in self.clusters for instance in instance_names(cluster)
        }
        for failure in self.failures:
            if failure.what not in names:
                raise ValueError(
                    f'"{failure.what}" cannot fail: it is no instance or link; there are {sorted(names)}'
                )


def instance_names(cluster: SimulatedCluster) -> list[str]:
    """ "cluster-0", "cluster-1", …: those that prefill first."""
    return [f"{cluster.name}-{number}" for number in range(cluster.instances)]


def scenario_of(
    planned: PlannedDeployment,
    *,
    policy: str = "paper",
    params: Mapping[str, object] | None = None,
    roles: Mapping[str, int] | None = None,
    threshold_tokens: float | None = None,
    adapts: bool = True,
    allocation: bool = True,
    control: ControlConfig | None = None,
    caches: CacheOptions | None = None,
    links: Mapping[str, CapacityProcess] | None = None,
    failures: Sequence[Failure] = (),
    overheads: Overheads | None = None,
    prefill_concurrency: int = 1,
) -> Scenario:
    """What a deployment file describes.

    `roles`: prefill instances by PD cluster, `threshold_tokens`: of every PD cluster; None takes the planner's best.
    `links`: capacity over time by "source->target", else it is constant.

    Raises:
        DeploymentError: as `problem_of`.
        ValueError: a role, link, failure or parameter that can't be.
    """
    problem = problem_of(planned)
    prefill = roles_of(planned, problem) if roles is None else dict(roles)
    thresholds = (
        _thresholds(problem, prefill)
        if threshold_tokens is None
        else {pd.name: float(threshold_tokens) for pd in problem.pd}
    )
    given = dict(params or {})
    if policy == "static_threshold" and "threshold_tokens" not in given:
        given["threshold_tokens"] = min(thresholds.values())
    processes = dict(links or {})
    unknown = sorted(set(processes) - {link.name for link in planned.links})
    if unknown:
        raise ValueError(
            f'there is no link "{unknown[0]}"; there are {[link.name for link in planned.links]}'
        )
    return Scenario(
        name=planned.name,
        clusters=tuple(
            _cluster(cluster, prefill, problem, prefill_concurrency) for cluster in planned.clusters
        ),
        links=tuple(
            SimulatedLink(
                link.source,
                link.target,
                link.bandwidth_bits_per_s,
                processes.get(link.name, Constant(link.bandwidth_bits_per_s)),
                link.rtt_s,
                link.transfer_limit_bits_per_s,
            )
            for link in planned.links
        ),
        kv_model=planned.kv_model,
        policy=policy,
        threshold_tokens=thresholds,
        output_tokens=problem.workload.output_tokens,
        params=given,
        control=control or ControlConfig(),
        adapts=adapts,
        allocation=allocation,
        caches=caches,
        failures=tuple(failures),
        overheads=overheads or Overheads(),
        slo=planned.slo,
    )


def roles_of(planned: PlannedDeployment, problem: PlanProblem) -> dict[str, int]:
    """The planner's prefill instances by PD cluster, at least one of each role where there are two instances."""
    best = {roles.cluster: roles.prefill for roles in best_operation(problem).roles}
    counts = {cluster.name: cluster.instance_count for cluster in planned.pd_clusters}
    return {name: min(max(best[name], min(count - 1, 1)), count - 1) for name, count in counts.items()}


def _thresholds(problem: PlanProblem, prefill: Mapping[str, int]) -> dict[str, float]:
    change = ThresholdOptimiser().propose(problem, prefill, {}, sample_count=1, reason="start")
    assert change is not None  # nothing was set before
    return dict(change.tokens)


def _cluster(
    cluster: PlannedCluster, prefill: Mapping[str, int], problem: PlanProblem, concurrency: int
) -> SimulatedCluster:
    curve = ServiceCurve.of_profile(cluster.profile)
    if concurrency < 1:
        raise ValueError(f"at least one prefill runs at a time on an instance, not {concurrency}")
    if cluster.kind == "prfaas":
        count = cluster.instance_count
        return SimulatedCluster(cluster.name, "prfaas", count, count, curve, prefill_concurrency=concurrency)
    if not 0 <= prefill[cluster.name] < cluster.instance_count:
        raise ValueError(
            f'cluster "{cluster.name}" has {cluster.instance_count} instances: 0 to {cluster.instance_count - 1} of '
            f"them can prefill, not {prefill[cluster.name]}"
        )
    slots = next(int(pd.decode_batch) for pd in problem.pd if pd.name == cluster.name)
    low, high = cluster.profile.range_batch

    def step_s(batch: int) -> float:
        return cluster.profile.decode_step_s(min(max(batch, low), high))

    return SimulatedCluster(
        cluster.name, "pd", cluster.instance_count, prefill[cluster.name], curve, step_s, slots, concurrency
    )


def board_of(scenario: Scenario, kv: KvFacts) -> View:
    """Everybody idle, in the roles of the beginning."""
    return View(
        clusters={
            cluster.name: ClusterView(
                cluster.name,
                cluster.kind,
                [
                    InstanceView(
                        name,
                        cluster.name,
                        prefills=number < cluster.prefill_instances,
                        decodes=number >= cluster.prefill_instances,
                        decode_slots=cluster.decode_slots,
                    )
                    for number, name in enumerate(instance_names(cluster))
                ],
                cluster.curve.seconds,
            )
            for cluster in scenario.clusters
        },
        links={
            (link.source, link.target): LinkView(
                link.source,
                link.target,
                link.bandwidth_bits_per_s,
                rtt_s=link.rtt_s,
                # The board always knows how the link is: `Lane.look`.
                seen_s=float("inf"),
            )
            for link in scenario.links
        },
        kv=kv,
        threshold_tokens=dict(scenario.threshold_tokens),
        stale_after_s=scenario.control.stale_after_s,
    )
