"""The one YAML file a user writes, read into frozen typed objects.

Each section is a class whose fields say their defaults, bounds and meanings. Where to look first:

- `model`: model.py; `clusters`, `links`, `routing`, `control` (periods, what counts as silent) and `slo`: types.py;
- `gateway` (limits, timeouts of answers, admin, tracing) and `fleet`: gateway.py; `security`: security.py;
- `engine` and `transfer` (timeouts and heartbeats of KV transfers): engine.py; `pool`: pool.py;
- `workload`: planned.py; `prices`, `containers` and the file as a whole: schema.py.

`load.py` reads a file, `checks.py` has the rules between sections, `difference.py` compares two files, and `peers.py`
says who sends KVCache to whom.
"""

from prfaas.core.deployment.addresses import EventsEndpoint, is_loopback
from prfaas.core.deployment.difference import AppliedDeployment, DeploymentDifference, difference
from prfaas.core.deployment.engine import EngineConfig, LocalTransfer, TransferLimits
from prfaas.core.deployment.gateway import (
    AdminConfig,
    ExperimentConfig,
    FirstTokenSource,
    FleetConfig,
    GatewayConfig,
    GatewayLimits,
    LedgerConfig,
    TracingConfig,
)
from prfaas.core.deployment.load import load_deployment, load_planned
from prfaas.core.deployment.model import ModelSource, default_state_dir
from prfaas.core.deployment.planned import PlannedCluster, PlannedDeployment
from prfaas.core.deployment.pool import PoolNode, PoolSettings, PoolSpace
from prfaas.core.deployment.security import CERTIFICATE_NAMES, CONTROL, GATEWAY, TOOLS
from prfaas.core.deployment.source import DeploymentError
from prfaas.core.deployment.types import (
    Cluster,
    ControlConfig,
    Deployment,
    Instance,
    Link,
    Role,
    Routing,
    Slo,
)

__all__ = [
    "CERTIFICATE_NAMES",
    "CONTROL",
    "GATEWAY",
    "TOOLS",
    "AdminConfig",
    "AppliedDeployment",
    "Cluster",
    "ControlConfig",
    "Deployment",
    "DeploymentDifference",
    "DeploymentError",
    "EngineConfig",
    "EventsEndpoint",
    "ExperimentConfig",
    "FirstTokenSource",
    "FleetConfig",
    "GatewayConfig",
    "GatewayLimits",
    "Instance",
    "LedgerConfig",
    "Link",
    "LocalTransfer",
    "ModelSource",
    "PlannedCluster",
    "PlannedDeployment",
    "PoolNode",
    "PoolSettings",
    "PoolSpace",
    "Role",
    "Routing",
    "Slo",
    "TracingConfig",
    "TransferLimits",
    "default_state_dir",
    "difference",
    "is_loopback",
    "load_deployment",
    "load_planned",
]
