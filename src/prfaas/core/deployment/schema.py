"""The whole deployment file, and those of its sections that the code does not use as they stand in it.

Only what loads and checks a file uses these. All other sections are the objects that the code has: `types.py` and its
like.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from prfaas.core.deployment.addresses import is_loopback
from prfaas.core.deployment.engine import EngineConfig, TransferLimits
from prfaas.core.deployment.field_types import (
    GIVEN,
    SECTION,
    Cidr,
    EnvName,
    EnvValue,
    Flag,
    GatewayReference,
    HostName,
    ImageName,
    Label,
    Name,
    PositiveFloat,
    ResourceName,
    Size,
    Text,
    Toleration,
    Weight,
    needs,
)
from prfaas.core.deployment.gateway import FleetConfig, GatewayConfig
from prfaas.core.deployment.model import ModelSection
from prfaas.core.deployment.planned import WorkloadSpec
from prfaas.core.deployment.pool import PoolSettings
from prfaas.core.deployment.section import Section, docs_of, fields_of
from prfaas.core.deployment.security import Security
from prfaas.core.deployment.types import ClusterSection, ControlConfig, InstanceSection, Link, Routing, Slo
from prfaas.core.yaml_source import FileError, Location, YamlSource


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PricesSection(_Section):
    """What things cost, in any currency: further fields are hardware, each with the price of a GPU-hour."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, PositiveFloat]

    egress_per_gb: Weight = 0.0
    """Of 10^9 bytes over any link."""

    @property
    def per_gpu_hour(self) -> dict[str, float]:
        """By hardware."""
        return dict(self.__pydantic_extra__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSection(Section):
    """What one kind of pod asks of Kubernetes: resources of its container, and which nodes it may run on."""

    cpus: Annotated[PositiveFloat | None, GIVEN] = None
    """Cores that are requested; left out: 4 and 2 for each GPU, of pools 2. None is limited: that would slow it."""
    memory_bytes: Annotated[Size | None, Field(alias="memory"), GIVEN] = None
    """Memory that is requested and the limit, shared memory included; left out: an estimate, and a wider limit."""
    disk_bytes: Annotated[Size | None, Field(alias="disk"), GIVEN] = None
    """Ephemeral storage that is requested and the limit; left out: 10 GiB of an engine, else 1 GiB, no limit."""
    priority_class: Annotated[Label | None, GIVEN] = None
    """Its PriorityClass."""
    node_selector: Mapping[Text, Text] = field(default_factory=dict)
    """Labels that its node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that do not keep it away, as kubectl writes them."""
    env: Mapping[EnvName, EnvValue] = field(default_factory=dict)
    """Further variables of its environment; they are not secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainersSection(Section):
    """What `prfaas emit` needs to know of images, volumes and the networks of pods."""

    gateway_image: ImageName = "prfaas-gateway"
    """Image of gateway, pools and synthetic engines."""
    engine_image: ImageName = "prfaas-engine"
    """Image of vLLM engines."""
    namespace: Label = "prfaas"
    """The Kubernetes namespace."""
    pull_secrets: tuple[Label, ...] = ()
    """Secrets with which nodes pull the images."""
    models_claim: Annotated[Label | None, GIVEN] = None
    """The PersistentVolumeClaim that holds the checkpoint; left out: it is on every machine."""
    models_storage_bytes: Annotated[
        Size | None,
        Field(alias="models_storage"),
        GIVEN,
        needs("models_claim", "is the size of a claim that has no name; give containers.models_claim too"),
    ] = None
    """With it that claim is written, of this size and for many readers; left out: it is there already."""
    storage_class: Annotated[Label | None, GIVEN] = None
    """Of the claims that are written; left out: the cluster's default."""
    hub_token_secret: Annotated[Label | None, GIVEN] = None
    """Secret whose key `token` is the hub's token for those who fetch the model; left out: none is needed."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    """What a pod asks for."""
    rdma_resource: Annotated[ResourceName | None, GIVEN] = None
    """What a pod whose engine has NIXL asks for besides, one of it; left out: nothing."""
    engine_pod: PodSection = PodSection()
    """What pods of engines ask for."""
    pool_pod: PodSection = PodSection()
    """What pools ask for; in a pod with an engine their nodes are the engine's."""
    gateway_pod: PodSection = PodSection()
    """What the gateway's pod asks for."""
    hostnames: tuple[HostName, ...] = ()
    """Names that clients call, for the route and the Ingress to the gateway."""
    route_parent: Annotated[GatewayReference | None, GIVEN] = None
    """Gateway of the Gateway API, as NAMESPACE/NAME, to which an HTTPRoute is attached; left out: no HTTPRoute."""
    ingress_class: Annotated[Label | None, GIVEN] = None
    """Class of an Ingress to the gateway; left out: no Ingress."""
    ingress_tls_secret: Annotated[
        Label | None, GIVEN, needs("ingress_class", "is of an Ingress; give containers.ingress_class too")
    ] = None
    """Secret with the certificate of the Ingress; left out: the controller's own."""
    pod_monitor: Flag = False
    """Whether PodMonitors are written, whose kind only the Prometheus operator brings."""
    monitoring_namespace: Label = "monitoring"
    """Where Prometheus runs."""
    networks: Mapping[Name, Annotated[tuple[Cidr, ...], Field(min_length=1)]] = field(default_factory=dict)
    """From which addresses a cluster's pods are seen elsewhere, by the cluster's name."""


class DeploymentFile(_Section):
    """The whole file."""

    name: Name
    """Of the deployment and of its folder (key, logs)."""
    model: ModelSection
    """What all engines serve."""
    clusters: Annotated[list[ClusterSection], Field(min_length=1)]
    """Where the engines are."""
    links: tuple[Link, ...] = ()
    """How KVCache gets from one cluster to another."""
    routing: Routing = Routing()
    """When a prompt is prefilled elsewhere."""
    control: ControlConfig = ControlConfig()
    """How fast threshold and roles follow the traffic."""
    slo: Slo = Slo()
    """What users should see."""
    gateway: GatewayConfig = GatewayConfig()
    """Where clients and operators connect, and what clients are told."""
    security: Security = Security()
    """How engines know each other, and what is encrypted."""
    engine: EngineConfig = EngineConfig()
    """How every vLLM server is started."""
    transfer: TransferLimits = TransferLimits()
    """How long each step of a KV transfer may take."""
    fleet: Annotated[FleetConfig | None, SECTION] = None
    """The etcd of several gateways."""
    pool: PoolSettings = PoolSettings()
    """What all pools have in common."""
    containers: ContainersSection = ContainersSection()
    """What `prfaas emit` needs to know."""
    workload: Annotated[WorkloadSpec | None, SECTION] = None
    """The traffic to plan for."""
    prices: PricesSection = PricesSection()
    """What things cost."""

    _source: YamlSource = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Readers of files give the source as `context["source"]`."""
        self._source = context["source"]

    @property
    def source(self) -> YamlSource:
        """The file as it was written."""
        return self._source

    def gives(self, location: Location) -> bool:
        """Whether a field stands in the file, whatever its value."""
        return self._source.gives(location)

    def error(self, location: Location, problem: str) -> FileError:
        """The error to raise about a field."""
        return self._source.error(location, problem)

    def require_cluster(self, location: Location, name: str) -> None:
        """Raises DeploymentError where a field names a cluster that there is not."""
        known = [cluster.name for cluster in self.clusters]
        if name not in known:
            raise self.error(location, f'there is no cluster "{name}"; the clusters are {", ".join(known)}')

    @property
    def gateway_cluster(self) -> str | None:
        """The cluster whose network the gateway is in: the file's word, or the only one that decodes."""
        if self.gateway.cluster is not None:
            return self.gateway.cluster
        decoding = [cluster.name for cluster in self.clusters if cluster.kind == "pd"]
        return decoding[0] if len(decoding) == 1 else None

    def speaks_tls(self, cluster: ClusterSection, instance: InstanceSection) -> bool:
        """Whether the gateway and the tools speak TLS with an instance.

        By default they do where prompts would cross to another cluster. What goes to a loopback address stays on this
        machine.
        """
        if self.security.engine_tls != "elsewhere":
            return self.security.engine_tls == "always"
        return cluster.name != self.gateway_cluster and not is_loopback(instance.host)


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12), with the meaning of every field.

    It knows each field by itself. What must fit together between several is said where the file is loaded.
    """
    schema = DeploymentFile.model_json_schema(by_alias=True)
    sections = {each.__name__: each for each in _sections(DeploymentFile)}
    for name, found in ((DeploymentFile.__name__, schema), *schema["$defs"].items()):
        docs = docs_of(sections[name])
        for facts in fields_of(sections[name]).values():
            shown = _as_in_files(found["properties"][facts.name_in_file])
            if facts.name in docs:
                shown["description"] = docs[facts.name]
            # A section's own fields say their defaults.
            if facts.section is not None:
                shown.pop("default", None)
            found["properties"][facts.name_in_file] = shown
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A deployment file of prfaas",
    }


def _as_in_files(shown: dict[str, Any]) -> dict[str, Any]:
    """Without what only the code can say: null, and a default that stands for "left out"."""
    kinds = [each for each in shown.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1:
        shown = {**{name: value for name, value in shown.items() if name != "anyOf"}, **kinds[0]}
    default, least = shown.get("default"), shown.get("minimum")
    if "default" in shown and (default is None or (least is not None and default < least)):
        del shown["default"]
    return {name: value for name, value in shown.items() if name != "title"}


def _sections(section: type) -> Iterator[type]:
    yield section
    for facts in fields_of(section).values():
        for each in facts.sections:
            yield from _sections(each)
