"""Candidates for one request: which instance of a cluster would prefill, which would decode, over which link.

A `PrefillCandidate` carries what is predicted of one way to prefill.
"""

import math
from collections.abc import Iterator, Mapping
from operator import attrgetter

from msgspec import Struct

from prfaas.core.scheduling.decision import NOTHING, CacheTransfer, RoutingRequest
from prfaas.core.scheduling.hazard import streamed_s
from prfaas.core.scheduling.tiers import source_pool
from prfaas.core.scheduling.view import (
    ClusterKind,
    ClusterView,
    InstanceView,
    LinkView,
    PoolView,
    View,
    may_sample,
)
from prfaas.core.units import BITS_PER_BYTE


# A struct, like all that every decision makes several of: by name a data class takes five times as long to make.
class PrefillCandidate(Struct, kw_only=True, frozen=True):
    """Prefill by `instance` of `cluster` and, unless it decodes too, a transfer. Seconds count from now."""

    cluster: ClusterView
    instance: InstanceView
    reusable_tokens: int
    """Tokens that need not be computed."""
    start_s: float
    """Until the prefill starts: its queue, or the arrival of a cache, and what it loads from its machine's pool."""
    prefill_s: float
    """What the prefill takes."""
    ttft_s: float
    """Until the decode instance has everything; where the prefill gives the first token, until the client has it."""
    loaded_s: float
    """Until the decode instance has everything, whoever gives the first token."""
    link: LinkView | None = None
    """What the KV crosses; None inside a PD cluster, whose network is never the bottleneck (section 3.4.1)."""
    link_wait_s: float = 0.0
    """Until the bytes accepted for the link have left."""
    link_s: float = 0.0
    """What this KV alone takes on the link."""
    kv_bytes: int = 0
    """What crosses `link`; 0 without one."""
    cache_transfer: CacheTransfer | None = None
    load_s: float = 0.0
    """Of `start_s` what it loads from its machine's pool."""
    stall_s: float = 0.0
    """For how long it holds up others, summed: the other ranks of a data-parallel group, which decode no faster, or
    the answers of a decode instance that takes the part of a prefill instance."""

    @property
    def delay_s(self) -> float:
        """What ways are compared by: the mean of `ttft_s` and `loaded_s`, equal where the first token waits for the KV.

        What it holds others up comes on top.
        By the first token alone links would cost nothing, and a full one would get ever more. By the mean neither
        wait is free. The way with the least mean has its first token no later than any way has everything.
        """
        return (self.ttft_s + self.loaded_s) / 2.0 + self.stall_s


def prefill_by(
    request: RoutingRequest, view: View, cluster: ClusterView, instance: InstanceView, *, waiting: int = 0
) -> PrefillCandidate:
    """Prefill by an instance that decodes too, or whose transfer takes no time; `waiting`: answers that it holds up."""
    held_tokens = request.reusable_at(instance.name)
    load_s = request.loads_s.get(instance.name, 0.0)
    start_s = max(instance.busy_until_s - view.now_s, 0.0) + load_s
    prefill_s = cluster.after_prefix_s(request.num_tokens - held_tokens, held_tokens)
    end_s = start_s + prefill_s
    return PrefillCandidate(
        cluster=cluster,
        instance=instance,
        reusable_tokens=held_tokens,
        start_s=start_s,
        prefill_s=prefill_s,
        ttft_s=end_s,
        loaded_s=end_s,
        load_s=load_s,
        stall_s=(prefill_s * instance.held_up if instance.group else 0.0) + prefill_s * waiting,
    )


# Longer prompts are not looked at: their prefill takes longer than a hop, and most requests are longer.
LONGEST_TINY_TOKENS = 100
# A hop inside a PD cluster, of which no link is known: one more exchange with an engine, and 10 Gbit/s.
NEAR_HOP_S, NEAR_HOP_BITS_PER_S = 0.005, 1e10


