"""What one gateway takes on at most, before it says 429."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """The defaults are generous: they keep a gateway alive, and do not shape ordinary load."""

    requests: int = 8192
    """Generating requests that are open at a time."""
    queue_s: float = 60.0
    """Predicted seconds that a new request would wait for its prefill, or for a seat at its decode instance."""
    bodies_bytes: int = 1 << 30
    """Bytes of all open requests' bodies."""
    body_values: int = 1_000_000
    """JSON values of one body. Token ids of a prompt do not count: they never become objects."""
