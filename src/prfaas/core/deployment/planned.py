"""What a deployment file says to the planner: how much of what there is, and the traffic it is for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from prfaas.core.deployment.engine import EngineConfig
from prfaas.core.deployment.field_types import GIVEN, FileBeside, Finite, PositiveFloat, Ratio, Text, Weight
from prfaas.core.deployment.gateway import FirstTokenSource
from prfaas.core.deployment.pool import PoolSettings, PoolSpace
from prfaas.core.deployment.section import Section
from prfaas.core.deployment.types import ClusterKind, ControlConfig, Link, Routing, Slo
from prfaas.core.kv.dtypes import DEFAULT_DTYPES, CacheDtypes
from prfaas.core.kv.model import KvModel
from prfaas.core.latency.profile import LatencyProfile
from prfaas.core.workload.trace_columns import TraceFormat
from prfaas.core.yaml_source import FileError, YamlSource


@dataclass(frozen=True, slots=True)
class LogNormalLengths(Section):
    """exp(N(mu, sigma²)) tokens, truncated to [low, high]."""

    mu: Finite
    """Mean of the logarithm."""
    sigma: PositiveFloat
    """Standard deviation of the logarithm."""
    low: PositiveFloat
    """The shortest, in tokens."""
    high: PositiveFloat
    """The longest, in tokens."""
    distribution: Literal["lognormal"] = "lognormal"
    """Which form the others have."""


@dataclass(frozen=True, slots=True)
class UniformLengths(Section):
    """Every length from low to high tokens alike."""

    low: PositiveFloat
    """The shortest, in tokens."""
    high: PositiveFloat
    """The longest, in tokens."""
    distribution: Literal["uniform"] = "uniform"
    """Which form the others have."""


@dataclass(frozen=True, slots=True)
class FixedLengths(Section):
    """Every prompt has this many tokens."""

    tokens: PositiveFloat
    """Of every prompt."""
    distribution: Literal["fixed"] = "fixed"
    """Which form the others have."""


@dataclass(frozen=True, slots=True)
class EmpiricalLengths(Section):
    """A list of lengths in tokens."""

    lengths: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """In tokens."""
    weights: Annotated[tuple[Weight, ...], Field(min_length=1)] | None = None
    """One for each length; left out: all alike."""
    distribution: Literal["empirical"] = "empirical"
    """Which form the others have."""


@dataclass(frozen=True, slots=True)
class TraceLengths(Section):
    """The lengths in a trace file."""

    path: FileBeside
    """The trace, relative to the deployment file."""
    format: TraceFormat | None = None
    """Left out: as the file's name or first line tells."""
    columns: Mapping[Text, Text] | None = None
    """What the columns `arrival`, `input` and `output` are called in the file."""
    distribution: Literal["trace"] = "trace"
    """Which form the others have."""


LengthsSpec = LogNormalLengths | UniformLengths | FixedLengths | EmpiricalLengths | TraceLengths


