"""Policies to compare with: round robin, a fixed threshold, always local, always remote, the soonest."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, ClassVar

from prfaas.core.scheduling.cache_transfers import uncached_tokens, with_cache
from prfaas.core.scheduling.candidates import (
    kv_bytes_to,
    prefill_by,
    prefillers,
    streamed,
)
from prfaas.core.scheduling.decision import Decision, RoutingRequest
from prfaas.core.scheduling.decoders import decode_choices
from prfaas.core.scheduling.egress import is_worth_offloading
from prfaas.core.scheduling.link_choice import AbundanceMarks, usable_link
from prfaas.core.scheduling.parameters import Bounds
from prfaas.core.scheduling.pd_candidate import PdCandidate
from prfaas.core.scheduling.routing import (
    Choice,
    ChoosingPolicy,
    cheapest_remote,
    decision_of,
    prefill_at_decode,
)
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, View
from prfaas.core.workload.empirical import edge_factor


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Request number k takes the k-th of all pairs of PD cluster and prefill instance that can reach it.

    The instance that decodes in a PD cluster is the one that any policy would take there.
    """

    name: ClassVar[str] = "round_robin"

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        """Raises NoDecodeInstanceError when nothing can decode."""
        if request.num_tokens <= 1:
            return prefill_at_decode(request, view)
        decoders = decode_choices(request, view)
        placements = [
            each for cluster, decode in decoders for each in _placements(request, view, cluster, decode)
        ]
        pd, decode, cluster, instance, link = placements[request.ordinal % len(placements)]
        option = prefill_by(request, view, cluster, instance)
        if link is not None:
            kv_bytes = kv_bytes_to(request, view, decode, link)
            option = streamed(request, option, link, view, kv_bytes)
        held = max(request.reusable_at(each.name) for each in pd.instances)
        threshold = view.threshold_tokens.get(pd.name, math.inf)
        choice = Choice(option, request.num_tokens - held, threshold, "turn")
        return decision_of(request, view, decode, choice)


_Placement = tuple[ClusterView, InstanceView, ClusterView, InstanceView, LinkView | None]


def _placements(
    request: RoutingRequest, view: View, pd: ClusterView, decode: InstanceView
) -> list[_Placement]:
    """(PD cluster, its decode instance, prefill cluster, prefill instance, link between the clusters)."""
    view = view.towards(decode.name)
    here = prefillers(pd, view) or [decode]
    placements: list[_Placement] = [(pd, decode, pd, each, None) for each in here]
    for cluster in view.clusters.values():
        link = usable_link(view, cluster.name, pd.name) if cluster.kind == "prfaas" else None
        if link is not None:
            far = prefillers(cluster, view)
            if link.egress_price_per_byte:
                local = min((prefill_by(request, view, pd, each) for each in here), key=attrgetter("ttft_s"))
                far = [
                    each
                    for each in far
                    if is_worth_offloading(
                        request, view, decode, local, prefill_by(request, view, cluster, each), link
                    )
                ]
            placements += [(pd, decode, cluster, each, link) for each in far]
    return placements


@dataclass(frozen=True, slots=True)
class StaticThreshold(ChoosingPolicy):
    """Offload when l_total − l_pd > `threshold_tokens` (section 3.4.3, bandwidth scarce), whatever the queues.

    The threshold has the edge that plans count on: prompts of its own length are divided.
    """

    name: ClassVar[str] = "static_threshold"
    threshold_tokens: Annotated[
        float, Bounds("longer uncached lengths are offloaded", unit="tokens", least=0, allows_infinity=True)
    ]

    def _choose(self, request: RoutingRequest, view: View, pd: PdCandidate) -> Choice:
        uncached = request.num_tokens - pd.held_tokens
        threshold = self.threshold_tokens * edge_factor(request.ordinal)
        long = uncached > threshold
        if long and pd.remotes:
            best = cheapest_remote(request, view, pd.decode, pd.remotes)
            return Choice(best, uncached, threshold, "long")
        return Choice(pd.local, uncached, threshold, pd.reason_to_stay(long=long))


@dataclass(frozen=True, slots=True)
class LocalOnly(ChoosingPolicy):
    """Never offload: PD disaggregation inside each cluster."""

    name: ClassVar[str] = "local_only"

    def _choose(self, request: RoutingRequest, _view: View, pd: PdCandidate) -> Choice:
        uncached = request.num_tokens - pd.held_tokens
        return Choice(pd.local, uncached, math.inf, pd.local_reason or "always")


@dataclass(frozen=True, slots=True)
class OffloadAll(ChoosingPolicy):
    """Offload whatever can be: the paper's naive heterogeneous deployment (section 4.3.3)."""

    name: ClassVar[str] = "offload_all"

    def _choose(self, request: RoutingRequest, view: View, pd: PdCandidate) -> Choice:
        uncached = request.num_tokens - pd.held_tokens
        if pd.remotes:
            best = cheapest_remote(request, view, pd.decode, pd.remotes)
            return Choice(best, uncached, 0.0, "always")
        return Choice(pd.local, uncached, 0.0, pd.reason_to_stay(long=True))


@dataclass(frozen=True, slots=True)
class LeastTtft(ChoosingPolicy):
    """The smallest predicted TTFT, here or there, a cache moved first where `paper` might and that is sooner.

    Where the first token comes from the prefill it is the mean of that and of when the KV has arrived.
    """

    name: ClassVar[str] = "least_ttft"
    abundance: AbundanceMarks = field(default_factory=AbundanceMarks)

    def _choose(self, request: RoutingRequest, view: View, pd: PdCandidate) -> Choice:
        best, stays = with_cache(request, view, pd, pd.local, self.abundance)
        if pd.remotes:
            far = cheapest_remote(request, view, pd.decode, pd.remotes)
            far, far_stays = with_cache(request, view, pd, far, self.abundance)
            if far.delay_s < best.delay_s:
                best, stays = far, far_stays
        uncached = uncached_tokens(request, view, pd, self.abundance)
        reason = pd.local_reason if best.link is None else ""
        return Choice(best, uncached, pd.threshold_tokens, reason or "soonest", cache_stays=stays)
