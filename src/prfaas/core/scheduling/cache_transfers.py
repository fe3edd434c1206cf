"""Caches of other clusters: when they count, and when they move first (section 3.4.3 of the paper)."""

from prfaas.core.prefix.index import PrefixHit
from prfaas.core.scheduling.candidates import PooledPrefix, PrefillCandidate, PrefixSource
from prfaas.core.scheduling.decision import CacheTransfer, RoutingRequest
from prfaas.core.scheduling.egress import is_worth_its_bytes
from prfaas.core.scheduling.hazard import streamed_s
from prfaas.core.scheduling.link_choice import AbundanceMarks, abundant_link
from prfaas.core.scheduling.routing import PdCandidate
from prfaas.core.scheduling.tiers import pool_at, reading_s
from prfaas.core.scheduling.view import InstanceView, LinkView, View
from prfaas.core.units import BITS_PER_BYTE

# Of the tokens to compute: a cache transfer costs two more hops of the gateway, whatever its size.
_LEAST_SHARE = 0.1


def uncached_tokens(request: RoutingRequest, view: View, pd: PdCandidate, marks: AbundanceMarks) -> int:
    """The length that a threshold is compared with.

    Bandwidth scarce: l_total − l_pd. Where a cluster has abundant bandwidth to this one, its cache counts too:
    l_total − max(l_pd, l_prfaas).
    """
    for source in pd.sources:
        if source.held_tokens <= pd.held_tokens:
            break
        if _link_from(source, pd.cluster.name, view, marks) is not None:
            return request.num_tokens - source.held_tokens
    return own_uncached_tokens(request, pd)


def own_uncached_tokens(request: RoutingRequest, pd: PdCandidate) -> int:
    """l_total − l_pd: what the PD cluster would have to compute if no cache moved."""
    return request.num_tokens - pd.held_tokens


def sends_less(local: PrefillCandidate, there: PrefillCandidate) -> bool:
    """Whether computing there is done sooner, and moves fewer bytes than the local option's cache transfer.

    True if the local option has none: it would compute everything.
    """
    if local.cache_transfer is None:
        return True
    return there.delay_s <= local.delay_s and there.kv_bytes < local.cache_transfer.kv_bytes


