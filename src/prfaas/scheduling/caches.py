"""Prefix caches of other clusters: when they count, and when they move first (section 3.4.3)."""

from prfaas.scheduling.links import AbundanceMarks, abundant_link
from prfaas.scheduling.options import Option, bits_to, streamed_s
from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.site import Site, Source
from prfaas.scheduling.view import LinkView, View
from prfaas.units import BITS_PER_BYTE

# Of the tokens to compute: a cache transfer costs two more hops of the gateway, whatever its size.
_LEAST_SHARE = 0.1


def uncached_tokens(request: RoutingRequest, view: View, site: Site, marks: AbundanceMarks) -> int:
    """The length that a threshold is compared with.

    Bandwidth scarce: l_total − l_pd. Where a cluster has abundant bandwidth to this one, its cache counts too:
    l_total − max(l_pd, l_prfaas).
    """
    for source in site.sources:
        if source.held_tokens <= site.held_tokens:
            break
        if abundant_link(view, source.cluster.name, site.cluster.name, marks) is not None:
            return request.num_tokens - source.held_tokens
    return own_uncached_tokens(request, site)


def own_uncached_tokens(request: RoutingRequest, site: Site) -> int:
    """l_total − l_pd: what the PD cluster would have to compute if no cache moved."""
    return request.num_tokens - site.held_tokens


def sends_less(request: RoutingRequest, view: View, site: Site, local: Option, there: Option) -> bool:
    """Whether computing there is done sooner and moves fewer bytes than the cache that the local option brings here.
    True if it brings none: it would compute everything."""
    if local.moved_cache is None:
        return True
    if there.ttft_s > local.ttft_s:
        return False
    _, num_tokens, skip_tokens = local.moved_cache
    return bits_to(request, view, site.decode) < BITS_PER_BYTE * view.kv.bytes_to_move(
        num_tokens, skip_tokens
    )


def with_cache(
    request: RoutingRequest, view: View, site: Site, option: Option, marks: AbundanceMarks
) -> Option:
    """The option after the longest cache of another cluster has moved to its instance, if that pays.

    Bandwidth must be abundant on a link from there. It must spare at least a tenth of the prefill's tokens, and
    the bytes, over what is left of the link and after its queue, must take less than the prefill that they spare.
    A decode instance that prefills itself gets none.
    """
    if not site.sources or option.instance is site.decode:
        return option
    found = _best_source(view, site, option, marks)
    if found is None:
        return option
    source, lane = found
    # The source computes a last token, the target another, and the decode instance the prompt's last.
    tokens = min(source.held_tokens, request.num_tokens - 3)
    if tokens - option.reusable_tokens < _LEAST_SHARE * (request.num_tokens - option.reusable_tokens):
        return option
    at_target = request.held.get(option.instance.name)
    skip = min(at_target.attention_tokens, tokens) if at_target is not None and view.kv.can_skip else 0
    bits = view.kv.bytes_to_move(tokens + 1, skip) * BITS_PER_BYTE
    moved_s = bits / (lane.capacity_bits_per_s - lane.egress_bits_per_s) + lane.rtt_s
    if lane.drained_s > view.now_s:
        moved_s += lane.drained_s - view.now_s
    prefill_s = option.cluster.prefill_s(request.num_tokens - tokens)
    if moved_s >= option.prefill_s - prefill_s:
        return option
    start_s = option.start_s if option.start_s > moved_s else moved_s
    ttft_s = start_s + prefill_s
    if option.link is not None:
        ttft_s = streamed_s(start_s, prefill_s, option.link_wait_s, option.link_s, option.link.rtt_s)
    return Option(
        option.cluster,
        option.instance,
        tokens,
        start_s,
        prefill_s,
        option.link,
        option.link_wait_s,
        option.link_s,
        ttft_s,
        (source.holder, tokens + 1, skip),
    )


def _best_source(
    view: View, site: Site, option: Option, marks: AbundanceMarks
) -> tuple[Source, LinkView] | None:
    for source in site.sources:
        if source.held_tokens <= option.reusable_tokens:
            return None
        lane = abundant_link(view, source.cluster.name, option.cluster.name, marks)
        if lane is not None:
            return source, lane
    return None