@dataclass(frozen=True, slots=True)
class WorkloadSpec(Section):
    """The traffic to plan for."""

    lengths: Annotated[LengthsSpec, Field(discriminator="distribution")]
    """How long prompts are, in one of five forms."""
    output_tokens: Annotated[PositiveFloat | None, GIVEN] = None
    """Mean length of answers; left out: the trace's."""
    prefix_hit_ratio: Ratio = 0.0
    """Share of each prompt that is found in a cache."""
    load: Annotated[float, Field(strict=True, gt=0, lt=1)] = 0.7
    """Share of the highest throughput at which waiting is estimated and `slo.ttft_s` must hold."""


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """Equal instances; in a `pd` cluster the planner divides them into prefill and decode."""

    name: str
    kind: ClusterKind
    hardware: str
    instance_count: int
    gpus_per_instance: int
    profile: LatencyProfile
    """How fast one instance is."""
    prefix_hit_ratio: float | None
    """Part of each prompt that is cached here; None: the workload's."""
    pool: PoolSpace | None = None
    """What each of its machines keeps of computed prefixes beside its engines; None: nothing."""
    instances_per_machine: int = 1
    """Which share a pool: by their hosts, where the file has them."""
    tensor_parallel: int = 1
    """Ranks of an instance that the KVCache is divided among."""
    kills_per_hour: float = 0.0
    """How often an instance is expected to be taken away while it is up; 0 where it is not preemptible."""
    kv_model: KvModel | None = None
    """What it holds of a request's KVCache, where dtype or ranks make that less than the deployment's `kv_model`."""
    group_ranks: int = 1
    """Instances that have their role together: ranks of a data-parallel group."""
    dtypes: CacheDtypes = DEFAULT_DTYPES
    """What its engines keep their caches in."""

    @property
    def gpus(self) -> int:
        """All GPUs of the cluster."""
        return self.instance_count * self.gpus_per_instance


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """A deployment file as the planner and the simulator need it, checked. Hosts and ports play no part."""

    name: str
    path: Path
    kv_model: KvModel
    """What a cluster holds of a request's KVCache, unless it says otherwise."""
    clusters: tuple[PlannedCluster, ...]
    links: tuple[Link, ...]
    workload: WorkloadSpec
    routing: Routing
    control: ControlConfig
    slo: Slo
    prices: Mapping[str, float]
    """Per GPU-hour by hardware, in any currency; empty if the file has none."""
    source: YamlSource = field(repr=False, compare=False)
    pool: PoolSettings = field(default_factory=PoolSettings)
    """What all pools have in common."""
    kv_copies: float = 1.0
    """How often each byte of the KVCache crosses a link on average, at most: decode ranks keep copies."""
    wire_model: KvModel | None = None
    """The most that crosses a link, or moves inside of a cluster; None: `kv_model`."""
    link_models: Mapping[str, KvModel] = field(default_factory=dict)
    """What crosses links, by name, over which dtypes or ranks of their ends let less cross."""
    first_token: FirstTokenSource = "decode"
    """`gateway.first_token`: who gives clients their first token."""
    step_tokens: int = EngineConfig().max_num_batched_tokens
    """`engine.max_num_batched_tokens`: prompts are computed in chunks of so many tokens, between two decode steps."""
    seats: int = EngineConfig().max_num_seqs
    """`engine.max_num_seqs`: answers that an engine decodes together."""
    dtypes: CacheDtypes = DEFAULT_DTYPES
    """What `kv_model` is counted in."""

    @property
    def model_title(self) -> str:
        """The model for people, with the dtype of its KVCache where the file names one."""
        kept_in = self.dtypes.of_kv
        title = self.kv_model.name if kept_in is None else f"{self.kv_model.name}, KVCache in {kept_in}"
        others = [
            f"{each.dtypes.of_kv} in {each.name}" for each in self.clusters if each.dtypes != self.dtypes
        ]
        return f"{title} ({', '.join(others)})" if others else title

    @property
    def sent_model(self) -> KvModel:
        """The most of a request's KVCache that crosses a link, or moves inside of a cluster."""
        return self.kv_model if self.wire_model is None else self.wire_model

    def sent_over(self, link: str) -> KvModel:
        """What of a request's KVCache crosses a link, by its name."""
        return self.link_models.get(link, self.sent_model)

    def has_unlike_ends(self, link: Link) -> bool:
        """Whether the instances at its ends have different `tensor_parallel`, so that their KVCache must be mapped."""
        return self.cluster(link.source).tensor_parallel != self.cluster(link.target).tensor_parallel

    @property
    def prfaas_clusters(self) -> tuple[PlannedCluster, ...]:
        """Clusters that only prefill, for others."""
        return tuple(cluster for cluster in self.clusters if cluster.kind == "prfaas")

    @property
    def pd_clusters(self) -> tuple[PlannedCluster, ...]:
        """Clusters that decode, and prefill the short prompts."""
        return tuple(cluster for cluster in self.clusters if cluster.kind == "pd")

    def cluster(self, name: str) -> PlannedCluster:
        """A cluster by name. Links only name clusters that are there; KeyError otherwise."""
        return {cluster.name: cluster for cluster in self.clusters}[name]

    def error(self, location: Sequence[str | int], problem: str) -> FileError:
        """The error to raise about a field, e.g. `("clusters", 0, "profile")`, with its file and line."""
        return self.source.error(location, problem)
