"""A deployment file in typed, frozen form: what runs where, who may send KV to whom, with which limits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from prfaas.core.deployment.addresses import (
    EventsEndpoint,
    events_folder,
    host_in_url,
    local_endpoint,
    plain_host,
)
from prfaas.core.deployment.engine import EngineConfig, TransferLimits
from prfaas.core.deployment.field_types import (
    GIVEN,
    SECTION,
    Arg,
    Bandwidth,
    Flag,
    Host,
    Name,
    PolicyName,
    PolicySetting,
    Port,
    Positive,
    PositiveFloat,
    Profile,
    Ratio,
    Seconds,
    Text,
    Weight,
    needs,
)
from prfaas.core.deployment.gateway import FleetConfig, GatewayConfig
from prfaas.core.deployment.model import ModelRef
from prfaas.core.deployment.pool import PoolNode, PoolSettings, PoolSpace, pool_names
from prfaas.core.deployment.section import (
    ANOTHER_NAME,
    ENGINES_AGAIN,
    EVERYTHING,
    GATEWAY_AGAIN,
    LIVE,
    POOLS_AGAIN,
    TOLD_ELSEWHERE,
    OnChange,
    Section,
)
from prfaas.core.deployment.security import CERTIFICATE_NAMES, Security
from prfaas.core.deployment.source import DeploymentError
from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype
from prfaas.core.kv.rank_shares import RankGrid

Role = Literal["prefill", "decode"]
ClusterKind = Literal["prfaas", "pd"]
BUILT_IN_POLICIES = (
    "paper", "tilted", "local_only", "offload_all", "static_threshold", "least_ttft", "round_robin",
)  # fmt: skip
DEFAULT_POLICY = "tilted"
POLICY_ENTRY_POINTS = "prfaas.policies"
"""The group of entry points by which an installed package brings routing policies."""

SYNTHETIC = "synthetic"
"""The `hardware` of clusters whose engines are stand-ins: for load and fault tests, never for answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSection(Section, on_change=ANOTHER_NAME):
    """One vLLM server, as the file has it."""

    name: Name
    """Unlike any other's in the file."""
    roles: Annotated[tuple[Role, ...], Field(min_length=1), LIVE]
    """What it does at first: instances of a `pd` cluster can be given the other role while they run."""
    host: Host
    """Address or name of its machine; it listens only there."""
    http_port: Port
    """Its OpenAI API, for the gateway only."""
    kv_port: Port
    """Where rank 0 listens for KV; rank r listens at `kv_port + r`."""
    tensor_parallel: Positive = 1
    """Ranks that divide the heads of its layers, each on a GPU."""
    pipeline_parallel: Positive = 1
    """Stages of `tensor_parallel` ranks that divide its layers; more than one only where it prefills and no more."""
    nixl_port: Annotated[Port | None, GIVEN] = None
    """Where it tells engines of its cluster how NIXL reaches its memory; left out: it does not."""
    data_parallel: Annotated[Name | None, GIVEN] = None
    """The group that it is a rank of: engines that share the experts of one model; left out: none."""
    expert_parallel: Flag = False
    """Each GPU has some experts whole, not a part of every one."""

    @property
    def meeting_port(self) -> int:
        """Where rank 0 of a data-parallel group waits for the others."""
        return self.kv_port + self.gpus

    @property
    def reserved_kv_ports(self) -> range:
        """Those of all GPUs, and where its data-parallel group meets."""
        return range(self.kv_port, self.meeting_port + (self.data_parallel is not None))

    @property
    def gpus(self) -> int:
        """Of all its ranks."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance(InstanceSection):
    """One vLLM server of a cluster."""

    cluster: str
    tls: Annotated[bool, OnChange(EVERYTHING.needs, "TLS, by security.engine_tls")] = False
    """The gateway and the tools speak TLS with it, over HTTP and at its KV port; its HTTP server knows nothing else."""
    is_stand_in: Annotated[bool, OnChange(EVERYTHING.needs, "hardware")] = False
    """No model runs there: one process plays all ranks."""

    @property
    def url(self) -> str:
        """Base of the instance's HTTP API, without a trailing slash."""
        return f"http{'s' if self.tls else ''}://{host_in_url(self.host)}:{self.http_port}"

    @property
    def kv_ports(self) -> range:
        """KV ports of all ranks that send and receive, in rank order."""
        return range(self.kv_port, self.kv_port + self.kv_ranks)

    @property
    def kv_ranks(self) -> int:
        """Ranks that send and receive KV, each at a port of its own."""
        return self.rank_grid.count

    @property
    def rank_grid(self) -> RankGrid:
        """How they divide the model. A stand-in sends and receives for all of its ranks at one port."""
        return RankGrid(1) if self.is_stand_in else RankGrid(self.tensor_parallel, self.pipeline_parallel)

    def has_role(self, role: Role) -> bool:
        """True if the instance may be given this kind of work."""
        return role in self.roles


