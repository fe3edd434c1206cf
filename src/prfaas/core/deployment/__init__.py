"""The one YAML file a user writes, read into frozen typed objects."""

from prfaas.core.deployment.addresses import EventsEndpoint, is_loopback, traces_url
from prfaas.core.deployment.applied import AppliedDeployment
from prfaas.core.deployment.containers import ContainerSettings, load_containers
from prfaas.core.deployment.difference import DeploymentDifference, FieldChange, difference
from prfaas.core.deployment.engine import EngineConfig, LocalTransfer, TransferLimits
from prfaas.core.deployment.fleet import FleetConfig
from prfaas.core.deployment.gateway import (
    AdminConfig,
    FirstTokenSource,
    GatewayConfig,
    GatewayLimits,
    RouteDetail,
    TracingConfig,
)
from prfaas.core.deployment.load import load_deployment, load_planned
from prfaas.core.deployment.local_transfer import pulls, uses_nixl
from prfaas.core.deployment.model import ModelRef, ModelSource, default_state_dir
from prfaas.core.deployment.openings import CLIENTS, OPERATORS, Opening, openings_of
from prfaas.core.deployment.planned import (
    EmpiricalLengths,
    FixedLengths,
    LengthsSpec,
    LogNormalLengths,
    PlannedCluster,
    PlannedDeployment,
    TraceFormat,
    TraceLengths,
    UniformLengths,
    WorkloadSpec,
)
from prfaas.core.deployment.pool import EvictionName, PoolNode, PoolSettings, PoolSpace
from prfaas.core.deployment.security import (
    CERTIFICATE_NAMES,
    CONTROL,
    GATEWAY,
    OBSERVERS,
    TOOLS,
    EngineTls,
    Security,
)
from prfaas.core.deployment.site import Machine, Site, gateway_site, site_named, sites_of
from prfaas.core.deployment.source import DeploymentError
from prfaas.core.deployment.types import (
    BUILT_IN_POLICIES,
    DEFAULT_POLICY,
    POLICY_ENTRY_POINTS,
    SYNTHETIC,
    Cluster,
    ControlConfig,
    Deployment,
    Instance,
    KvPeer,
    Link,
    Role,
    Routing,
    Slo,
)

__all__ = [
    "BUILT_IN_POLICIES",
    "CERTIFICATE_NAMES",
    "CLIENTS",
    "CONTROL",
    "DEFAULT_POLICY",
    "GATEWAY",
    "OBSERVERS",
    "OPERATORS",
    "POLICY_ENTRY_POINTS",
    "SYNTHETIC",
    "TOOLS",
    "AdminConfig",
    "AppliedDeployment",
    "Cluster",
    "ContainerSettings",
    "ControlConfig",
    "Deployment",
    "DeploymentDifference",
    "DeploymentError",
    "EmpiricalLengths",
    "EngineConfig",
    "EngineTls",
    "EventsEndpoint",
    "EvictionName",
    "FieldChange",
    "FirstTokenSource",
    "FixedLengths",
    "FleetConfig",
    "GatewayConfig",
    "GatewayLimits",
    "Instance",
    "KvPeer",
    "LengthsSpec",
    "Link",
    "LocalTransfer",
    "LogNormalLengths",
    "Machine",
    "ModelRef",
    "ModelSource",
    "Opening",
    "PlannedCluster",
    "PlannedDeployment",
    "PoolNode",
    "PoolSettings",
    "PoolSpace",
    "Role",
    "RouteDetail",
    "Routing",
    "Security",
    "Site",
    "Slo",
    "TraceFormat",
    "TraceLengths",
    "TracingConfig",
    "TransferLimits",
    "UniformLengths",
    "WorkloadSpec",
    "default_state_dir",
    "difference",
    "gateway_site",
    "is_loopback",
    "load_containers",
    "load_deployment",
    "load_planned",
    "openings_of",
    "pulls",
    "site_named",
    "sites_of",
    "traces_url",
    "uses_nixl",
]
