"""The shape of a deployment file, field by field.

Only what loads and checks a file uses it: everything else sees `types.py`.
"""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
)

from prfaas.core.deployment.addresses import traces_url
from prfaas.core.deployment.engine import LocalTransfer
from prfaas.core.deployment.field_types import (
    GIVEN,
    LABEL_PATTERN,
    SECTION,
    Arg,
    Bandwidth,
    Cidr,
    EnvName,
    EnvValue,
    Finite,
    Host,
    HostName,
    ImageName,
    Name,
    PolicyName,
    PolicySetting,
    Port,
    Positive,
    PositiveFloat,
    Seconds,
    Size,
    SizeOrZero,
    SocketSeconds,
    Text,
    Weight,
)
from prfaas.core.deployment.fleet_section import FleetSection
from prfaas.core.deployment.gateway import FirstTokenSource, RouteDetail
from prfaas.core.deployment.pool import EvictionName
from prfaas.core.deployment.security import EngineTls
from prfaas.core.deployment.types import DEFAULT_POLICY
from prfaas.core.kv import KvCacheDtype, ModelDtype
from prfaas.core.units import GIB, MIB


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    """Which model, under which name, up to which length. Exactly one of the six that name it.

    `published` and `config` are enough to plan with, and then the name and the length may be left out.
    """

    served_name: Annotated[Text | None, GIVEN] = None
    max_model_len: Annotated[Positive | None, GIVEN] = None
    path: Text | None = None
    tiny: Text | None = None
    trained: Text | None = None
    hub: Text | None = None
    revision: Annotated[Text | None, GIVEN] = None
    published: Text | None = None
    config: Text | None = None
    adapters: dict[Name, Text] = {}
    kv_cache_dtype: KvCacheDtype = "auto"
    dtype: ModelDtype = "auto"


class InstanceSection(_Section):
    """One vLLM server."""

    name: Name
    roles: Annotated[list[Literal["prefill", "decode"]], Field(min_length=1)]
    host: Host
    http_port: Port
    kv_port: Port
    tensor_parallel: Positive = 1
    events_port: Annotated[Port | None, GIVEN] = None
    nixl_port: Annotated[Port | None, GIVEN] = None


class MachinePoolSection(_Section):
    """What one machine of a cluster keeps of computed prefixes. Without a `kv_port` it can only be planned with."""

    memory: Annotated[Size, Field(ge=MIB)]
    ssd: SizeOrZero = 0
    path: Annotated[Text | None, GIVEN] = None
    kv_port: Annotated[Port | None, GIVEN] = None
    events_port: Annotated[Port | None, GIVEN] = None


class ClusterSection(_Section):
    """Instances that share a network: `instances` to start, or an `instance_count` to plan with."""

    name: Name
    kind: Literal["prfaas", "pd"]
    hardware: Text
    instances: Annotated[Annotated[list[InstanceSection], Field(min_length=1)] | None, GIVEN] = None
    instance_count: Annotated[Positive | None, GIVEN] = None
    gpus_per_instance: Annotated[Positive | None, GIVEN] = None
    tensor_parallel: Annotated[Positive | None, GIVEN] = None
    profile: Annotated[Text | None, GIVEN] = None
    speedup: Annotated[PositiveFloat | None, GIVEN] = None
    prefix_hit_ratio: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, GIVEN] = None
    kv_cache_dtype: Annotated[KvCacheDtype | None, GIVEN] = None
    preemptible: bool = False
    kills_per_hour: Annotated[Annotated[float, Field(gt=0, le=3600)] | None, GIVEN] = None
    extra_args: list[Arg] = []
    pool: Annotated[MachinePoolSection | None, SECTION] = None


