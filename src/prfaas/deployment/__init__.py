"""The one YAML file a user writes, read into frozen typed objects."""

from prfaas.deployment.errors import DeploymentError
from prfaas.deployment.events import EventsEndpoint
from prfaas.deployment.load import default_state_dir, load_deployment
from prfaas.deployment.load_planned import load_planned
from prfaas.deployment.planned import (
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
from prfaas.deployment.types import (
    SYNTHETIC,
    Cluster,
    ControlConfig,
    Deployment,
    EngineConfig,
    GatewayConfig,
    Instance,
    KvPeer,
    Link,
    ModelRef,
    Routing,
    Security,
    Slo,
    TransferLimits,
    is_loopback,
)

__all__ = [
    "SYNTHETIC",
    "Cluster",
    "ControlConfig",
    "Deployment",
    "DeploymentError",
    "EmpiricalLengths",
    "EngineConfig",
    "EventsEndpoint",
    "FixedLengths",
    "GatewayConfig",
    "Instance",
    "KvPeer",
    "LengthsSpec",
    "Link",
    "LogNormalLengths",
    "ModelRef",
    "PlannedCluster",
    "PlannedDeployment",
    "Routing",
    "Security",
    "Slo",
    "TraceFormat",
    "TraceLengths",
    "TransferLimits",
    "UniformLengths",
    "WorkloadSpec",
    "default_state_dir",
    "is_loopback",
    "load_deployment",
    "load_planned",
]
