"""Where clients and operators connect, what they are told, and what one gateway takes on before it says 429."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prfaas.core.deployment.addresses import host_in_url

RouteDetail = Literal["short", "full"]
FirstTokenSource = Literal["decode", "prefill"]


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


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """Where operators connect: metrics, the deployment's state, and what became of each request."""

    host: str
    port: int
    """0: any port that is free."""
    token_file: Path | None = None
    """File of the bearer token that requests must bear; None: none is asked for, which needs a loopback host."""

    @property
    def url(self) -> str:
        """Base of the operators' pages as seen on the gateway's own machine, without a trailing slash."""
        return _url_on_its_machine(self.host, self.port)


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where traces of requests go, and of how many requests. The gateway and the engines send theirs themselves."""

    endpoint: str
    """The collector's URL for traces over OTLP/HTTP."""
    sample_ratio: float = 1.0
    """Share of the requests that are traced, of those whose client has not decided it."""
    headers_file: Path | None = None
    """File of HTTP headers for the collector, such as a token; None: none."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Where clients and operators connect, and what clients are told."""

    host: str
    port: int
    admin: AdminConfig = AdminConfig("127.0.0.1", 0)
    hosts: tuple[str, ...] = ()
    """Further names by which operators may call the gateway: a load balancer's, or a Kubernetes Service's."""
    route_header: RouteDetail = "short"
    """Whether `x-prfaas-route` tells every client the numbers that decided (`full`), or only a named tenant."""
    shadow: float = 0.0
    """Share of the requests with a transfer that are computed again on a plain path and compared."""
    first_token: FirstTokenSource = "decode"
    """Who samples an answer's first token where the prompt is prefilled elsewhere than at the decode instance."""
    first_byte_s: float = 1800.0
    """How long an engine may take until its answer begins."""
    idle_s: float = 600.0
    """How long an answer that has begun may pause."""
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    cluster: str | None = None
    """The cluster whose network the gateway is in; None: none of them."""
    tracing: TracingConfig | None = None
    """None: what OTEL_* variables of the environment say."""

    @property
    def url(self) -> str:
        """Base of the gateway's HTTP API as seen on its own machine, without a trailing slash."""
        return _url_on_its_machine(self.host, self.port)


def _url_on_its_machine(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{host_in_url(host)}:{port}"
