"""The one YAML file a user writes, read into frozen typed objects."""

from prfaas.deployment.errors import DeploymentError
from prfaas.deployment.load import default_state_dir, load_deployment
from prfaas.deployment.types import (
    Cluster,
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
)

__all__ = [
    "Cluster",
    "Deployment",
    "DeploymentError",
    "EngineConfig",
    "GatewayConfig",
    "Instance",
    "KvPeer",
    "Link",
    "ModelRef",
    "Routing",
    "Security",
    "Slo",
    "TransferLimits",
    "default_state_dir",
    "load_deployment",
]
