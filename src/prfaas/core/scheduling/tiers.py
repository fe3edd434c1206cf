"""Prefix-cache pools as routing sees them: what a machine's pool spares its engines, and what loading it costs."""

import math
from collections.abc import Mapping

from prfaas.core.prefix.index import NOTHING, PoolHit, PrefixHit
from prfaas.core.scheduling.decision import CacheTransfer, HitTokens, KvFacts, PoolCopy, RoutingRequest
from prfaas.core.scheduling.view import ClusterView, PoolView, View
from prfaas.core.units import BITS_PER_BYTE

# One more exchange between two machines of a cluster, of which no link is known.
_HOP_S = 0.005


def with_pools(
    num_tokens: int,
    held: Mapping[str, PrefixHit],
    pools: Mapping[str, PoolHit],
    view: View,
    ordinal: int = 0,
    *,
    first_from_prefill: bool = False,
) -> RoutingRequest:
    """The request as policies see it: every instance holds the best of its own blocks and its machine's pool.

    A pool counts for computing only where loading and the rest of the prefill take less than the prefill without it.
    Its attention always counts: an instance that decodes loads it, and those bytes cross no link.
    A prefix that only another machine of the cluster holds is a copy, where copying and loading it is faster still.
    Without pools the request is the plain one.

    Args:
        num_tokens: tokens of the whole prompt.
        held: instance name → what its engine's own blocks hold.
        pools: pool name → what it holds.
        view: tells which instances are on a pool's machine, and how fast its tiers are.
        ordinal: as in `RoutingRequest`.
        first_from_prefill: as in `RoutingRequest`.
    """
    usable = {name: hit for name, hit in pools.items() if name in view.pools and view.pools[name].up}
    if not usable:
        return RoutingRequest(num_tokens, held, ordinal, first_from_prefill=first_from_prefill)
    merged, loads_s, copies = dict(held), {}, {}
    by_cluster: dict[str, dict[str, PoolHit]] = {}
    for name, hit in usable.items():
        by_cluster.setdefault(view.pools[name].cluster, {})[name] = hit
    for pool in view.pools.values():
        near = by_cluster.get(pool.cluster)
        if near is None or not pool.up:
            continue
        cluster, own_hit = view.clusters[pool.cluster], near.get(pool.name)
        others = near if own_hit is None else {name: near[name] for name in near if name != pool.name}
        for name in pool.instances:
            own = here = held.get(name, NOTHING)
            load_s = 0.0
            if own_hit is not None:
                here, load_s = _with_own_pool(
                    num_tokens, own, pool, own_hit, cluster, view.kv_of_pools(cluster.name)
                )
                merged[name] = here
                if load_s:
                    loads_s[name] = load_s
            if others:
                copy = _best_copy(num_tokens, own, here, load_s, pool, own_hit, others, view)
                if copy is not None:
                    copies[name] = copy
    return RoutingRequest(
        num_tokens,
        merged,
        ordinal,
        loads_s=loads_s,
        pools=usable,
        copies=copies,
        own=held,
        first_from_prefill=first_from_prefill,
    )


def loading_s(kv: KvFacts, pool: PoolView, hit: PoolHit, num_tokens: int, own_tokens: int) -> float:
    """Seconds until an engine has tokens [`own_tokens`, `num_tokens`) from the pool of its machine.

    The states at the end are taken for as slow as the slowest tier that holds any part of it.
    """
    kv_bytes = kv.prefix_bytes_to_move(num_tokens, min(own_tokens, num_tokens))
    ssd_bytes = _ssd_bytes(kv, hit, num_tokens, own_tokens)
    # What is on SSD comes into memory first.
    return BITS_PER_BYTE * (ssd_bytes / pool.ssd_bits_per_s + kv_bytes / pool.memory_bits_per_s)


def pool_at(view: View, instance: str) -> PoolView | None:
    """The pool of the machine of `instance`; None where there is none that answers."""
    for pool in view.pools.values():
        if pool.up and instance in pool.instances:
            return pool
    return None


def source_pool(request: RoutingRequest, view: View, cluster: str) -> tuple[PoolView, int] | None:
    """The pool of `cluster` with the longest reusable prefix, and its length; None if none holds anything.

    Only whole prefixes count that leave a token to compute where it goes, and the last one where it is decoded.
    """
    found: tuple[PoolView, int] | None = None
    for name, hit in request.pools.items():
        pool = view.pools[name]
        tokens = hit.every_tier.reusable_tokens
        if pool.cluster != cluster or not 0 < tokens <= request.num_tokens - 2:
            continue
        if found is None or tokens > found[1]:
            found = (pool, tokens)
    return found


