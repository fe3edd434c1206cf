"""Scenarios: clusters, links, roles, the policy and everything that will go wrong."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Concatenate, ParamSpec

from prfaas.core.deployment import (
    ControlConfig,
    FirstTokenSource,
    Link,
    PlannedDeployment,
    Slo,
)
from prfaas.core.deployment.engine import mixed_chunk_tokens
from prfaas.core.kv.model import KvModel
from prfaas.core.planner import PlanProblem, best_operation, problem_of
from prfaas.core.planner.from_deployment import mapping_bits_per_s
from prfaas.core.scheduling.threshold import ThresholdOptimiser
from prfaas.lab.simulator.capacity import CapacityProcess, Constant, Interrupted, Slowdown, Steps
from prfaas.lab.simulator.machine_pool import PoolOptions
from prfaas.lab.simulator.prefix_caches import CacheOptions
from prfaas.lab.simulator.simulated_cluster import SimulatedCluster, cluster_of

Given = ParamSpec("Given")


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """A directed link."""

    source: str
    target: str
    bandwidth_bits_per_s: float
    """As configured."""
    capacity: CapacityProcess
    """What it really carries, over time."""
    rtt_s: float = 0.0
    transfer_limit_bits_per_s: float = math.inf
    """What one transfer gets at most, however empty the link is: what its connections can carry."""
    egress_per_gb: float = 0.0
    """What 10^9 bytes over it cost, in the currency of the deployment's prices."""

    @property
    def name(self) -> str:
        """ "source->target"."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance or a link is gone for a time."""

    what: str
    """The name of the instance or link."""
    at_s: float
    lasts_s: float
    notice_s: float = 0.0
    """So long before it is known: an instance begins only what it ends in time, and what it can't end goes to another
    one. A link has no notice."""

    def __post_init__(self) -> None:
        if not (self.at_s >= 0 and self.lasts_s > 0):
            raise ValueError(
                f"a failure begins at 0 s or later and lasts, not {self.at_s!r} s, {self.lasts_s!r} s"
            )
        if not 0 <= self.notice_s <= self.at_s:
            raise ValueError(f"notice comes 0 s to {self.at_s:g} s before, not {self.notice_s!r} s")


@dataclass(frozen=True, slots=True)
class Overheads:
    """Time beside the work itself: none in the paper's model."""

    request_s: float = 0.0
    """Before a request is routed: tokenizing, HTTP."""
    hop_s: float = 0.0
    """More for each request that another instance prefills."""
    first_step: bool = False
    """Whether the first token takes one decode step after the KV is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The policy with its slow loops, and what a deployment meets beside its traffic."""

    policy: str = "paper"
    """By name."""
    params: Mapping[str, object] = field(default_factory=dict)
    """Of the policy."""
    control: ControlConfig = field(default_factory=ControlConfig)
    """Periods of the slow loops."""
    adapts: bool = True
    """Thresholds are searched again while it runs. False: they stay where they start."""
    allocation: bool = True
    """Roles change while it runs. False: they stay as they are."""
    caches: CacheOptions | None = None
    """Prefix caches of every instance; None: none."""
    failures: Sequence[Failure] = ()
    """Instances and links that fail."""
    overheads: Overheads = Overheads()
    """Time beside the work itself."""
    transfer_grace_s: float = math.inf
    """How late one transfer may be, on top of what its link's bandwidth explains (`late_after_s`), before it is given
    up. Live it is 30 s. Infinite: however late."""
    queue_limit_s: float = math.inf
    """Requests that would wait longer are refused when they come. Live it is `gateway.limits.queue_s`, 60 s if the file
    says nothing. Infinite: none are."""
    keeps_transfers: bool = True
    """Decode instances go on from what has arrived of a prefill that was lost, as live. False: all of it is lost."""
    slowdown: Slowdown | None = None
    """Of prefills over time; None: they take what profiles say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Conditions):
    """One simulation, except its traffic."""

    name: str
    clusters: tuple[SimulatedCluster, ...]
    links: tuple[SimulatedLink, ...]
    kv_model: KvModel
    threshold_tokens: Mapping[str, float]
    """By PD cluster, where the threshold starts."""
    output_tokens: float
    """Mean length of answers that the slow loops start with."""
    pools: Mapping[str, PoolOptions] = field(default_factory=dict)
    """By cluster; one that is missing has none."""
    slo: Slo = field(default_factory=lambda: Slo(None, None))
    stall_limit_s: float = 8.0
    """After so long without capacity a link's transfers are given up, and the requests prefilled in their PD
    cluster."""
    wire_model: KvModel | None = None
    """The most that crosses a link, where that is not `kv_model`: `PlannedDeployment.wire_model`."""
    link_models: Mapping[str, KvModel] = field(default_factory=dict)
    """What crosses links over which less crosses: `PlannedDeployment.link_models`."""
    first_token: FirstTokenSource = "decode"
    """Who gives every first token; "prefill": where another instance prefills than the one that decodes."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.pools) - {cluster.name for cluster in self.clusters})
        if unknown:
            raise ValueError(f'cluster "{unknown[0]}" has a pool and is not there')
        if self.pools and self.kv_model.token_bytes == 0:
            raise ValueError(f"{self.kv_model.name} has no full-attention layers, so it gets no pool")
        for cluster in self.clusters:
            self._check_chunks(cluster)
        names = {link.name for link in self.links} | {
            instance for cluster in self.clusters for instance in instance_names(cluster)
        }
        for failure in self.failures:
            if failure.what not in names:
                raise ValueError(
                    f'"{failure.what}" cannot fail: it is no instance or link; there are {sorted(names)}'
                )

    def _check_chunks(self, cluster: SimulatedCluster) -> None:
        if cluster.chunk_tokens and self.pools:
            raise ValueError(
                "the next prompt fills up a prompt's last steps (chunk_tokens) only where prompts load nothing "
                "from pools"
            )
        least = 1 if self.kv_model.is_hybrid else 0
        if cluster.chunk_tokens and not least <= cluster.kv_block_tokens <= cluster.chunk_tokens:
            raise ValueError(
                f"a step of {cluster.chunk_tokens} tokens (chunk_tokens) has one KV block or more of {least} tokens or "
                f"more, not of {cluster.kv_block_tokens} (kv_block_tokens)"
            )

    @property
    def sent_model(self) -> KvModel:
        """The part of a request's KVCache that crosses a link."""
        return self.kv_model if self.wire_model is None else self.wire_model

    def capacity_of(self, link: SimulatedLink) -> CapacityProcess:
        """The bandwidth of a link over time, its failures included."""
        outages = [
            (failure.at_s, failure.at_s + failure.lasts_s)
            for failure in self.failures
            if failure.what == link.name
        ]
        return Interrupted(link.capacity, outages) if outages else link.capacity


