"""The shape of a deployment file, field by field.

Only what loads and checks a file uses it: everything else sees `types.py`.
"""

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from prfaas.core.deployment.addresses import traces_url
from prfaas.core.deployment.engine_args import free_arg
from prfaas.core.deployment.fleet_section import FleetSection
from prfaas.core.deployment.gateway import FirstTokenSource, RouteDetail
from prfaas.core.deployment.pool import EvictionName
from prfaas.core.deployment.security import EngineTls
from prfaas.core.deployment.types import DEFAULT_POLICY
from prfaas.core.kv import KvCacheDtype, ModelDtype
from prfaas.core.units import GIB, MIB, parse_bits_per_s, parse_bytes

# Less without a unit is somebody who thinks in larger units.
_LEAST_PLAIN_BITS_PER_S = 1e6

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

# A label of RFC 1123, which Kubernetes asks of names.
LABEL_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


def _env_name(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of an environment variable")
    return name


def _mapping(value: object) -> object:
    # None is only the default, so that a section whose fields were forgotten doesn't pass for one left out.
    if value is None:
        raise ValueError('must be a mapping ("field: value" lines), not empty')
    return value


def _not_empty(value: object) -> object:
    if value is None:
        raise ValueError("must not be empty")
    return value


def _env_value(value: object) -> object:
    # YAML reads `X: 1` as a number, which is what a person means by "1" here.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _size_or_zero(value: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else parse_bytes(value)


def _bandwidth(value: object) -> float:
    rate = parse_bits_per_s(value)
    if isinstance(value, int | float) and rate < _LEAST_PLAIN_BITS_PER_S:
        raise ValueError(f'{rate:g} would be {rate:g} bit/s; write the unit, for example "{rate:g} Gbit/s"')
    return rate


def _host_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", name):
        raise ValueError(f'{name!r} is no host name; write it without "http://" and without a port')
    return name.lower()


def _cidr(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise ValueError(f'"{text}" is no block of addresses; write it like "10.0.1.0/24"') from None


def _policy_name(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+(:[A-Za-z_][\w.]*)?", name):
        raise ValueError(
            f'"{name}" is no policy; write a name, for example "tilted", or package.module:Class'
        )
    return name


def _setting(value: object) -> float | str:
    if not isinstance(value, int | float | str) or value != value:
        raise ValueError("must be a number, a word, or true or false")
    return value


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
HostName = Annotated[str, AfterValidator(_host_name)]
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Bandwidth = Annotated[float, BeforeValidator(_bandwidth)]
Size = Annotated[int, BeforeValidator(parse_bytes)]
SizeOrZero = Annotated[int, BeforeValidator(_size_or_zero)]
Arg = Annotated[str, AfterValidator(free_arg)]
EnvName = Annotated[str, AfterValidator(_env_name)]
EnvValue = Annotated[str, BeforeValidator(_env_value)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Cidr = Annotated[str, AfterValidator(_cidr)]
ImageName = Annotated[str, Field(pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$")]
PolicyName = Annotated[str, AfterValidator(_policy_name)]
PolicySetting = Annotated[float | str, PlainValidator(_setting)]
_GIVEN = BeforeValidator(_not_empty)
_SECTION = BeforeValidator(_mapping)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    """Which model, under which name, up to which length. Exactly one of `path`, `tiny`, `published`, `config`.

    The last two are enough to plan with, and then the name and the length may be left out.
    """

    served_name: Annotated[Text | None, _GIVEN] = None
    max_model_len: Annotated[Positive | None, _GIVEN] = None
    path: Text | None = None
    tiny: Text | None = None
    published: Text | None = None
    config: Text | None = None
    adapters: dict[Name, Text] = {}
    kv_cache_dtype: KvCacheDtype = "auto"
    dtype: ModelDtype = "auto"


class InstanceSection(_Section):
    """One vLLM server."""

    name: Name
    roles: Annotated[list[Literal["prefill", "decode"]], Field(min_length=1)]
    host: Text
    http_port: Port
    kv_port: Port
    tensor_parallel: Positive = 1
    events_port: Annotated[Port | None, _GIVEN] = None


class MachinePoolSection(_Section):
    """What one machine of a cluster keeps of computed prefixes. Without a `kv_port` it can only be planned with."""

    memory: Annotated[Size, Field(ge=MIB)]
    ssd: SizeOrZero = 0
    path: Annotated[Text | None, _GIVEN] = None
    kv_port: Annotated[Port | None, _GIVEN] = None
    events_port: Annotated[Port | None, _GIVEN] = None


class ClusterSection(_Section):
    """Instances that share a network: `instances` to start, or an `instance_count` to plan with."""

    name: Name
    kind: Literal["prfaas", "pd"]
    hardware: Text
    instances: Annotated[Annotated[list[InstanceSection], Field(min_length=1)] | None, _GIVEN] = None
    instance_count: Annotated[Positive | None, _GIVEN] = None
    gpus_per_instance: Annotated[Positive | None, _GIVEN] = None
    tensor_parallel: Annotated[Positive | None, _GIVEN] = None
    profile: Annotated[Text | None, _GIVEN] = None
    speedup: Annotated[PositiveFloat | None, _GIVEN] = None
    prefix_hit_ratio: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, _GIVEN] = None
    preemptible: bool = False
    kills_per_hour: Annotated[Annotated[float, Field(gt=0, le=3600)] | None, _GIVEN] = None
    pool: Annotated[MachinePoolSection | None, _SECTION] = None


class LinkSection(_Section):
    """A directed path for KV between clusters."""

    source: Name
    target: Name
    bandwidth: Bandwidth
    connections: Annotated[int, Field(ge=1, le=64)] = 4
    connection_bandwidth: Annotated[Bandwidth | None, _GIVEN] = None
    rtt_s: Annotated[float, Field(ge=0, lt=60)] = 0.0
    encryption: bool = True
    compression: bool = False
    egress_per_gb: Annotated[Weight | None, _GIVEN] = None


class RoutingSection(_Section):
    """When to prefill elsewhere. Without `threshold_tokens` the threshold is found while running."""

    policy: PolicyName = DEFAULT_POLICY
    threshold_tokens: Annotated[Positive | None, _GIVEN] = None
    params: Annotated[dict[Text, PolicySetting], _SECTION] = {}


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
    output_tokens: Annotated[PositiveFloat | None, _GIVEN] = None
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

    host: Text = "127.0.0.1"
    port: Annotated[Port | None, _GIVEN] = None
    token_file: Annotated[Text | None, _GIVEN] = None


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
    headers_file: Annotated[Text | None, _GIVEN] = None


class GatewaySection(_Section):
    """Where clients and operators connect, what clients are told, and how much they get."""

    host: Text = "127.0.0.1"
    port: Port = 8000
    first_byte_s: Seconds = 1800.0
    idle_s: Seconds = 600.0
    admin: AdminSection = AdminSection()
    hosts: list[HostName] = []
    route_header: RouteDetail = "short"
    shadow: Annotated[float, Field(ge=0, le=1)] = 0.0
    first_token: FirstTokenSource = "decode"
    limits: Annotated[LimitsSection, _SECTION] = LimitsSection()
    tracing: Annotated[TracingSection | None, _GIVEN] = None
    cluster: Annotated[Name | None, _GIVEN] = None


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
    kv_cache_gib: Positive | None = None
    staging: Size = 4 * GIB
    transfer_block: Annotated[Size, Field(ge=64 * 1024, le=64 * MIB)] = MIB
    prefix_cache_retention_tokens: Annotated[int, Field(ge=0)] | None = None
    extra_args: list[Arg] = []
    env: dict[EnvName, EnvValue] = {}
    log_size: Annotated[Size, Field(ge=64 * 1024)] = 64 * MIB
    log_files: Annotated[int, Field(ge=1, le=1000)] = 3


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
    user_timeout_s: Seconds = 10.0
    keepalive_s: Annotated[Seconds, Field(ge=1)] = 10.0


class ContainersSection(_Section):
    """What `prfaas emit` needs to know of images, volumes and the networks of pods."""

    gateway_image: ImageName = "prfaas-gateway"
    engine_image: ImageName = "prfaas-engine"
    namespace: Annotated[str, Field(pattern=LABEL_PATTERN)] = "prfaas"
    models_claim: Annotated[Annotated[str, Field(pattern=LABEL_PATTERN)] | None, _GIVEN] = None
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
    routing: Annotated[RoutingSection, _SECTION] = RoutingSection()
    control: Annotated[ControlSection, _SECTION] = ControlSection()
    slo: SloSection = SloSection()
    workload: Annotated[WorkloadSection | None, _SECTION] = None
    prices: PricesSection = PricesSection()
    gateway: GatewaySection = GatewaySection()
    fleet: Annotated[FleetSection | None, _SECTION] = None
    security: SecuritySection = SecuritySection()
    engine: EngineSection = EngineSection()
    transfer: TransferSection = TransferSection()
    pool: Annotated[PoolSection, _SECTION] = PoolSection()
    containers: Annotated[ContainersSection, _SECTION] = ContainersSection()