class LinkSection(_Section):
    """A directed path for KV between clusters."""

    source: Name
    target: Name
    bandwidth: Bandwidth
    connections: Annotated[int, Field(ge=1, le=64)] = 4
    connection_bandwidth: Annotated[Bandwidth | None, GIVEN] = None
    rtt_s: Annotated[float, Field(ge=0, lt=60)] = 0.0
    encryption: bool = True
    compression: bool = False
    egress_per_gb: Annotated[Weight | None, GIVEN] = None
    mapping_bandwidth: Annotated[Bandwidth | None, GIVEN] = None


class RoutingSection(_Section):
    """When to prefill elsewhere. Without `threshold_tokens` the threshold is found while running."""

    policy: PolicyName = DEFAULT_POLICY
    threshold_tokens: Annotated[Positive | None, GIVEN] = None
    params: Annotated[dict[Text, PolicySetting], SECTION] = {}


class ControlSection(_Section):
    """How fast the scheduler's slow side moves."""

    threshold_period_s: Seconds = 30.0
    allocation_period_s: Seconds = 60.0
    window_s: Seconds = 600.0
    stale_after_s: Seconds = 5.0
    silence_s: Seconds = 2.5
    stall_s: Seconds = 60.0
    allocation: bool = True
    forecast_period_s: Annotated[float, Field(ge=0, le=31 * 86_400.0)] = 86_400.0


class SloSection(_Section):
    """What users should see."""

    ttft_s: Seconds | None = None
    ttft_statistic: Literal["mean", "p90"] = "p90"
    tpot_s: Seconds | None = None
    tokens_per_s: PositiveFloat | None = None


class LengthsSection(_Section):
    """How long prompts are. Which of the other fields are needed depends on `distribution`."""

    distribution: Literal["lognormal", "uniform", "fixed", "empirical", "trace"]
    mu: Finite | None = None
    sigma: PositiveFloat | None = None
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    tokens: PositiveFloat | None = None
    lengths: Annotated[list[PositiveFloat], Field(min_length=1)] | None = None
    weights: Annotated[list[Weight], Field(min_length=1)] | None = None
    path: Text | None = None
    format: Literal["mooncake", "azure", "burstgpt", "servegen", "jsonl"] | None = None
    columns: dict[Text, Text] | None = None


class WorkloadSection(_Section):
    """The traffic to plan for."""

    lengths: LengthsSection
    output_tokens: Annotated[PositiveFloat | None, GIVEN] = None
    prefix_hit_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    load: Annotated[float, Field(gt=0, lt=1)] = 0.7


class PricesSection(_Section):
    """What things cost, in any currency: further fields are hardware, each with the price of a GPU-hour."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, PositiveFloat]

    egress_per_gb: Weight = 0.0

    @property
    def per_gpu_hour(self) -> dict[str, float]:
        """By hardware."""
        return dict(self.__pydantic_extra__)


class AdminSection(_Section):
    """Where operators connect. Without a `port`: the one after the gateway's that nothing else of the file uses."""

    host: Host = "127.0.0.1"
    port: Annotated[Port | None, GIVEN] = None
    token_file: Annotated[Text | None, GIVEN] = None


class LimitsSection(_Section):
    """What the gateway takes on at most."""

    requests: Positive = 8192
    queue_s: Seconds = 60.0
    bodies: Annotated[Size, Field(ge=MIB)] = GIB
    body_values: Positive = 1_000_000


class TracingSection(_Section):
    """Where traces go, over OTLP/HTTP."""

    endpoint: Annotated[Text, AfterValidator(traces_url)]
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    headers_file: Annotated[Text | None, GIVEN] = None


class GatewaySection(_Section):
    """Where clients and operators connect, what clients are told, and how much they get."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    first_byte_s: Seconds = 1800.0
    idle_s: Seconds = 600.0
    admin: AdminSection = AdminSection()
    hosts: list[HostName] = []
    route_header: RouteDetail = "short"
    shadow: Annotated[float, Field(ge=0, le=1)] = 0.0
    first_token: FirstTokenSource = "decode"
    limits: Annotated[LimitsSection, SECTION] = LimitsSection()
    tracing: Annotated[TracingSection | None, GIVEN] = None
    cluster: Annotated[Name | None, GIVEN] = None


class SecuritySection(_Section):
    """Where key and certificates lie, relative to the deployment's folder in the state directory; what is encrypted."""

    key_file: Text = "key"
    certificates: Text = "certificates"
    encrypt_inside: bool = False
    engine_tls: EngineTls = "elsewhere"
    tenant_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")] | None = None
    tenant_weights: dict[Text, Annotated[int, Field(ge=1, le=1000)]] = {}


