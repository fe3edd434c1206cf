"""Caches of other clusters: when they count, and when they move first (section 3.4.3 of the paper)."""

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.core.prefix.index import PrefixHit
from prfaas.core.scheduling.candidates import PrefillCandidate, PrefixSource, streamed
from prfaas.core.scheduling.decision import CacheTransfer, RoutingRequest
from prfaas.core.scheduling.egress import is_worth_its_bytes
from prfaas.core.scheduling.link_choice import AbundanceMarks, abundant_link
from prfaas.core.scheduling.pd_candidate import PdCandidate
from prfaas.core.scheduling.tiers import pool_at, reading_s
from prfaas.core.scheduling.view import LinkView, PoolView, View
from prfaas.core.units import BITS_PER_BYTE

# Of the tokens to compute: a cache transfer costs two more hops of the gateway, whatever its size.
_LEAST_SHARE = 0.1
# An instance that sends a prefix computes its last token.
_COMPUTED_AT_SOURCE = 1
# The prefill instance computes a token of its own, and the decode instance the prompt's last.
_COMPUTED_LATER = 2


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
) -> tuple[PrefillCandidate, str]:
    """The option after the longest cache of another cluster has moved to its instance, if that pays.

    Bandwidth must be abundant on a link from there. It must spare at least a tenth of the prefill's tokens, and
    the bytes, over what is left of the link and after its queue or the source's, must take less than the prefill that
    they spare, and cost no more than it.
    What a pool holds goes to the pool of the instance's machine, which the instance then loads from.
    A decode instance that prefills itself gets none.

    Returns:
        The option, as it was where no cache moves; and why none does, as `Decision.cache_stays`.
    """
    if not pd.sources:
        return option, ""
    longer = [each for each in pd.sources if each.held_tokens > option.reusable_tokens]
    if not longer:
        return option, ""
    if option.instance is pd.decode:
        return option, "decode-prefills"
    way = _way(view, longer, option, marks)
    if way is None:
        return option, "no-bandwidth"
    move = _move(request, view, option, *way)
    if move.tokens - option.reusable_tokens < _LEAST_SHARE * (request.num_tokens - option.reusable_tokens):
        return option, "spares-little"
    if move.moved_s + move.load_s >= option.load_s + option.prefill_s - move.prefill_s:
        return option, "slower"
    link, spared_s = way[1], option.prefill_s - move.prefill_s
    if link.egress_price_per_byte and not is_worth_its_bytes(
        link, move.transfer.kv_bytes, spared_s, option.cluster.instance_price_per_s
    ):
        return option, "egress-price"
    start_s = max(option.start_s - option.load_s, move.moved_s) + move.load_s
    moved = PrefillCandidate(
        cluster=option.cluster,
        instance=option.instance,
        reusable_tokens=move.tokens,
        start_s=start_s,
        prefill_s=move.prefill_s,
        ttft_s=start_s + move.prefill_s,
        loaded_s=start_s + move.prefill_s,
        cache_transfer=move.transfer,
        load_s=move.load_s,
        stall_s=move.prefill_s * option.instance.held_up,
    )
    if option.link is not None:
        moved = streamed(request, moved, option.link, view, option.kv_bytes)
    return moved, ""


@dataclass(slots=True, kw_only=True)
class _Move:
    """A cache on its way to an instance, and the prefill there after it."""

    transfer: CacheTransfer
    tokens: int
    """That the prefill need not compute."""
    moved_s: float
    """From now until it is there."""
    load_s: float
    """What the instance loads after it."""
    prefill_s: float


def _move(
    request: RoutingRequest, view: View, option: PrefillCandidate, source: PrefixSource, link: LinkView
) -> _Move:
    held, target = source.held_tokens, option.instance.name
    at_target: PrefixHit | None
    if isinstance(source.holder, PoolView):
        at_target, kv = _in_target_pool(request, view, option), view.kv_of_pools(option.cluster.name)
        sent_tokens = tokens = held
    else:
        at_target, kv = request.held.get(target), link.kv or view.kv
        sent_tokens = min(held + _COMPUTED_AT_SOURCE, request.num_tokens - _COMPUTED_LATER)
        tokens = sent_tokens - _COMPUTED_AT_SOURCE
    skip_tokens = min(at_target.attention_tokens, tokens) if at_target is not None and view.kv.can_skip else 0
    kv_bytes = kv.prefix_bytes_to_move(sent_tokens, skip_tokens)
    begins_s = link.drained_s
    if not isinstance(source.holder, PoolView):
        # It computes the last token of what it sends, behind the prefills that it has.
        begins_s = max(begins_s, source.holder.busy_until_s)
    moved_s = BITS_PER_BYTE * kv_bytes / (link.capacity_bits_per_s - link.egress_bits_per_s) + link.rtt_s
    moved_s += max(begins_s - view.now_s, 0.0)
    load_s = option.load_s
    if request.pools:
        moved_s, load_s = _from_tiers(request, view, option, source, tokens, skip_tokens, moved_s)
    return _Move(
        transfer=CacheTransfer(
            source.holder.name, sent_tokens, skip_tokens, kv_bytes, isinstance(source.holder, PoolView)
        ),
        tokens=tokens,
        moved_s=moved_s,
        load_s=load_s,
        prefill_s=option.cluster.after_prefix_s(request.num_tokens - tokens, tokens),
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
    if not isinstance(source.holder, PoolView):
        # The instance loads it from its machine's pool before it sends.
        return moved_s + request.loads_s.get(source.holder.name, 0.0), option.load_s
    target = pool_at(view, option.instance.name)
    assert target is not None  # `_way` has asked for it
    # Pools exchange pages between clusters that keep them in one dtype.
    kv = view.kv_of_pools(option.cluster.name)
    read_s = reading_s(kv, source.holder, request.pools[source.holder.name], tokens, skip_tokens)
    loaded_bytes = kv.prefix_bytes_to_move(tokens, 0)
    return max(moved_s, read_s), BITS_PER_BYTE * loaded_bytes / target.memory_bits_per_s


def _way(
    view: View, longest_first: Iterable[PrefixSource], option: PrefillCandidate, marks: AbundanceMarks
) -> tuple[PrefixSource, LinkView] | None:
    """The first source that can send to the option's instance now, and its link."""
    for source in longest_first:
        if isinstance(source.holder, PoolView) and pool_at(view, option.instance.name) is None:
            continue
        if (source.holder.name, option.instance.name) in view.blocked:
            continue
        link = _link_from(source, option.cluster.name, view, marks)
        if link is not None:
            return source, link
    return None


def _link_from(source: PrefixSource, target: str, view: View, marks: AbundanceMarks) -> LinkView | None:
    link = abundant_link(view, source.cluster.name, target, marks)
    is_apart = link is not None and not link.joins_pools and isinstance(source.holder, PoolView)
    return None if is_apart else link