def prefill_without_hop(
    request: RoutingRequest, view: View, decode: InstanceView, option: PrefillCandidate
) -> PrefillCandidate | None:
    """The prefill by `decode` itself, where the prompt is so short that the hop of `option` costs more than it spares.

    A hop costs its round trip, and the bytes that move however short the prompt is: a block, and the states of linear
    layers. It spares the decode instance all tokens but the last, which that one computes at any rate.
    """
    if request.num_tokens > LONGEST_TINY_TOKENS or option.instance is decode:
        return None
    link = option.link
    rtt_s, bits_per_s = (
        (NEAR_HOP_S, NEAR_HOP_BITS_PER_S) if link is None else (link.rtt_s, link.capacity_bits_per_s)
    )
    kv = view.kv_between(option.cluster.name, decode.cluster)
    hop_s = rtt_s + BITS_PER_BYTE * kv.prefix_bytes_to_move(1, 0) / bits_per_s
    cluster = view.clusters[decode.cluster]
    here = prefill_by(request, view, cluster, decode)
    return here if here.ttft_s - cluster.prefill_s(1) < hop_s else None


def kv_bytes_to(request: RoutingRequest, view: View, decode: InstanceView, link: LinkView) -> int:
    """KV bytes that a prefill elsewhere sends over `link` to the instance that decodes."""
    kv = link.kv or view.kv
    skip = request.attention_at(decode.name) if request.held and kv.can_skip else 0
    return kv.bytes_to_move(request.num_tokens, skip)


def gives_first(
    request: RoutingRequest, view: View, option: PrefillCandidate, link: LinkView | None, kv_bytes: int
) -> bool:
    """Whether the client has its first token from the prefill of `option`, which sends its KV over `link`."""
    if not request.first_from_prefill:
        return False
    reused_tokens = option.reusable_tokens
    every_tokens = view.checkpoint_tokens(
        option.cluster, link, request.num_tokens - reused_tokens, reused_tokens, kv_bytes
    )
    return may_sample(option.cluster, link, every_tokens)


def streamed(
    request: RoutingRequest, option: PrefillCandidate, link: LinkView, view: View, kv_bytes: int
) -> PrefillCandidate:
    """The prefill of another cluster, its KV streamed over `link` while it is made (section 3.3).

    Where it gives the first token, its TTFT is that of a token which comes back while the KV is still on its way.
    """
    first_from_prefill = gives_first(request, view, option, link, kv_bytes)
    link_s = BITS_PER_BYTE * kv_bytes / link.capacity_bits_per_s
    link_wait_s = max(link.drained_s - view.now_s, 0.0)
    start_s, prefill_s, rtt_s = option.start_s, option.prefill_s, link.rtt_s
    kills_per_s, checkpoint_s = option.cluster.kills_per_s, math.inf
    if kills_per_s:
        checkpoint_s = view.checkpoint_s(link, first_from_prefill)
    loaded_s = streamed_s(start_s, prefill_s, link_wait_s, link_s, rtt_s, kills_per_s, checkpoint_s)
    ttft_s = loaded_s
    if first_from_prefill:
        ttft_s = streamed_s(start_s, prefill_s, 0.0, 0.0, rtt_s, kills_per_s, checkpoint_s)
    return PrefillCandidate(
        cluster=option.cluster,
        instance=option.instance,
        reusable_tokens=option.reusable_tokens,
        start_s=start_s,
        prefill_s=prefill_s,
        ttft_s=ttft_s,
        loaded_s=loaded_s,
        link=link,
        link_wait_s=link_wait_s,
        link_s=link_s,
        kv_bytes=kv_bytes,
        cache_transfer=option.cache_transfer,
        load_s=option.load_s,
        stall_s=option.stall_s,
    )


class BestCandidate(PrefillCandidate, kw_only=True, frozen=True):
    """The instance of one cluster that would prefill a request, and the cluster's queue and prefix."""

    least_wait_s: float
    """The cluster's shortest prefill queue."""
    holder: InstanceView
    """The instance with the cluster's longest reusable prefix."""
    held_tokens: int
    """The length of that prefix."""


