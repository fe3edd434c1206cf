"""The paper's short-term routing (section 3.4.3): a threshold on the uncached length, moved by queues."""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from prfaas.core.scheduling.cache_transfers import (
    own_uncached_tokens,
    sends_less,
    uncached_tokens,
    with_cache,
)
from prfaas.core.scheduling.candidates import BestCandidate, PrefillCandidate
from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.link_choice import AbundanceMarks, is_stale, unpriced
from prfaas.core.scheduling.parameters import Bounds
from prfaas.core.scheduling.pd_candidate import PdCandidate
from prfaas.core.scheduling.routing import Choice, ChoosingPolicy, cheapest_remote
from prfaas.core.scheduling.view import LinkView, View

_LEAST_MARK_S = 1e-3


@dataclass(frozen=True, slots=True)
class Paper(ChoosingPolicy):
    """Offload what is longer than the threshold; caches of other clusters count where bandwidth is abundant.

    A queue surges when it is longer than the mark m: `queue_mark` prefills of a prompt of the threshold's length
    t in the PD cluster. With w_far the longer of the PrfaaS cluster's shortest prefill queue and the queue of its
    link, w_near the PD cluster's shortest prefill queue, and ρ the link's utilisation, a route's threshold is

        t' = t · max(w_far, m) / max(w_near, m) · max(1, ρ / utilisation_mark) · (1 + c)

    c is the link's congestion, 0 to 1: what the network's own queues and losses say before any of ours is long.
    A prompt that is below it only because another cluster holds most of it is computed in the PD cluster from that
    cache; but there, if moving the cache does not pay, or if that is done sooner and less has to cross the link,
    since the decode instance holds most of it.
    So it is t while nothing surges, moves without jumps, rises without limit as the route falls behind, and falls
    when only the PD cluster does. While facts of the link are stale it is never below t.
    """

    name: ClassVar[str] = "paper"
    queue_mark: Annotated[
        float,
        Bounds("a queue surges from so many prefills of the threshold's length", above=0),
    ] = 0.5
    utilisation_mark: Annotated[
        float, Bounds("from this share of its capacity a link raises the threshold", above=0)
    ] = 0.85
    abundance: AbundanceMarks = field(default_factory=AbundanceMarks)

    def _choose(self, request: RoutingRequest, view: View, pd: PdCandidate) -> Choice:
        threshold = pd.threshold_tokens
        uncached = uncached_tokens(request, view, pd, self.abundance)
        remotes, lowest = self._open_to(uncached, pd, view)
        if remotes:
            best = cheapest_remote(request, view, pd.decode, remotes)
            reason = "long" if uncached > threshold else "busy-pd"
        else:
            best, reason = pd.local, pd.reason_to_stay(long=uncached > threshold)
            if not pd.local_reason and uncached > unpriced(lowest, pd.remotes):
                reason = "congested-link"
        best, stays = with_cache(request, view, pd, best, self.abundance)
        if pd.sources and not remotes and uncached < own_uncached_tokens(request, pd):
            there = self._where_cached(request, view, pd, best)
            if there is not None:
                best, reason, stays = there, "cached-there", ""
        return Choice(best, uncached, lowest, reason, cache_stays=stays)

    def _where_cached(
        self, request: RoutingRequest, view: View, pd: PdCandidate, local: PrefillCandidate
    ) -> PrefillCandidate | None:
        """Of a prompt that is short only by another cluster's cache: the prefill there, if moving it here is worse."""
        remotes, _ = self._open_to(own_uncached_tokens(request, pd), pd, view)
        if not remotes:
            return None
        there = cheapest_remote(request, view, pd.decode, remotes)
        return there if sends_less(local, there) else None

    def _open_to(
        self, uncached: int, pd: PdCandidate, view: View
    ) -> tuple[list[tuple[BestCandidate, LinkView]], float]:
        """The remotes whose threshold the length exceeds, and the lowest threshold."""
        threshold = pd.threshold_tokens
        if not pd.remotes or threshold == math.inf:
            return [], threshold
        mark_s = max(self.queue_mark * pd.cluster.prefill_s(threshold), _LEAST_MARK_S)
        near_s = max(pd.least_wait_s, mark_s)
        lowest, found = math.inf, []
        for node, link in pd.remotes:
            far_s = max(link.drained_s - view.now_s, node.least_wait_s, mark_s)
            factor = far_s / near_s
            factor *= max(link.egress_bits_per_s / (self.utilisation_mark * link.capacity_bits_per_s), 1.0)
            if factor < 1.0 and is_stale(link, view):
                factor = 1.0
            factor *= 1.0 + link.congestion
            lowest = min(lowest, threshold * factor)
            if uncached > threshold * factor:
                found.append((node, link))
        return found, lowest
