"""The one YAML file a user writes, read into frozen typed objects."""

from prfaas.core.deployment.addresses import EventsEndpoint, is_loopback, traces_url
from prfaas.core.deployment.difference import AppliedDeployment, DeploymentDifference, difference
from prfaas.core.deployment.engine import EngineConfig, LocalTransfer, TransferLimits
from prfaas.core.deployment.gateway import (
    AdminConfig,
    FirstTokenSource,
    FleetConfig,
    GatewayConfig,
    GatewayLimits,
    TracingConfig,
)
from prfaas.core.deployment.load import load_deployment, load_planned
from prfaas.core.deployment.model import ModelRef, ModelSource, default_state_dir
from prfaas.core.deployment.planned import (
    EmpiricalLengths,
    FixedLengths,
    LogNormalLengths,
    PlannedCluster,
    PlannedDeployment,
    TraceLengths,
    UniformLengths,
)
from prfaas.core.deployment.pool import EvictionName, PoolNode, PoolSettings, PoolSpace
from prfaas.core.deployment.security import (
    CERTIFICATE_NAMES,
    CONTROL,
    GATEWAY,
    TOOLS,
    Security,
)
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
    "CONTROL",
    "DEFAULT_POLICY",
    "GATEWAY",
    "POLICY_ENTRY_POINTS",
    "SYNTHETIC",
    "TOOLS",
    "AdminConfig",
    "AppliedDeployment",
    "Cluster",
    "ControlConfig",
    "Deployment",
    "DeploymentDifference",
    "DeploymentError",
    "EmpiricalLengths",
    "EngineConfig",
    "EventsEndpoint",
    "EvictionName",
    "FirstTokenSource",
    "FixedLengths",
    "FleetConfig",
    "GatewayConfig",
    "GatewayLimits",
    "Instance",
    "KvPeer",
    "Link",
    "LocalTransfer",
    "LogNormalLengths",
    "ModelRef",
    "ModelSource",
    "PlannedCluster",
    "PlannedDeployment",
    "PoolNode",
    "PoolSettings",
    "PoolSpace",
    "Role",
    "Routing",
    "Security",
    "Slo",
    "TraceLengths",
    "TracingConfig",
    "TransferLimits",
    "UniformLengths",
    "default_state_dir",
    "difference",
    "is_loopback",
    "load_deployment",
    "load_planned",
    "traces_url",
]
