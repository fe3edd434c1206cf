"""Where clients and operators connect, what they are told, and what one gateway takes on before it says 429."""

from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from prfaas.core.deployment.addresses import host_in_url, is_loopback, traces_url
from prfaas.core.deployment.field_types import (
    GIVEN,
    FileBeside,
    HomeFile,
    Host,
    HostName,
    Name,
    PolicyName,
    Port,
    Positive,
    Seconds,
    Share,
    Size,
    Text,
    matching,
)
from prfaas.core.deployment.section import EVERYTHING, GATEWAY_AGAIN, LIVE, Section
from prfaas.core.units import GIB, MIB

RouteDetail = Literal["short", "full"]
FirstTokenSource = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class GatewayLimits(Section, on_change=LIVE):
    """The defaults are generous: they keep a gateway alive, and do not shape ordinary load."""

    requests: Positive = 8192
    """Answers that are wanted at a time, each prompt and sample of a request one."""
    queue_s: Seconds = 60.0
    """Predicted seconds that a new request would wait for its prefill, or for a seat at its decode instance."""
    bodies_bytes: Annotated[Size, Field(alias="bodies", ge=MIB)] = GIB
    """Bytes of all open requests' bodies."""
    body_values: Positive = 1_000_000
    """JSON values of one body. Token ids of a prompt do not count: they never become objects."""


@dataclass(frozen=True, slots=True)
class AdminConfig(Section, on_change=GATEWAY_AGAIN):
    """Where operators connect: metrics, the deployment's state, and what became of each request."""

    host: Host = "127.0.0.1"
    """Where operators connect."""
    # 0, which no file can say, is any that is free.
    port: Annotated[Port, GIVEN] = 0
    """Their port; left out: the first one after the gateway's that nothing else of the file uses."""
    token_file: Annotated[HomeFile | None, GIVEN] = None
    """File of the bearer token that operators show; needed unless `host` is loopback."""

    @property
    def url(self) -> str:
        """Base of the operators' pages as seen on the gateway's own machine, without a trailing slash."""
        return _url_on_its_machine(self.host, self.port)


@dataclass(frozen=True, slots=True)
class TracingConfig(Section, on_change=EVERYTHING):
    """Where traces of requests go, and of how many requests. The gateway and the engines send theirs themselves."""

    endpoint: Annotated[Text, AfterValidator(traces_url)]
    """The collector's URL for traces over OTLP/HTTP."""
    sample_ratio: Share = 1.0
    """Share of the requests that are traced, of those whose client has not decided it."""
    headers_file: Annotated[HomeFile | None, GIVEN] = None
    """File of HTTP headers for the collector, such as a token."""


@dataclass(frozen=True, slots=True)
class LedgerConfig(Section, on_change=GATEWAY_AGAIN):
    """What was predicted and what came of each request: `prfaas worth` says from it what offloading is worth."""

    file: HomeFile
    """SQLite file that the gateway writes; it is made where there is none."""
    days: Positive = 14
    """Older requests are dropped."""
    requests: Positive = 2_000_000
    """Of more, the oldest are dropped; 2 million take some 500 MB."""
    holdout: Annotated[Share, LIVE] = 0.0
    """Share of the requests to offload that stay in their PD cluster all the same, drawn by chance."""


@dataclass(frozen=True, slots=True)
class ExperimentConfig(Section, on_change=LIVE):
    """PrfaaS as the file says against another way, in slices of time: `prfaas worth` says the difference."""

    against: PolicyName = "local_only"
    """Policy of the other slices; `local_only`: nothing is offloaded."""
    without_link: Annotated[Text | None, GIVEN] = None
    """In place of another policy: the file's own without this link, SOURCE->TARGET."""
    threshold_tokens: Annotated[Positive | None, GIVEN] = None
    """In place of another policy: the file's own with this threshold in all clusters."""
    slice_s: Annotated[Seconds, Field(ge=1)] = 600.0
    """Length of a slice. Two make a pair, in which chance says which comes first."""
    washout_s: Annotated[float, Field(strict=True, ge=0)] = 60.0
    """At the beginning of each slice, whose requests don't count: queues are still those of the slice before."""
    most_harm: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.5
    """It ends by itself once first tokens take longer by this share in a slice of the other way."""


