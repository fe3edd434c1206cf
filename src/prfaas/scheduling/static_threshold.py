"""A baseline: the paper's threshold, fixed once and for all, and nothing else looked at."""

from dataclasses import dataclass
from typing import ClassVar

from prfaas.scheduling.decision import Decision
from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.routing import Choice, route, soonest_remote
from prfaas.scheduling.site import Site
from prfaas.scheduling.view import View


@dataclass(frozen=True, slots=True)
class StaticThreshold:
    """Offload when l_total − l_pd > `threshold_tokens` (section 3.4.3, bandwidth scarce), whatever the queues."""

    name: ClassVar[str] = "static_threshold"
    threshold_tokens: float

    def __post_init__(self) -> None:
        if not self.threshold_tokens >= 0:
            raise ValueError(f"a threshold must be 0 tokens or more, not {self.threshold_tokens!r}")

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        return route(request, view, self._choose)

    def _choose(self, request: RoutingRequest, view: View, site: Site) -> Choice:
        uncached = request.num_tokens - site.held_tokens
        long = uncached > self.threshold_tokens
        if long and site.remotes:
            best = soonest_remote(request, view, site, site.remotes)
            return Choice(best, uncached, self.threshold_tokens, "long", best.ttft_s)
        reason = site.reason_to_stay(long=long)
        return Choice(site.local, uncached, self.threshold_tokens, reason, site.local.ttft_s)
