"""One way to operate a deployment: who prefills what, and what that gives."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

ServiceModel = Literal["mean length", "by length"]
"""How long a stage works on its requests: T(E[L]) as in the paper's section 3.4.1, or E[T(L)]."""

CachePolicy = Literal["own", "best"]
"""Whose prefix cache counts (section 3.4.3): each cluster's own (bandwidth scarce), or the longest anywhere."""

StageKind = Literal["prfaas prefill", "link", "pd prefill", "pd decode"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One resource at the operating point. `capacity` is the request rate of the whole system (req/s) at which
    it is full, given how requests are routed; None if it has nothing to do. `utilisation` is lambda_max / capacity.
    """

    name: str
    kind: StageKind
    capacity: float | None
    utilisation: float


@dataclass(frozen=True, slots=True)
class Roles:
    """How a PD cluster's instances are divided."""

    cluster: str
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class RouteUse:
    """The requests that one cluster prefills for another (or itself): `fraction` of all, of lengths from
    `from_tokens` (excluded) to `to_tokens` uncached tokens, `mean_tokens` on average.
    """

    prefill: str
    decode: str
    fraction: float
    mean_tokens: float
    from_tokens: float
    to_tokens: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A link at lambda_max. `needed_bits_per_s` is what it would carry at the best plan if no link were a limit."""

    name: str
    bandwidth_bits_per_s: float
    egress_bits_per_s: float
    utilisation: float
    needed_bits_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Roles and routes with the throughput they give; requests per second and tokens everywhere.

    The names of the first block are those of the paper's Tables 4 and 6. Over several clusters counts and
    thetas are sums, and `threshold_tokens` is None where no single length separates the offloaded requests.
    Means are None where there are no such requests, thetas where no such request exists.
    """

    threshold_tokens: float | None
    n_prefill: int
    n_decode: int
    theta_prfaas: float | None
    theta_pd_p: float | None
    theta_pd_d: float
    lambda_max: float
    offloaded_fraction: float
    mean_long_tokens: float | None
    mean_short_tokens: float | None
    egress_bits_per_s: float
    ttft_mean_s: float
    ttft_p90_s: float

    n_prfaas: int
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
