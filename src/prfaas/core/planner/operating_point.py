"""Operating points of a deployment: roles, routes and the throughput they give."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

ServiceModel = Literal["mean length", "by length"]
"""How long a stage works on its requests: T(E[L]) as in the paper's section 3.4.1, or E[T(L)]."""

CachePolicy = Literal["own", "best"]
"""Whose prefix cache counts (section 3.4.3): each cluster's own (bandwidth scarce), or the longest anywhere."""

StageKind = Literal["prfaas prefill", "link", "pd prefill", "pd decode"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One resource at the operating point."""

    name: str
    kind: StageKind
    capacity: float | None
    """The request rate of the whole system (req/s) at which it is full, as requests are routed; None: unused."""
    utilisation: float
    """lambda_max / capacity."""


@dataclass(frozen=True, slots=True)
class Roles:
    """How a PD cluster's instances are divided."""

    cluster: str
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class RouteUse:
    """The requests that one cluster prefills for another, or for itself. Lengths are uncached tokens."""

    prefill: str
    decode: str
    fraction: float
    """Of all requests."""
    mean_tokens: float
    from_tokens: float
    """The shortest length, itself excluded."""
    to_tokens: float
    """The longest length."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A link at lambda_max."""

    name: str
    bandwidth_bits_per_s: float
    egress_bits_per_s: float
    utilisation: float
    needed_bits_per_s: float | None = None
    """The rate that it would carry at the best plan if no link were a limit."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Roles and routes with the throughput they give.

    Rates are requests per second. Over several clusters counts and thetas are sums. The names up to `ttft_p90_s` are
    those of the paper's Tables 4 and 6.
    """

    threshold_tokens: float | None
    """None where no single uncached length separates the offloaded requests, or nothing can be offloaded."""
    n_prefill: int
    """N_p: prefill instances of the PD clusters."""
    n_decode: int
    """N_d: decode instances of the PD clusters."""
    theta_prfaas: float | None
    """Eq. 3; None where nothing is offloaded."""
    theta_pd_p: float | None
    """Eq. 4; None where everything is offloaded."""
    theta_pd_d: float
    """Eq. 5."""
    lambda_max: float
    """Eq. 6."""
    offloaded_fraction: float
    """p, of all requests."""
    mean_long_tokens: float | None
    """Mean uncached length of offloaded requests; None where there are none."""
    mean_short_tokens: float | None
    """Mean uncached length of the others; None where there are none."""
    egress_bits_per_s: float
    """Of all links together."""
    ttft_mean_s: float
    """Time of prefill without waiting."""
    ttft_p90_s: float

    n_prfaas: int
    """Instances of the PrfaaS clusters."""
    cache_policy: CachePolicy
    roles: tuple[Roles, ...]
    stages: tuple[Stage, ...]
    routes: tuple[RouteUse, ...]
    links: tuple[LinkUse, ...]

    @property
    def binding(self) -> tuple[str, ...]:
        """Names of the stages that are full at lambda_max (to within 0.1 %)."""
        return tuple(stage.name for stage in self.stages if stage.utilisation > 0.999)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {**asdict(self), "binding": list(self.binding)}