def instance_names(cluster: SimulatedCluster) -> list[str]:
    """ "cluster-0", "cluster-1", …: those that prefill first."""
    return [f"{cluster.name}-{number}" for number in range(cluster.instances)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions(Conditions):
    """Everything of a scenario that a deployment file does not say."""

    roles: Mapping[str, int] | None = None
    """Prefill instances by PD cluster; None takes the planner's best."""
    threshold_tokens: float | None = None
    """Of every PD cluster; None takes the planner's best."""
    pools: Mapping[str, PoolOptions] | None = None
    """Of machines, by cluster; None takes the file's."""
    links: Mapping[str, CapacityProcess] = field(default_factory=dict)
    """Capacity over time by "source->target"; that of other links is constant."""
    chunk_tokens: int = 0
    """Of a prefill step, whose rest the next prompt fills up; 0: it does not."""
    kv_block_tokens: int = 0
    """Of a block of the KVCache; needed with `chunk_tokens` where a model has linear states."""
    mixed_tokens: int | None = None
    """Of a prompt that a decode instance computes in each step of its answers (`EngineConfig.mixed_chunk_tokens`);
    0: answers go on undisturbed by prompts that are computed there. None takes what the file's engines start with."""
    first_token: FirstTokenSource | None = None
    """Who gives it; None takes the file's `gateway.first_token`."""

    def scenario(self, planned: PlannedDeployment) -> Scenario:
        """The scenario of a deployment file with these options.

        Raises:
            DeploymentError: as `problem_of`.
            ValueError: a role, link, failure or parameter that can't be.
        """
        problem = problem_of(planned)
        prefill = (
            {roles.cluster: roles.prefill for roles in best_operation(problem).roles}
            if self.roles is None
            else dict(self.roles)
        )
        thresholds = (
            _thresholds(problem, prefill)
            if self.threshold_tokens is None
            else {pd.name: float(self.threshold_tokens) for pd in problem.pd}
        )
        conditions = {each.name: getattr(self, each.name) for each in fields(Conditions)}
        if self.policy == "static_threshold" and "threshold_tokens" not in self.params:
            conditions["params"] = {**self.params, "threshold_tokens": min(thresholds.values())}
        mixed_tokens = self.mixed_tokens
        if mixed_tokens is None:
            mixed_tokens = mixed_chunk_tokens(planned.step_tokens, planned.seats)
        unknown = sorted(set(self.links) - {link.name for link in planned.links})
        if unknown:
            raise ValueError(
                f'there is no link "{unknown[0]}"; there are {[link.name for link in planned.links]}'
            )
        return Scenario(
            **conditions,
            name=planned.name,
            clusters=tuple(
                replace(
                    cluster_of(planned, cluster, prefill, problem),
                    chunk_tokens=self.chunk_tokens,
                    kv_block_tokens=self.kv_block_tokens,
                    mixed_tokens=mixed_tokens,
                )
                for cluster in planned.clusters
            ),
            links=tuple(self._link(planned, link) for link in planned.links),
            kv_model=planned.kv_model,
            wire_model=planned.wire_model,
            link_models=planned.link_models,
            threshold_tokens=thresholds,
            output_tokens=problem.workload.output_tokens,
            pools=pools_of(planned) if self.pools is None else self.pools,
            slo=planned.slo,
            first_token=self.first_token or planned.first_token,
        )

    def _link(self, planned: PlannedDeployment, link: Link) -> SimulatedLink:
        return SimulatedLink(
            link.source,
            link.target,
            link.bandwidth_bits_per_s,
            self.links.get(link.name, Constant(link.bandwidth_bits_per_s)),
            link.rtt_s,
            transfer_limit_bits_per_s=min(link.transfer_limit_bits_per_s, mapping_bits_per_s(planned, link)),
            egress_per_gb=link.egress_per_gb,
        )


def _with_options(
    options: Callable[Given, ScenarioOptions],
) -> Callable[Concatenate[PlannedDeployment, Given], Scenario]:
    def scenario_of(planned: PlannedDeployment, /, *args: Given.args, **kwargs: Given.kwargs) -> Scenario:
        return options(*args, **kwargs).scenario(planned)

    return scenario_of


scenario_of = _with_options(ScenarioOptions)
"""`ScenarioOptions.scenario` with the options as keywords: scenario_of(planned, policy="tilted", caches=…)."""


def as_deployed(
    planned: PlannedDeployment, policy: str | None, params: Mapping[str, object] | None, **more: Any
) -> Scenario:
    """The scenario of a deployment as it would run: its `routing` and `control` sections count.

    Args:
        planned: The deployment.
        policy: None: the file's.
        params: Of the policy; None: the file's, where the policy is the file's.
        more: Further fields of `ScenarioOptions`.

    Raises:
        ValueError: a policy or parameter that there is not, or what fails is no link or instance.
    """
    routing = planned.routing
    name = routing.policy if policy is None else policy
    return scenario_of(
        planned,
        policy=name,
        params=routing.params_of(name) if params is None else params,
        threshold_tokens=None if routing.threshold_tokens is None else float(routing.threshold_tokens),
        control=planned.control,
        allocation=planned.control.allocation,
        **more,
    )


def stepped(
    planned: PlannedDeployment, steps: Iterable[tuple[str, float, float]]
) -> dict[str, CapacityProcess]:
    """Capacities by link that begin as in the file; each of `steps` is (link, from this second on, bits per second).

    Raises:
        ValueError: a link that there is not, or times or bandwidths out of range.
    """
    pieces: dict[str, dict[float, float]] = {}
    bandwidths = {link.name: link.bandwidth_bits_per_s for link in planned.links}
    for link, at_s, bits_per_s in steps:
        if link not in bandwidths:
            raise ValueError(f'there is no link "{link}"; there are {list(bandwidths)}')
        pieces.setdefault(link, {0.0: bandwidths[link]})[at_s] = bits_per_s
    return {link: Steps(tuple(sorted(each.items()))) for link, each in pieces.items()}


def pools_of(planned: PlannedDeployment) -> dict[str, PoolOptions]:
    """The pools that a deployment file describes, by cluster, with the usual bandwidths."""
    return {
        cluster.name: PoolOptions(
            memory_bytes=cluster.pool.memory_bytes,
            ssd_bytes=cluster.pool.ssd_bytes,
            checkpoint_tokens=planned.pool.checkpoint_tokens,
            eviction=planned.pool.eviction,
            instances_per_machine=cluster.instances_per_machine,
        )
        for cluster in planned.clusters
        if cluster.pool is not None
    }


def _thresholds(problem: PlanProblem, prefill: Mapping[str, int]) -> dict[str, float]:
    change = ThresholdOptimiser().propose(problem, prefill, {}, sample_count=1, reason="start")
    assert change is not None  # nothing was set before
    return dict(change.tokens)
