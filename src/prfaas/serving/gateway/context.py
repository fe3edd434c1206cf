"""What the parts of one gateway share: whom they ask, what they count, and where large work runs."""

from dataclasses import dataclass

from prfaas.serving.gateway.control_plane import ControlPlane
from prfaas.serving.gateway.engine_client import EngineClient
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.options import GatewayOptions, ThreadOffload


@dataclass(frozen=True, slots=True)
class GatewayContext:
    """Handed to every part that talks to engines or decides."""

    plane: ControlPlane
    client: EngineClient
    metrics: Metrics
    options: GatewayOptions
    json_threads: ThreadOffload
    """For JSON bodies and hashes of long prompts."""
    max_model_len: int
    """Tokens of a prompt and its answer together, at most."""