def with_cache(
    request: RoutingRequest, view: View, pd: PdCandidate, option: PrefillCandidate, marks: AbundanceMarks
) -> PrefillCandidate:
    """The option after the longest cache of another cluster has moved to its instance, if that pays.

    Bandwidth must be abundant on a link from there. It must spare at least a tenth of the prefill's tokens, and
    the bytes, over what is left of the link and after its queue or the source's, must take less than the prefill that
    they spare, and cost no more than it.
    What a pool holds goes to the pool of the instance's machine, which the instance then loads from.
    A decode instance that prefills itself gets none.
    """
    if not pd.sources or option.instance is pd.decode:
        return option
    found = _best_source(view, pd, option, marks)
    if found is None:
        return option
    source, link = found
    pooled = type(source) is PooledPrefix
    at_target: PrefixHit | None
    if pooled:
        sent_tokens = tokens = source.held_tokens
        at_target = _in_target_pool(request, view, option)
    else:
        # The source computes a last token, the target another, and the decode instance the prompt's last.
        tokens = min(source.held_tokens, request.num_tokens - 3)
        sent_tokens = tokens + 1
        at_target = request.held.get(option.instance.name)
    if tokens - option.reusable_tokens < _LEAST_SHARE * (request.num_tokens - option.reusable_tokens):
        return option
    skip = min(at_target.attention_tokens, tokens) if at_target is not None and view.kv.can_skip else 0
    kv = view.kv_of_pools(option.cluster.name) if pooled else link.kv or view.kv
    kv_bytes = kv.prefix_bytes_to_move(sent_tokens, skip)
    moved_s = BITS_PER_BYTE * kv_bytes / (link.capacity_bits_per_s - link.egress_bits_per_s) + link.rtt_s
    begins_s = link.drained_s
    holder = source.holder
    if isinstance(holder, InstanceView) and holder.busy_until_s > begins_s:
        # It computes the last token of what it sends, behind the prefills that it has.
        begins_s = holder.busy_until_s
    if begins_s > view.now_s:
        moved_s += begins_s - view.now_s
    load_s = option.load_s
    if request.pools:
        moved_s, load_s = _from_tiers(request, view, option, source, tokens, skip, moved_s)
    prefill_s = option.cluster.after_prefix_s(request.num_tokens - tokens, tokens)
    if moved_s + load_s >= option.load_s + option.prefill_s - prefill_s:
        return option
    if link.egress_price_per_byte:
        spared_s = option.prefill_s - prefill_s
        if not is_worth_its_bytes(link, kv_bytes, spared_s, option.cluster.instance_price_per_s):
            return option
    ready_s = option.start_s - option.load_s
    start_s = (ready_s if ready_s > moved_s else moved_s) + load_s
    ttft_s = loaded_s = start_s + prefill_s
    if option.link is not None:
        wait_s, link_s, rtt_s = option.link_wait_s, option.link_s, option.link.rtt_s
        early, kills_per_s = request.first_from_prefill, option.cluster.kills_per_s
        checkpoint_s = view.checkpoint_s(option.link, early)
        loaded_s = streamed_s(start_s, prefill_s, wait_s, link_s, rtt_s, kills_per_s, checkpoint_s)
        ttft_s = loaded_s
        if early:
            ttft_s = streamed_s(start_s, prefill_s, 0.0, 0.0, rtt_s, kills_per_s, checkpoint_s)
    return PrefillCandidate(
        option.cluster,
        option.instance,
        tokens,
        start_s,
        prefill_s,
        option.link,
        option.link_wait_s,
        option.link_s,
        ttft_s,
        loaded_s,
        option.kv_bytes,
        CacheTransfer(holder.name, sent_tokens, skip, kv_bytes, pooled),
        load_s,
    )


def _in_target_pool(request: RoutingRequest, view: View, option: PrefillCandidate) -> PrefixHit | None:
    pool = pool_at(view, option.instance.name)
    hit = request.pools.get(pool.name) if pool is not None else None
    return None if hit is None else hit.every_tier


def _from_tiers(
    request: RoutingRequest,
    view: View,
    option: PrefillCandidate,
    source: PrefixSource,
    tokens: int,
    skip_tokens: int,
    moved_s: float,
) -> tuple[float, float]:
    """What moving takes with the source's own loading, and what the target loads after it."""
    if not isinstance(source, PooledPrefix):
        # The instance loads it from its machine's pool before it sends.
        return moved_s + request.loads_s.get(source.holder.name, 0.0), option.load_s
    target = pool_at(view, option.instance.name)
    assert target is not None  # `_best_source` has asked for it
    # Pools exchange pages between clusters that keep them in one dtype.
    kv = view.kv_of_pools(option.cluster.name)
    read_s = reading_s(kv, source.holder, request.pools[source.holder.name], tokens, skip_tokens)
    loaded_bytes = kv.prefix_bytes_to_move(tokens, 0)
    return max(moved_s, read_s), BITS_PER_BYTE * loaded_bytes / target.memory_bits_per_s


def _best_source(
    view: View, pd: PdCandidate, option: PrefillCandidate, marks: AbundanceMarks
) -> tuple[PrefixSource, LinkView] | None:
    for source in pd.sources:
        if source.held_tokens <= option.reusable_tokens:
            return None
        if type(source) is PooledPrefix and pool_at(view, option.instance.name) is None:
            continue
        if view.blocked and (source.holder.name, option.instance.name) in view.blocked:
            continue
        link = _link_from(source, option.cluster.name, view, marks)
        if link is not None:
            return source, link
    return None


def _link_from(source: PrefixSource, target: str, view: View, marks: AbundanceMarks) -> LinkView | None:
    link = abundant_link(view, source.cluster.name, target, marks)
    is_apart = link is not None and not link.joins_pools and type(source) is PooledPrefix
    return None if is_apart else link
