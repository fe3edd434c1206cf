"""The static length-threshold policy (the paper's short-term routing with a fixed threshold)."""

from collections.abc import Iterable

from prfaas.scheduling.decision import Decision, Route
from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.view import InstanceView, NoDecodeInstanceError, View


def static_threshold(request: RoutingRequest, view: View, threshold_tokens: float) -> Decision:
    """Offload when the PD cluster would have to prefill more than `threshold_tokens` tokens.

    The uncached length is the prompt less the longest prefix that can spare computing in the PD cluster: what
    its prefill instances hold and, for a dense model, what the decode instance holds itself.
    Raises NoDecodeInstanceError when nothing can decode.
    """
    decode = _choose(request, view.decoders())
    if decode is None:
        raise NoDecodeInstanceError("no healthy decode instance in any PD cluster")
    at_decode = request.prefix_at(decode.name)
    local = _choose(request, view.local_prefillers(decode))

    reusable = request.prefix_at(local.name) if local is not None else 0
    if not view.is_hybrid or local is None:
        # A hybrid decode instance can still reuse its own prefix where its states allow it, and it is the one
        # that computes when nobody else can; the record's number is then the best guess there is.
        reusable = max(reusable, at_decode)
    uncached = request.num_tokens - reusable

    def decision(route: Route, prefill: InstanceView, reason: str) -> Decision:
        skip = at_decode if view.can_skip and prefill is not decode else 0
        return Decision(route, prefill.name, decode.name, uncached, skip, reason)

    if request.num_tokens <= 1:
        return decision(Route.LOCAL, decode, "single-token")
    if uncached > threshold_tokens:
        remote = _choose(request, view.remote_prefillers(decode))
        if remote is not None:
            return decision(Route.OFFLOAD, remote, "long")
    if local is None:
        return decision(Route.LOCAL, decode, "no-prefill-instance")
    if (
        not view.is_hybrid
        and at_decode >= request.prefix_at(local.name)
        and 2 * at_decode >= request.num_tokens
    ):
        # The rest is the smaller part: prefilling it in place costs less than moving the prompt's tail.
        return decision(Route.LOCAL, decode, "held-by-decode")
    return decision(Route.LOCAL, local, "short" if uncached <= threshold_tokens else "no-prfaas-instance")


def _choose(request: RoutingRequest, candidates: Iterable[InstanceView]) -> InstanceView | None:
    """Longest recorded prefix, then fewest requests in flight, then the name (so that ties are stable)."""
    return min(candidates, key=lambda i: (-request.prefix_at(i.name), i.in_flight, i.name), default=None)