@dataclass(frozen=True, slots=True)
class GatewayConfig(Section, on_change=LIVE):
    """Where clients and operators connect, and what clients are told."""

    host: Annotated[Host, GATEWAY_AGAIN] = "127.0.0.1"
    """Where clients connect."""
    port: Annotated[Port, GATEWAY_AGAIN] = 8000
    """Its port for clients."""
    admin: AdminConfig = AdminConfig()
    """Where operators connect."""
    clients: Annotated[FileBeside | None, GIVEN, GATEWAY_AGAIN] = None
    """File of the clients that may send, with hashes of their API keys; left out: whoever reaches the port."""
    hosts: tuple[HostName, ...] = ()
    """Further names by which operators may call the gateway: a load balancer's, or a Kubernetes Service's."""
    media_domains: tuple[HostName, ...] = ()
    """Where engines may fetch images, videos and recordings from; none: clients send the media themselves."""
    route_header: RouteDetail = "short"
    """Whether `x-prfaas-route` tells every client the numbers that decided (`full`), or only a named tenant."""
    shadow: Share = 0.0
    """Share of the requests with a transfer that are computed again on a plain path and compared."""
    first_token: Annotated[FirstTokenSource | None, GIVEN] = None
    """Who samples a stream's first token where its prompt is prefilled elsewhere; left out: `prefill`, but plans and
    simulations count on it for none."""
    first_byte_s: Seconds = 1800.0
    """How long an engine may take until its answer begins."""
    idle_s: Seconds = 600.0
    """How long an answer that has begun may pause."""
    keep_alive_s: Seconds = 15.0
    """How often a client that waits for a stream's first token gets a comment."""
    limits: GatewayLimits = GatewayLimits()
    """How much one gateway takes on."""
    cluster: Annotated[Name | None, GIVEN, GATEWAY_AGAIN] = None
    """The cluster whose network the gateway is in; left out: the one that decodes, where only one does."""
    ledger: Annotated[LedgerConfig | None, GIVEN, GATEWAY_AGAIN] = None
    """Where each request's predictions and outcome are kept; left out: nowhere."""
    experiment: Annotated[ExperimentConfig | None, GIVEN] = None
    """What the file's way of routing is measured against; needs a ledger; left out: nothing."""
    tracing: Annotated[TracingConfig | None, GIVEN, EVERYTHING] = None
    """Where traces go; left out: what `OTEL_*` variables of the environment say."""

    @property
    def url(self) -> str:
        """Base of the gateway's HTTP API as seen on its own machine, without a trailing slash."""
        return _url_on_its_machine(self.host, self.port)


def _url_on_its_machine(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{host_in_url(host)}:{port}"


_EtcdUrl = Annotated[
    str,
    Field(strict=True),
    matching(
        r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}/?",
        '{!r} is no address of etcd; write "https://HOST:2379", or http:// on a safe network',
    ),
    AfterValidator(lambda url: url.rstrip("/")),
]


@dataclass(frozen=True, slots=True)
class FleetConfig(Section, on_change=GATEWAY_AGAIN):
    """The etcd that the gateways of a deployment share; without it there is one gateway alone."""

    etcd: Annotated[tuple[_EtcdUrl, ...], Field(min_length=1)]
    """Addresses of etcd's members, `https://HOST:2379`. The first that answers is asked."""
    name: Annotated[Name | None, GIVEN] = None
    """This gateway's name, unlike any other's; left out: its machine's name and its port."""
    lease_s: Annotated[int, Field(strict=True, ge=2, le=60)] = 3
    """A gateway that etcd has not heard of for so many seconds is no member any more."""
    period_s: Annotated[float, Field(strict=True, ge=0.05, le=1)] = 0.1
    """What a gateway has open is told to the others so often, if it has changed."""
    ca_file: Annotated[HomeFile | None, GIVEN] = None
    """Of the CA that etcd's certificate must be from; left out: those of the system."""
    certificate_file: Annotated[HomeFile | None, GIVEN] = None
    """Certificate and private key that etcd is shown, in one file."""

    @property
    def is_plain(self) -> bool:
        """Whether anything goes to etcd without TLS."""
        return any(url.startswith("http://") for url in self.etcd)

    @property
    def is_local(self) -> bool:
        """Whether all of etcd is on this machine."""
        return all(is_loopback(urlsplit(url).hostname or "") for url in self.etcd)