_Placed = TypeVar("_Placed", bound=InstanceSection)


def by_pool(cluster: str, instances: Sequence[_Placed]) -> dict[str, list[_Placed]]:
    """A cluster's instances by the pool of their machine: those of one host together, in the order of its machines."""
    machines: dict[str, list[_Placed]] = {}
    for instance in instances:
        machines.setdefault(plain_host(instance.host), []).append(instance)
    return dict(zip(pool_names(cluster, len(machines)), machines.values(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection(Section, on_change=EVERYTHING):
    """Instances that share a network: `instances` to start, or an `instance_count` to plan with."""

    name: Name
    """Unlike any other's in the file."""
    kind: ClusterKind
    """`prfaas`: its instances only prefill, for others. `pd`: they decode, and may prefill."""
    hardware: Text
    """`cpu`, `synthetic`, or a word of yours."""
    profile: Annotated[Profile | None, GIVEN, GATEWAY_AGAIN] = None
    """How fast one instance is: a profile that comes with prfaas, or a file relative to this one."""
    speedup: PositiveFloat = 1.0
    """How much faster than the profile, in plans too; only for `synthetic`."""
    pool: Annotated[PoolSpace | None, SECTION, POOLS_AGAIN] = None
    """What each of its machines keeps of computed prefixes beside its engines."""
    preemptible: Annotated[Flag, LIVE] = False
    """Its instances may be taken away at short notice; only for `prfaas`."""
    # Far more than clouds tell of most kinds of machines. It costs little: a prefill of 30 s counts as 0.13 s longer.
    kills_per_hour: Annotated[
        float,
        Field(strict=True, gt=0, le=3600),
        needs("preemptible", "goes with preemptible: true; add that or leave this out"),
        LIVE,
    ] = 1.0
    """How often that is expected of one instance while it is up."""
    kv_cache_dtype: Annotated[KvCacheDtype | None, GIVEN] = None
    """What its engines keep K and V in; left out: the model's."""
    extra_args: Annotated[tuple[Arg, ...], ENGINES_AGAIN] = ()
    """Further options of its vLLM servers, after those of all."""
    instances: Annotated[Annotated[tuple[InstanceSection, ...], Field(min_length=1)] | None, GIVEN] = None
    """Its vLLM servers."""
    instance_count: Annotated[Positive | None, GIVEN, TOLD_ELSEWHERE] = None
    """In place of `instances`, to plan with: how many."""
    gpus_per_instance: Annotated[Positive | None, GIVEN, TOLD_ELSEWHERE] = None
    """GPUs of one instance; left out: as many as its profile's."""
    tensor_parallel: Annotated[Positive | None, GIVEN, TOLD_ELSEWHERE] = None
    """With `instance_count`: ranks of an instance that the KVCache is divided among."""
    prefix_hit_ratio: Annotated[Ratio | None, GIVEN, TOLD_ELSEWHERE] = None
    """Share of each prompt that this cluster caches, to plan with; left out: the workload's."""

    @property
    def expected_kills_per_hour(self) -> float:
        """Of one instance while it is up; 0 where none is taken away."""
        return self.kills_per_hour if self.preemptible else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(ClusterSection):
    """A cluster whose instances run, or are to be started."""

    instances: tuple[Instance, ...]
    instance_price_per_hour: Annotated[float, OnChange(None, "price of an instance-hour")] = 0.0
    """In the currency of the file's prices; 0 where it has none."""

    def with_role(self, role: Role) -> tuple[Instance, ...]:
        """The cluster's instances that have a role."""
        return tuple(instance for instance in self.instances if instance.has_role(role))


@dataclass(frozen=True, slots=True)
class Link(Section, on_change=LIVE):
    """A directed path for KV between two clusters."""

    source: Name
    """Name of the cluster that sends."""
    target: Name
    """Name of the cluster that receives."""
    bandwidth_bits_per_s: Annotated[Bandwidth, Field(alias="bandwidth")]
    """Goodput: bits of payload, shared by all transfers on the link."""
    connections: Annotated[int, Field(strict=True, ge=1, le=64), ENGINES_AGAIN] = 4
    """TCP connections of one sender to one receiver."""
    rtt_s: Annotated[float, Field(strict=True, ge=0, lt=60)] = 0.0
    """Round trip; only plans and simulations use it."""
    connection_bits_per_s: Annotated[Bandwidth | None, Field(alias="connection_bandwidth"), GIVEN] = None
    """What one connection carries at most; left out: no limit. Only simulations use it."""
    encryption: Annotated[Flag, ENGINES_AGAIN] = True
    """KVCache goes over it encrypted, between ends that have shown their certificates."""
    compression: Annotated[Flag, ENGINES_AGAIN] = False
    """Its chunks are compressed without loss, where that spares more time on the link than it costs on the CPU."""
    egress_per_gb: Annotated[Weight, GIVEN] = 0.0
    """What 10^9 bytes over it cost, in the currency of the file's prices; left out: `prices.egress_per_gb`."""
    mapping_bits_per_s: Annotated[Bandwidth | None, Field(alias="mapping_bandwidth"), GIVEN] = None
    """What its ends map of one transfer's KVCache where their `tensor_parallel` differ; left out: it takes no time.
    Only plans and simulations use it."""

    @property
    def transfer_limit_bits_per_s(self) -> float:
        """What one transfer can get over all its connections."""
        return (
            math.inf if self.connection_bits_per_s is None else self.connections * self.connection_bits_per_s
        )

    @property
    def name(self) -> str:
        """Name of the bandwidth budget: "source->target"."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class Routing(Section, on_change=LIVE):
    """When a prompt is prefilled elsewhere."""

    policy: PolicyName = DEFAULT_POLICY
    """A policy's name, or `package.module:Class`. Whether there is one is known where it is made."""
    threshold_tokens: Annotated[Positive | None, GIVEN] = None
    """Uncached tokens at which a policy that moves its threshold starts; left out: at what the planner finds."""
    params: Annotated[Mapping[Text, PolicySetting], SECTION] = field(default_factory=dict)
    """Of the policy; those left out have its defaults."""

    def params_of(self, policy: str) -> dict[str, float | str]:
        """The file's parameters where they are this policy's, else none."""
        return dict(self.params) if policy == self.policy else {}


@dataclass(frozen=True, slots=True)
class ControlConfig(Section, on_change=LIVE):
    """How fast the scheduler's slow side moves."""

    threshold_period_s: Seconds = 30.0
    """How often the threshold is optimised anew."""
    allocation_period_s: Seconds = 60.0
    """How often the roles are evaluated."""
    # What was learnt of the traffic is kept by this length.
    window_s: Annotated[Seconds, GATEWAY_AGAIN] = 600.0
    """Thresholds and roles are chosen for the traffic of so long."""
    stale_after_s: Seconds = 5.0
    """Facts that are older are not used."""
    silence_s: Seconds = 2.5
    """An engine whose HTTP server or KV port has not answered for so long is frozen; a link that is not heard, down."""
    stall_s: Seconds = 60.0
    """An engine with running requests and without progress for so long is stalled."""
    allocation: Flag = True
    """Whether instances of `pd` clusters change their roles."""


@dataclass(frozen=True, slots=True)
class Slo(Section, on_change=GATEWAY_AGAIN):
    """What users should see."""

    ttft_s: Seconds | None = None
    """Time to first token, at most."""
    tpot_s: Seconds | None = None
    """Time per further token, at most."""
    ttft_statistic: Literal["mean", "p90"] = "p90"
    """What of the times to first token must keep `ttft_s`; only plans use it."""
    tokens_per_s: Annotated[PositiveFloat | None, TOLD_ELSEWHERE] = None
    """How fast each answer grows, at least: in the file in place of `tpot_s`, whose inverse it is."""

    def with_inverse(self) -> "Slo":
        """The same with the time per token and its inverse, where the file has one of them."""
        if self.tokens_per_s is not None:
            return replace(self, tpot_s=1 / self.tokens_per_s)
        return self if self.tpot_s is None else replace(self, tokens_per_s=1 / self.tpot_s)


_Named = TypeVar("_Named", Instance, Cluster, PoolNode)


@dataclass(frozen=True, slots=True)
class Deployment(Section, on_change=EVERYTHING):
    """Everything a deployment file says, checked."""

    name: str
    path: Annotated[Path, OnChange(GATEWAY_AGAIN.needs, "the file's place")]
    state_dir: Annotated[Path, OnChange(EVERYTHING.needs, "the state directory")]
    """Where models, keys and logs are kept."""
    model: ModelRef
    clusters: tuple[Cluster, ...]
    links: tuple[Link, ...]
    routing: Routing
    slo: Slo
    gateway: GatewayConfig
    security: Security
    engine: EngineConfig
    transfer: TransferLimits
    control: ControlConfig = ControlConfig()
    pool: PoolSettings = field(default_factory=PoolSettings)
    fleet: Annotated[FleetConfig | None, GATEWAY_AGAIN] = None

    @property
    def home(self) -> Path:
        """The deployment's own folder in the state directory (key, logs)."""
        return self.state_dir / self.name

    @property
    def logs_dir(self) -> Path:
        """Where `prfaas up` writes one log per engine."""
        return self.home / "logs"

    @property
    def events_folder(self) -> Path:
        """Where engines of this machine publish their KV-cache events; no other user may enter it."""
        return events_folder(self.home)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, in the order of the file."""
        return tuple(instance for cluster in self.clusters for instance in cluster.instances)

    def instance(self, name: str) -> Instance:
        """An instance by name.

        Raises:
            DeploymentError: there is none; the text lists those that are.
        """
        return self._named("instance", name, self.instances)

    def cluster(self, name: str) -> Cluster:
        """A cluster by name.

        Raises:
            DeploymentError: there is none; the text lists those that are.
        """
        return self._named("cluster", name, self.clusters)

    def _named(self, kind: str, name: str, among: Sequence[_Named]) -> _Named:
        for each in among:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in among) or "none"
        raise DeploymentError(self.path, None, "", f'has no {kind} "{name}"; it has {known}')

    def ranks_with(self, instance: Instance) -> tuple[Instance, ...]:
        """All ranks of an instance's data-parallel group, in their order; the instance alone where it is in none."""
        group = instance.data_parallel
        if group is None:
            return (instance,)
        return tuple(each for each in self.instances if each.data_parallel == group)

    def cluster_of(self, instance: Instance) -> Cluster:
        """The cluster that an instance belongs to."""
        return self.cluster(instance.cluster)

    def cache_dtypes(self, cluster: str) -> CacheDtypes:
        """What the engines of a cluster (by name) keep their caches in."""
        return self.model.cache_dtypes(self.cluster(cluster).kv_cache_dtype)

    @property
    def converts_kv(self) -> bool:
        """True if not all clusters keep K and V in a dtype of the same name: between them it is converted."""
        return len({self.cache_dtypes(cluster.name).named for cluster in self.clusters}) > 1

    @property
    def pools(self) -> tuple[PoolNode, ...]:
        """The prefix-cache pools of all machines, in the order of the file."""
        return tuple(node for cluster in self.clusters for node in self._pools_of(cluster))

    def _pools_of(self, cluster: Cluster) -> Iterator[PoolNode]:
        space = cluster.pool
        if space is None or space.kv_port is None:
            return
        # A folder that was named is not this deployment's alone.
        folder = self.home / "pools" if space.path is None else self.home / space.path / self.name
        for name, together in by_pool(cluster.name, cluster.instances).items():
            yield PoolNode(
                name=name,
                cluster=cluster.name,
                host=together[0].host,
                kv_port=space.kv_port,
                memory_bytes=space.memory_bytes,
                ssd_bytes=space.ssd_bytes,
                path=folder / name,
                instances=tuple(instance.name for instance in together),
                tls=any(instance.tls for instance in together),
            )

    def pool_named(self, name: str) -> PoolNode:
        """A pool by name.

        Raises:
            DeploymentError: there is none; the text lists those that are.
        """
        return self._named("pool", name, self.pools)

    def pool_of(self, instance: Instance) -> PoolNode | None:
        """The pool of an instance's machine; None if its cluster has no pools."""
        return next((node for node in self.pools if instance.name in node.instances), None)

    def pool_socket(self, node: PoolNode) -> Path:
        """Where a pool's engines connect to it: a Unix socket of its machine."""
        return self.home / "pools" / f"{node.name}.sock"

    def link(self, source: str, target: str) -> Link | None:
        """The link between two clusters by name, or None if KV can't go that way."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return None

    def with_role(self, role: Role) -> tuple[Instance, ...]:
        """All instances that have a role, in the order of the file."""
        return tuple(instance for instance in self.instances if instance.has_role(role))

    @property
    def pd_clusters(self) -> tuple[Cluster, ...]:
        """Clusters that decode."""
        return tuple(cluster for cluster in self.clusters if cluster.kind == "pd")

    def prefill_clusters_to(self, pd_cluster: str) -> tuple[Cluster, ...]:
        """Other clusters that can prefill and have a link to a pd cluster (by name)."""
        return tuple(
            cluster
            for cluster in self.clusters
            if cluster.name != pd_cluster
            and cluster.with_role("prefill")
            and self.link(cluster.name, pd_cluster) is not None
        )

    def uses_nixl(self, instance: Instance) -> bool:
        """True if an engine has NIXL beside our own transport."""
        return self.reads_kv(self.cluster_of(instance))

    def reads_kv(self, cluster: Cluster) -> bool:
        """True if decode instances of a cluster read KV out of the memory of its prefill instances, by NIXL."""
        return self.engine.local_transfer == "nixl" and cluster.kind == "pd"

    def pulls(self, producer: Instance, consumer: Instance) -> bool:
        """True if the second instance reads KV out of the first one's memory, by NIXL."""
        return self.uses_nixl(consumer) and producer.cluster == consumer.cluster

    def can_decode(self, instance: Instance) -> bool:
        """True if the instance may be given decode work, now or after a change of its role."""
        return self.cluster_of(instance).kind == "pd"

    def needs_certificate(self, name: str) -> bool:
        """True if an instance, a pool, `GATEWAY` or `TOOLS` takes part in anything encrypted."""
        if name in CERTIFICATE_NAMES:
            return any(instance.tls for instance in self.instances)
        pool = next((pool for pool in self.pools if pool.name == name), None)
        member = pool or self.instance(name)
        return (
            member.tls
            or (self.security.encrypt_inside and (pool is not None or self.can_decode(self.instance(name))))
            or any(link.encryption and member.cluster in (link.source, link.target) for link in self.links)
        )

    def events_endpoint(self, instance: Instance) -> EventsEndpoint:
        """Where an instance publishes its KV-cache events, on its own machine. Its KV port tells them to others."""
        return local_endpoint(self.home, instance.name, self.ranks_with(instance).index(instance))