def reading_s(kv: KvFacts, pool: PoolView, hit: PoolHit, num_tokens: int, skip_tokens: int) -> float:
    """Seconds until the pool has tokens [`skip_tokens`, `num_tokens`) in memory, to be sent to another machine."""
    return BITS_PER_BYTE * _ssd_bytes(kv, hit, num_tokens, skip_tokens) / pool.ssd_bits_per_s


def hit_tokens(
    request: RoutingRequest, view: View, prefill: str, reused_tokens: int, transfer: CacheTransfer | None
) -> HitTokens | None:
    """Where the tokens come from that instance `prefill` need not compute, with `transfer` before it.

    None where no pool holds anything of the request.
    """
    if not request.pools:
        return None
    own = min(request.own.get(prefill, NOTHING).reusable_tokens, reused_tokens)
    pool = pool_at(view, prefill)
    hit = request.pools.get(pool.name) if pool is not None else None
    held = own
    if hit is not None:
        held = reused_tokens if transfer is None else min(transfer.skip_tokens, reused_tokens)
        held = max(held, own)
    in_memory = own if hit is None else min(max(hit.in_memory.attention_tokens, own), held)
    return HitTokens(own, in_memory - own, held - in_memory, reused_tokens - held)


def _with_own_pool(
    num_tokens: int, own: PrefixHit, pool: PoolView, hit: PoolHit, cluster: ClusterView, kv: KvFacts
) -> tuple[PrefixHit, float]:
    """What an instance of the pool's machine holds, and the seconds of loading its reusable prefix."""
    there = hit.every_tier
    attention_tokens = max(own.attention_tokens, there.attention_tokens)
    reusable, own_tokens = (
        _below_last(there.reusable_tokens, num_tokens),
        _below_last(own.reusable_tokens, num_tokens),
    )
    if reusable <= own_tokens:
        return PrefixHit(own.reusable_tokens, attention_tokens), 0.0
    load_s = loading_s(kv, pool, hit, reusable, own.reusable_tokens)
    own_s = cluster.after_prefix_s(num_tokens - own_tokens, own_tokens)
    if load_s + cluster.after_prefix_s(num_tokens - reusable, reusable) >= own_s:
        return PrefixHit(own.reusable_tokens, attention_tokens), 0.0
    return PrefixHit(there.reusable_tokens, attention_tokens), load_s


def _best_copy(
    num_tokens: int,
    own: PrefixHit,
    here: PrefixHit,
    load_s: float,
    pool: PoolView,
    own_hit: PoolHit | None,
    others: Mapping[str, PoolHit],
    view: View,
) -> PoolCopy | None:
    """The prefix of another machine of the pool's cluster that an instance would be done sooner with than `here`."""
    cluster = view.clusters[pool.cluster]
    kv = view.kv_of_pools(pool.cluster)
    held_in_pool = 0 if own_hit is None else own_hit.every_tier.attention_tokens
    best: PoolCopy | None = None
    least_s = math.inf
    for name, hit in others.items():
        tokens = hit.every_tier.reusable_tokens
        if tokens <= here.reusable_tokens or tokens > num_tokens - 2:
            continue
        if least_s == math.inf:
            reused_tokens = _below_last(here.reusable_tokens, num_tokens)
            least_s = load_s + cluster.after_prefix_s(num_tokens - reused_tokens, reused_tokens)
        source = view.pools[name]
        skip = min(held_in_pool, tokens) if kv.can_skip else 0
        kv_bytes = kv.prefix_bytes_to_move(tokens, skip)
        moved_s = BITS_PER_BYTE * kv_bytes / source.network_bits_per_s
        copy_s = _HOP_S + max(moved_s, reading_s(kv, source, hit, tokens, skip))
        loaded_bytes = kv.prefix_bytes_to_move(tokens, min(own.reusable_tokens, tokens))
        loaded_s = BITS_PER_BYTE * loaded_bytes / pool.memory_bits_per_s
        done_s = copy_s + loaded_s + cluster.after_prefix_s(num_tokens - tokens, tokens)
        if done_s < least_s:
            least_s = done_s
            best = PoolCopy(CacheTransfer(name, tokens, skip, kv_bytes, from_pool=True), copy_s, loaded_s)
    return best


def _ssd_bytes(kv: KvFacts, hit: PoolHit, num_tokens: int, skip_tokens: int) -> int:
    """Of the KV of tokens [`skip_tokens`, `num_tokens`) what is not in memory."""
    if hit.in_memory.reusable_tokens >= num_tokens:
        return 0
    in_memory = min(max(hit.in_memory.attention_tokens, skip_tokens), num_tokens)
    return kv.prefix_bytes_to_move(num_tokens, in_memory)


def _below_last(tokens: int, num_tokens: int) -> int:
    return tokens if tokens < num_tokens else max(num_tokens - 1, 0)
