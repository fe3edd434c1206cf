"""What all policies share: from a request to the PD clusters it could go to, and from a choice to a decision."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.core.scheduling.candidates import (
    BestCandidate,
    PrefillCandidate,
    decode_choices,
    kv_bytes_to,
    load_of,
    prefill_by,
    streamed,
)
from prfaas.core.scheduling.decision import Decision, Route, RoutingRequest
from prfaas.core.scheduling.pd_candidate import Site, lone_site, nodes_of, site_of
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView, View

# Reading a member of an enum takes as long as a function call.
_LOCAL, _OFFLOAD = Route.LOCAL, Route.OFFLOAD


@dataclass(slots=True)
class Choice:
    """What a policy wants in one PD cluster. `cost`: what PD clusters are compared by, the smallest wins.

    `urgency_s`, `is_bound`: see `Decision`.
    """

    option: PrefillCandidate
    uncached_tokens: int
    threshold_tokens: float
    reason: str
    cost: float
    urgency_s: float | None = None
    is_bound: bool = False


def route(
    request: RoutingRequest, view: View, choose: Callable[[RoutingRequest, View, Site], Choice]
) -> Decision:
    """The decision of a policy that chooses by `choose` in every PD cluster.

    Among PD clusters: one whose decode instance has a free slot, then the least cost of what the policy would do
    there if caches stayed where they are, then the least load of the decode instance, then the first.
    Raises NoDecodeInstanceError when nothing can decode.
    """
    if not request.held and request.num_tokens > 1:
        lone = lone_site(request, view)
        if lone is not None:
            return decision_of(request, view, lone.decode, choose(request, view, lone))
    decoders = decode_choices(request, view)
    if request.num_tokens <= 1:
        return single_token(request, view, decoders)
    nodes = nodes_of(request, view)
    if len(decoders) == 1:
        cluster, decode = decoders[0]
        site = site_of(request, view, cluster, decode, nodes)
        return decision_of(request, view, decode, choose(request, view, site))
    best: Choice | None = None
    full, least, lightest = True, math.inf, math.inf
    for here, decoder in decoders:
        choice = choose(request, view, site_of(request, view, here, decoder, nodes, caches_move=False))
        load = load_of(decoder)
        if best is None or (load >= 1.0, choice.cost, load) < (full, least, lightest):
            best, cluster, decode = choice, here, decoder
            full, least, lightest = load >= 1.0, choice.cost, load
    assert best is not None  # there is at least one
    if request.held:
        best = choose(request, view, site_of(request, view, cluster, decode, nodes))
    return decision_of(request, view, decode, best)


def soonest_remote(
    request: RoutingRequest, view: View, site: Site, remotes: Sequence[tuple[BestCandidate, LinkView]]
) -> PrefillCandidate:
    """Of `remotes`, at least one, the one with the least predicted TTFT."""
    kv_bytes = kv_bytes_to(request, view, site.decode)
    best: PrefillCandidate | None = None
    for node, link in remotes:
        # Nothing arrives before it has been computed.
        if best is None or node.ttft_s < best.ttft_s:
            option = streamed(node, link, view.now_s, kv_bytes)
            if best is None or option.ttft_s < best.ttft_s:
                best = option
    assert best is not None  # there is at least one
    return best


def decision_of(request: RoutingRequest, view: View, decode: InstanceView, choice: Choice) -> Decision:
    """The choice with everything that is needed to carry it out."""
    option = choice.option
    prefill, link = option.instance, option.link
    skip_tokens = kv_bytes = 0
    if prefill is not decode:
        if request.held and view.kv.can_skip:
            skip_tokens = request.attention_at(decode.name)
        kv_bytes = option.kv_bytes if link else view.kv.bytes_to_move(request.num_tokens, skip_tokens)
    return Decision(
        _LOCAL if link is None else _OFFLOAD,
        prefill.name,
        decode.name,
        choice.uncached_tokens,
        request.num_tokens - option.reusable_tokens,
        skip_tokens,
        kv_bytes,
        choice.reason,
        choice.threshold_tokens,
        option.ttft_s,
        option.cache_transfer,
        None if prefill is decode else choice.urgency_s,
        choice.is_bound,
    )


def single_token(
    request: RoutingRequest, view: View, decoders: list[tuple[ClusterView, InstanceView]]
) -> Decision:
    """Nothing to transfer: the last token of a prompt is always computed where it is decoded."""
    cluster, decode = min(decoders, key=lambda each: load_of(each[1]))
    option = prefill_by(request, view, cluster, decode)
    threshold = view.threshold_tokens.get(cluster.name, math.inf)
    return decision_of(
        request, view, decode, Choice(option, request.num_tokens, threshold, "single-token", 0.0)
    )
