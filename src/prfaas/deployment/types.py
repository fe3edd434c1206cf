"""A deployment file in typed, frozen form: what runs where, who may send KV to whom, with which limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas.deployment.errors import DeploymentError

Role = Literal["prefill", "decode"]
ClusterKind = Literal["prfaas", "pd"]
Policy = Literal["threshold", "local", "offload"]

INTRA_CLUSTER_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class ModelRef:
    """The model that every engine serves: a checkpoint directory, or a tiny one made by prfaas."""

    served_name: str
    max_model_len: int
    path: Path
    tiny: str | None


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM server. Tensor-parallel rank r listens for KV at `kv_port + r`."""

    name: str
    cluster: str
    roles: tuple[Role, ...]
    host: str
    http_port: int
    kv_port: int
    tensor_parallel: int

    @property
    def url(self) -> str:
        """Base of the instance's HTTP API, without a trailing slash."""
        return f"http://{host_in_url(self.host)}:{self.http_port}"

    @property
    def kv_ports(self) -> range:
        """KV ports of all tensor-parallel ranks, in rank order."""
        return range(self.kv_port, self.kv_port + self.tensor_parallel)

    def has_role(self, role: Role) -> bool:
        """True if the instance may be given this kind of work."""
        return role in self.roles


@dataclass(frozen=True, slots=True)
class Cluster:
    """Instances that share a network: `prfaas` ones only prefill, `pd` ones decode (and may prefill)."""

    name: str
    kind: ClusterKind
    hardware: str
    instances: tuple[Instance, ...]

    def with_role(self, role: Role) -> tuple[Instance, ...]:
        """The cluster's instances that have a role."""
        return tuple(instance for instance in self.instances if instance.has_role(role))


@dataclass(frozen=True, slots=True)
class Link:
    """A directed path for KV between two clusters. All transfers on it share `bandwidth_bits_per_s`."""

    source: str
    target: str
    bandwidth_bits_per_s: float
    connections: int

    @property
    def name(self) -> str:
        """Name of the bandwidth budget: "source->target"."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class KvPeer:
    """An instance that another one may send KV to, and the budget it shares. No bandwidth means unpaced."""

    instance: Instance
    link: str
    connections: int
    bandwidth_bits_per_s: float | None


@dataclass(frozen=True, slots=True)
class Routing:
    """When a prompt is prefilled elsewhere: over the threshold of uncached tokens, never, always."""

    policy: Policy
    threshold_tokens: int


@dataclass(frozen=True, slots=True)
class Slo:
    """What users should see: time to first token and time per further token, if stated."""

    ttft_s: float | None
    tpot_s: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """How fast each answer grows, at least: the inverse of `tpot_s`."""
        return None if self.tpot_s is None else 1 / self.tpot_s


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Where clients connect."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Base of the gateway's HTTP API as seen on its own machine, without a trailing slash."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{host_in_url(host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class Security:
    """The path of the key that authenticates engines and seals tickets; the key itself is never kept here."""

    key_file: Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How every vLLM server is started.

    `kv_cache_gib` None leaves the size to vLLM (not possible on CPUs). `prefix_cache_retention_tokens` None
    means every 256 tokens on CPUs and vLLM's default elsewhere; it only matters to models with state or
    windows.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_gib: int | None
    staging_bytes: int
    transfer_block_bytes: int
    prefix_cache_retention_tokens: int | None
    extra_args: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How long each step of a KV transfer may take before the request goes on without it."""

    lease_s: float
    load_wait_s: float
    staging_wait_s: float
    staging_ttl_s: float
    progress_deadline_s: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything a deployment file says, checked. `state_dir` is where models, keys and logs are kept."""

    name: str
    path: Path
    state_dir: Path
    model: ModelRef
    clusters: tuple[Cluster, ...]
    links: tuple[Link, ...]
    routing: Routing
    slo: Slo
    gateway: GatewayConfig
    security: Security
    engine: EngineConfig
    transfer: TransferLimits

    @property
    def home(self) -> Path:
        """The deployment's own folder in the state directory (key, logs)."""
        return self.state_dir / self.name

    @property
    def logs_dir(self) -> Path:
        """Where `prfaas up` writes one log per engine."""
        return self.home / "logs"

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances, in the order of the file."""
        return tuple(instance for cluster in self.clusters for instance in cluster.instances)

    def instance(self, name: str) -> Instance:
        """An instance by name.

        Raises:
            DeploymentError: there is none; the text lists those that are.
        """
        for instance in self.instances:
            if instance.name == name:
                return instance
        known = ", ".join(instance.name for instance in self.instances)
        raise DeploymentError(self.path, None, "", f'has no instance "{name}"; it has {known}')

    def cluster(self, name: str) -> Cluster:
        """A cluster by name.

        Raises:
            DeploymentError: there is none; the text lists those that are.
        """
        for cluster in self.clusters:
            if cluster.name == name:
                return cluster
        known = ", ".join(cluster.name for cluster in self.clusters)
        raise DeploymentError(self.path, None, "", f'has no cluster "{name}"; it has {known}')

    def cluster_of(self, instance: Instance) -> Cluster:
        """The cluster that an instance belongs to."""
        return self.cluster(instance.cluster)

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

    def peers_of(self, instance: Instance) -> tuple[KvPeer, ...]:
        """Decode instances that an instance may send KV to: its own cluster's, and those a link leads to."""
        if not instance.has_role("prefill"):
            return ()
        peers = []
        for target in self.with_role("decode"):
            if target.name == instance.name:
                continue
            if target.cluster == instance.cluster:
                peers.append(KvPeer(target, target.cluster, INTRA_CLUSTER_CONNECTIONS, None))
            elif (link := self.link(instance.cluster, target.cluster)) is not None:
                peers.append(KvPeer(target, link.name, link.connections, self.share_bits_per_s(link)))
        return tuple(peers)

    def share_bits_per_s(self, link: Link) -> float:
        """What one sending engine may use of a link: senders pace themselves and don't know of each other."""
        return link.bandwidth_bits_per_s / len(self.cluster(link.source).with_role("prefill"))

    def producers_for(self, instance: Instance) -> tuple[Instance, ...]:
        """Instances that may send KV to this one; the inverse of `peers_of`."""
        return tuple(
            other
            for other in self.instances
            if any(peer.instance.name == instance.name for peer in self.peers_of(other))
        )


def host_in_url(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
