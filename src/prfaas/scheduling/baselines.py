"""Policies to compare with: always here, always there, whatever is soonest."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from prfaas.scheduling.caches import uncached_tokens, with_cache
from prfaas.scheduling.decision import Decision
from prfaas.scheduling.links import AbundanceMarks
from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.routing import Choice, route, soonest_remote
from prfaas.scheduling.site import Site
from prfaas.scheduling.view import View


@dataclass(frozen=True, slots=True)
class LocalOnly:
    """Never offload: PD disaggregation inside each cluster."""

    name: ClassVar[str] = "local_only"

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        return route(request, view, self._choose)

    def _choose(self, request: RoutingRequest, _view: View, site: Site) -> Choice:
        uncached = request.num_tokens - site.held_tokens
        return Choice(site.local, uncached, math.inf, site.local_reason or "always", site.local.ttft_s)


@dataclass(frozen=True, slots=True)
class OffloadAll:
    """Offload whatever can be: the paper's naive heterogeneous deployment (section 4.3.3)."""

    name: ClassVar[str] = "offload_all"

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        return route(request, view, self._choose)

    def _choose(self, request: RoutingRequest, view: View, site: Site) -> Choice:
        uncached = request.num_tokens - site.held_tokens
        if site.remotes:
            best = soonest_remote(request, view, site, site.remotes)
            return Choice(best, uncached, 0.0, "always", best.ttft_s)
        return Choice(site.local, uncached, 0.0, site.reason_to_stay(long=True), site.local.ttft_s)


@dataclass(frozen=True, slots=True)
class LeastTtft:
    """The smallest predicted TTFT, here or there, a cache moved first where `paper` might and that is sooner."""

    name: ClassVar[str] = "least_ttft"
    abundance: AbundanceMarks = field(default_factory=AbundanceMarks)

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        return route(request, view, self._choose)

    def _choose(self, request: RoutingRequest, view: View, site: Site) -> Choice:
        best = with_cache(request, view, site, site.local, self.abundance)
        if site.remotes:
            far = soonest_remote(request, view, site, site.remotes)
            far = with_cache(request, view, site, far, self.abundance)
            best = far if far.ttft_s < best.ttft_s else best
        uncached = uncached_tokens(request, view, site, self.abundance)
        reason = site.local_reason if best.link is None else ""
        return Choice(best, uncached, site.threshold_tokens, reason or "soonest", best.ttft_s)