def best_candidate(request: RoutingRequest, cluster: ClusterView, view: View) -> BestCandidate | None:
    """The instance that would be done first: its queue, then what it does not hold. None if none may be used.

    So the instance with the longest prefix is taken unless its queue costs more than its cache saves. Equal ones are
    compared by the longer prefix, the shorter queue, the fewer requests in flight, the order of the cluster's list.
    Prefills that wait for any instance of the cluster come first too, an equal part of them at each.
    """
    if not request.held:
        return least_queued(request, cluster, view)
    soonest, queues_s, held_tokens, holder = _queues(request, cluster, view)
    if not queues_s:
        return None
    _, minus_tokens, ready_s, _, place, prefill_s, load_s, copied = min(
        _ways(request, cluster, view, soonest)
    )
    shared_s = cluster.waiting_s / len(queues_s)
    start_s = ready_s + load_s
    end_s = start_s + prefill_s + shared_s
    return BestCandidate(
        cluster=cluster,
        instance=cluster.instances[place],
        reusable_tokens=-minus_tokens,
        start_s=start_s + shared_s,
        prefill_s=prefill_s,
        ttft_s=end_s,
        loaded_s=end_s,
        cache_transfer=copied,
        load_s=load_s,
        stall_s=prefill_s * cluster.instances[place].held_up,
        least_wait_s=min(queues_s) + shared_s,
        holder=cluster.instances[holder],
        held_tokens=held_tokens,
    )


_Queue = tuple[float, float, int, int]


def _queues(
    request: RoutingRequest, cluster: ClusterView, view: View
) -> tuple[dict[int, _Queue], list[float], int, int]:
    """The queues of those that may prefill.

    Returns:
        By what is held, which is the same at most of them, the instance that is free first: seconds until it has
        loaded that, its queue in seconds, its requests in flight, and its place in the cluster.
        All queues in seconds.
        The most tokens that one of them need not compute, and the place of the first of these.
    """
    now_s, avoid, loads_s, held_at = view.now_s, view.avoid, request.loads_s, request.held.get
    most_tokens = max(request.num_tokens - 1, 0)
    soonest: dict[int, _Queue] = {}
    queues_s, held_tokens, holder = [], -1, 0
    for place, each in enumerate(cluster.instances):
        if not each.prefills or not each.is_open or each.name in avoid:
            continue
        tokens = held_at(each.name, NOTHING).reusable_tokens
        # Not `max`, which would be a fifth of the time of this loop, the longest of a decision.
        queue_s = each.busy_until_s - now_s if each.busy_until_s > now_s else 0.0
        queue = queue_s + loads_s.get(each.name, 0.0), queue_s, each.in_flight, place
        queues_s.append(queue_s)
        if tokens not in soonest or queue < soonest[tokens]:
            soonest[tokens] = queue
        if held_tokens < tokens and held_tokens < most_tokens:
            held_tokens, holder = tokens, place
    return soonest, queues_s, min(held_tokens, most_tokens), holder


_Way = tuple[float, int, float, int, int, float, float, CacheTransfer | None]


def _ways(
    request: RoutingRequest, cluster: ClusterView, view: View, soonest: Mapping[int, _Queue]
) -> Iterator[_Way]:
    """How instances could begin, the least is the best: from what they hold, or from a copy.

    Done when; less the tokens that it starts from; ready when; requests in flight; its place in the cluster; what
    its prefill takes; what it loads; the copy that comes first.
    """
    num_tokens, instances = request.num_tokens, cluster.instances
    for held_tokens, (_, queue_s, in_flight, place) in soonest.items():
        tokens = min(held_tokens, max(num_tokens - 1, 0))
        load_s = request.loads_s.get(instances[place].name, 0.0)
        prefill_s = cluster.after_prefix_s(num_tokens - tokens, tokens)
        yield queue_s + load_s + prefill_s, -tokens, queue_s, in_flight, place, prefill_s, load_s, None
    for place, each in enumerate(instances) if request.copies else ():
        copy = request.copies.get(each.name)
        if copy is not None and each.takes_prefills and each.name not in view.avoid:
            tokens, load_s, ready_s = (
                copy.transfer.num_tokens,
                copy.load_s,
                max(each.busy_until_s - view.now_s, copy.copy_s, 0.0),
            )
            prefill_s = cluster.after_prefix_s(num_tokens - tokens, tokens)
            end_s = ready_s + load_s + prefill_s
            yield end_s, -tokens, ready_s, each.in_flight, place, prefill_s, load_s, copy.transfer