class EngineSection(_Section):
    """How every vLLM server is started."""

    max_num_batched_tokens: Positive = 2048
    max_num_seqs: Positive = 16
    kv_cache_gib: Annotated[PositiveFloat, Field(le=1 << 20)] | None = None
    staging: Size = 4 * GIB
    transfer_block: Annotated[Size, Field(ge=64 * 1024, le=64 * MIB)] = MIB
    prefix_cache_retention_tokens: Annotated[int, Field(ge=0)] | None = None
    extra_args: list[Arg] = []
    env: dict[EnvName, EnvValue] = {}
    log_size: Annotated[Size, Field(ge=64 * 1024)] = 64 * MIB
    log_files: Annotated[int, Field(ge=1, le=1000)] = 3
    local_transfer: LocalTransfer = "prfaas"


class PoolSection(_Section):
    """What all pools have in common."""

    checkpoint_tokens: Annotated[int, Field(ge=0)] = 32768
    tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    eviction: EvictionName = "lru"
    staging: Annotated[Size, Field(ge=MIB)] = 256 * MIB
    timeout_s: Annotated[Seconds, Field(le=30)] = 2.0


class TransferSection(_Section):
    """How long each step of a KV transfer may take, and whether its pages are checked."""

    lease_s: Seconds = 60.0
    load_wait_s: Seconds = 30.0
    staging_wait_s: Seconds = 20.0
    staging_ttl_s: Seconds = 60.0
    silence_s: Seconds = 3.0
    resume_s: Seconds = 2.5
    decode_lead_s: Annotated[float, Field(ge=0, le=60)] = 1.0
    progress_deadline_s: Seconds = 8.0
    page_digests: bool = True
    checksums: bool = True
    user_timeout_s: SocketSeconds = 10.0
    keepalive_s: Annotated[SocketSeconds, Field(ge=1)] = 10.0


class ContainersSection(_Section):
    """What `prfaas emit` needs to know of images, volumes and the networks of pods."""

    gateway_image: ImageName = "prfaas-gateway"
    engine_image: ImageName = "prfaas-engine"
    namespace: Annotated[str, Field(pattern=LABEL_PATTERN)] = "prfaas"
    models_claim: Annotated[Annotated[str, Field(pattern=LABEL_PATTERN)] | None, GIVEN] = None
    gpu_resource: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = "nvidia.com/gpu"
    pod_monitor: bool = True
    monitoring_namespace: Annotated[str, Field(pattern=LABEL_PATTERN)] = "monitoring"
    networks: dict[Name, Annotated[list[Cidr], Field(min_length=1)]] = {}


class DeploymentFile(_Section):
    """The whole file."""

    name: Name
    model: ModelSection
    clusters: Annotated[list[ClusterSection], Field(min_length=1)]
    links: list[LinkSection] = []
    routing: Annotated[RoutingSection, SECTION] = RoutingSection()
    control: Annotated[ControlSection, SECTION] = ControlSection()
    slo: SloSection = SloSection()
    workload: Annotated[WorkloadSection | None, SECTION] = None
    prices: PricesSection = PricesSection()
    gateway: GatewaySection = GatewaySection()
    fleet: Annotated[FleetSection | None, SECTION] = None
    security: SecuritySection = SecuritySection()
    engine: EngineSection = EngineSection()
    transfer: TransferSection = TransferSection()
    pool: Annotated[PoolSection, SECTION] = PoolSection()
    containers: Annotated[ContainersSection, SECTION] = ContainersSection()