def least_queued(request: RoutingRequest, cluster: ClusterView, view: View) -> BestCandidate | None:
    """`best_candidate` where none holds anything, several times as fast: the shortest queue, the fewest in flight."""
    now_s, avoid = view.now_s, view.avoid
    chosen: InstanceView | None = None
    best = (math.inf, 0)
    for instance in cluster.instances:
        if not instance.prefills:
            continue
        rank = instance.busy_until_s if instance.busy_until_s > now_s else now_s, instance.in_flight
        if rank < best and instance.is_open and instance.name not in avoid:
            chosen, best = instance, rank
            if best == (now_s, 0):
                break  # none can be better
    if chosen is None:
        return None
    shared_s = cluster.waiting_s / len(prefillers(cluster, view)) if cluster.waiting_s > 0.0 else 0.0
    wait_s, prefill_s = best[0] - now_s, cluster.prefill_s(request.num_tokens)
    end_s = wait_s + prefill_s + shared_s
    return BestCandidate(
        cluster=cluster,
        instance=chosen,
        reusable_tokens=0,
        start_s=wait_s + shared_s,
        prefill_s=prefill_s,
        ttft_s=end_s,
        loaded_s=end_s,
        stall_s=prefill_s * chosen.held_up if chosen.group else 0.0,
        least_wait_s=wait_s + shared_s,
        holder=chosen,
        held_tokens=0,
    )


class PrefixSource(Struct, kw_only=True, frozen=True):
    """The longest prefix of a request in one cluster."""

    cluster: ClusterView
    holder: InstanceView | PoolView
    """The instance or the pool that holds it."""
    held_tokens: int
    """Its length."""


_by_tokens = attrgetter("held_tokens")


class PrefillCandidates(Struct, kw_only=True, frozen=True):
    """The instance of every cluster that would prefill, and the prefixes that clusters hold."""

    own: dict[str, BestCandidate]
    """By PD cluster."""
    far: list[BestCandidate]
    """Those of PrfaaS clusters."""
    far_s: float
    """When the first of these would have computed it; infinite: there are none."""
    sources: list[PrefixSource]
    """The longest prefix of every cluster that holds any, the longest first; before it one as long in a pool."""


def prefill_candidates(request: RoutingRequest, view: View) -> PrefillCandidates:
    """The candidates of all clusters with an instance that may prefill."""
    own: dict[str, BestCandidate] = {}
    far: list[BestCandidate] = []
    sources: list[PrefixSource] = []
    for cluster in view.clusters.values():
        if request.pools and (pooled := source_pool(request, view, cluster.name)) is not None:
            sources.append(PrefixSource(cluster=cluster, holder=pooled[0], held_tokens=pooled[1]))
        node = best_candidate(request, cluster, view)
        if node is None:
            continue
        if cluster.kind == "pd":
            own[cluster.name] = node
        else:
            far.append(node)
        if node.held_tokens:
            sources.append(PrefixSource(cluster=cluster, holder=node.holder, held_tokens=node.held_tokens))
    if len(sources) > 1:
        sources.sort(key=_by_tokens, reverse=True)
    far_s = min([node.ttft_s for node in far], default=math.inf)
    return PrefillCandidates(own=own, far=far, far_s=far_s, sources=sources)


def able_to_send(
    request: RoutingRequest, view: View, decode: InstanceView, prefill: PrefillCandidates
) -> PrefillCandidates:
    """Of all who would prefill those who can send to `decode`."""
    reached = view.towards(decode.name)
    return prefill if reached is view else prefill_candidates(request, reached)


def prefillers(cluster: ClusterView, view: View) -> list[InstanceView]:
    """The instances of `cluster` that may be given prefills."""
    able = [each for each in cluster.instances if each.prefills and each.is_open]
    return [each for each in able if each.name not in view.avoid] if view.avoid else able


def is_kept_apart(view: View, decode: InstanceView, kind: ClusterKind) -> bool:
    """Whether an instance that may prefill gets nothing only because `decode` takes no KV from it."""
    unable = {producer for producer, consumer in view.blocked if consumer == decode.name}
    return any(
        each.name in unable
        for cluster in view.clusters.values()
        if unable and cluster.kind == kind and (kind == "prfaas" or cluster.name == decode.cluster)
        for each in prefillers(cluster, view)
    )
