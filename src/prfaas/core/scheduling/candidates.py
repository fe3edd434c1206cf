"""Candidates for one request: which instance of a cluster would prefill, which would decode, over which link.

A `PrefillCandidate` carries what is predicted of one way to prefill.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from prfaas.core.scheduling.decision import CacheTransfer, RoutingRequest
from prfaas.core.scheduling.view import (
    ClusterKind,
    ClusterView,
    InstanceView,
    LinkView,
    NoDecodeInstanceError,
    View,
)
from prfaas.core.units import BITS_PER_BYTE


# Not frozen, like all that doesn't outlive a decision: a frozen one takes five times as long to make.
@dataclass(slots=True)
class PrefillCandidate:
    """Prefill by `instance` of `cluster` and, unless it decodes too, a transfer. Seconds count from now."""

    cluster: ClusterView
    instance: InstanceView
    reusable_tokens: int
    """Tokens that need not be computed."""
    start_s: float
    """Until the prefill starts: its queue, or the arrival of a cache."""
    prefill_s: float
    """What the prefill takes."""
    link: LinkView | None
    """What the KV crosses; None inside a PD cluster, whose network is never the bottleneck (section 3.4.1)."""
    link_wait_s: float
    """Until the bytes accepted for the link have left."""
    link_s: float
    """What this KV alone takes on the link."""
    ttft_s: float
    """Until the decode instance has everything."""
    kv_bytes: int
    """What crosses `link`; 0 without one."""
    cache_transfer: CacheTransfer | None


def prefill_by(
    request: RoutingRequest, view: View, cluster: ClusterView, instance: InstanceView
) -> PrefillCandidate:
    """Prefill by an instance that decodes too, or whose transfer takes no time."""
    held_tokens = request.reusable_at(instance.name) if request.held else 0
    wait_s = max(instance.busy_until_s - view.now_s, 0.0)
    prefill_s = cluster.prefill_s(request.num_tokens - held_tokens)
    return PrefillCandidate(
        cluster, instance, held_tokens, wait_s, prefill_s, None, 0.0, 0.0, wait_s + prefill_s, 0, None
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
    hop_s = rtt_s + BITS_PER_BYTE * view.kv.prefix_bytes_to_move(1, 0) / bits_per_s
    cluster = view.clusters[decode.cluster]
    here = prefill_by(request, view, cluster, decode)
    return here if here.ttft_s - cluster.prefill_s(1) < hop_s else None


def kv_bytes_to(request: RoutingRequest, view: View, decode: InstanceView) -> int:
    """KV bytes that a prefill elsewhere sends to the instance that decodes."""
    skip = request.attention_at(decode.name) if request.held and view.kv.can_skip else 0
    return view.kv.bytes_to_move(request.num_tokens, skip)


def streamed(option: PrefillCandidate, link: LinkView, now_s: float, kv_bytes: int) -> PrefillCandidate:
    """The prefill of another cluster, its KV streamed over `link` while it is made (section 3.3)."""
    link_s = BITS_PER_BYTE * kv_bytes / link.capacity_bits_per_s
    link_wait_s = link.drained_s - now_s
    if link_wait_s < 0.0:
        link_wait_s = 0.0
    start_s, prefill_s = option.start_s, option.prefill_s
    ttft_s = streamed_s(start_s, prefill_s, link_wait_s, link_s, link.rtt_s)
    return PrefillCandidate(
        option.cluster,
        option.instance,
        option.reusable_tokens,
        start_s,
        prefill_s,
        link,
        link_wait_s,
        link_s,
        ttft_s,
        kv_bytes,
        None,
    )


def streamed_s(start_s: float, prefill_s: float, link_wait_s: float, link_s: float, rtt_s: float) -> float:
    """Seconds until a streamed prefill has arrived.

    Both are needed: the prefill's end, and this KV's bytes after those that the link has already accepted.
    """
    computed_s = start_s + prefill_s
    sent_s = (start_s if start_s > link_wait_s else link_wait_s) + link_s
    return (computed_s if computed_s > sent_s else sent_s) + rtt_s


@dataclass(slots=True)
class BestCandidate(PrefillCandidate):
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
    compared by the longer prefix, the fewer requests in flight, the order of the cluster's list. Prefills that wait
    for any instance of the cluster come first too, an equal part of them at each.
    """
    if not request.held:
        return least_queued(request, cluster, view)
    now_s, avoid, num_tokens = view.now_s, view.avoid, request.num_tokens
    held_at = request.held.get
    chosen: InstanceView | None = None
    holder: InstanceView | None = None
    reusable, longest, in_flight, asked_tokens = 0, -1, 0, -1
    done_s = wait_s = prefill_s = seconds = least_wait_s = math.inf
    # `reusable_at` in line: this loop is most of a decision's time.
    for instance in cluster.instances:
        if not instance.takes_prefills or (avoid and instance.name in avoid):
            continue
        queue_s = instance.busy_until_s - now_s
        if queue_s < 0.0:
            queue_s = 0.0
        if queue_s < least_wait_s:
            least_wait_s = queue_s
        tokens = 0
        if (here := held_at(instance.name)) is not None:
            tokens = here.reusable_tokens
            if tokens >= num_tokens:
                tokens = num_tokens - 1
        if tokens > longest:
            holder, longest = instance, tokens
        if chosen is not None and queue_s >= wait_s and tokens <= reusable:
            # Not sooner; as good only if it is equal in both, and then less may be open there.
            if queue_s > wait_s or tokens < reusable or instance.in_flight >= in_flight:
                continue
        elif chosen is None or tokens != reusable:
            if queue_s > done_s:
                continue
            if tokens != asked_tokens:
                asked_tokens, seconds = tokens, cluster.prefill_s(num_tokens - tokens)
            end_s = queue_s + seconds
            if end_s > done_s or (end_s == done_s and tokens < reusable):
                continue
            prefill_s = seconds
        chosen, reusable, in_flight, wait_s = instance, tokens, instance.in_flight, queue_s
        done_s = wait_s + prefill_s
    if chosen is None or holder is None:
        return None
    if cluster.waiting_s > 0.0:
        shared_s = cluster.waiting_s / len(prefillers(cluster, view))
        least_wait_s += shared_s
        wait_s += shared_s
        done_s += shared_s
    return BestCandidate(
        cluster,
        chosen,
        reusable,
        wait_s,
        prefill_s,
        None,
        0.0,
        0.0,
        done_s,
        0,
        None,
        least_wait_s,
        holder,
        longest,
    )


def least_queued(request: RoutingRequest, cluster: ClusterView, view: View) -> BestCandidate | None:
    """`best_candidate` where none holds anything, several times as fast: the shortest queue, the fewest in flight."""
    avoid, now_s = view.avoid, view.now_s
    chosen: InstanceView | None = None
    holder: InstanceView | None = None
    least_s, in_flight = math.inf, 0
    for instance in cluster.instances:
        if not instance.takes_prefills or (avoid and instance.name in avoid):
            continue
        if holder is None:
            holder = instance
        busy_s = instance.busy_until_s
        if busy_s < now_s:
            busy_s = now_s
        if busy_s < least_s or (busy_s == least_s and instance.in_flight < in_flight):
            chosen, least_s, in_flight = instance, busy_s, instance.in_flight
            if busy_s == now_s and not in_flight:
                break  # none can be better
    if chosen is None or holder is None:
        return None
    wait_s = least_s - now_s
    prefill_s = cluster.prefill_s(request.num_tokens)
    done_s = wait_s + prefill_s
    if cluster.waiting_s > 0.0:
        shared_s = cluster.waiting_s / len(prefillers(cluster, view))
        wait_s += shared_s
        done_s += shared_s
    return BestCandidate(
        cluster, chosen, 0, wait_s, prefill_s, None, 0.0, 0.0, done_s, 0, None, wait_s, holder, 0
    )


class PrefixSource(Protocol):
    """The longest prefix of a request in one cluster. A `BestCandidate` is one."""

    cluster: ClusterView
    holder: InstanceView
    """The instance that holds it."""
    held_tokens: int
    """Its length."""


_by_tokens = attrgetter("held_tokens")


@dataclass(slots=True)
class PrefillCandidates:
    """The instance of every cluster that would prefill, and the prefixes that clusters hold."""

    own: dict[str, BestCandidate]
    """By PD cluster."""
    far: list[BestCandidate]
    """Those of PrfaaS clusters."""
    sources: list[PrefixSource]
    """The longest prefix of every cluster that holds any, the longest first."""


def prefill_candidates(request: RoutingRequest, view: View) -> PrefillCandidates:
    """The candidates of all clusters with an instance that may prefill."""
    own: dict[str, BestCandidate] = {}
    far: list[BestCandidate] = []
    sources: list[PrefixSource] = []
    for cluster in view.clusters.values():
        node = best_candidate(request, cluster, view)
        if node is None:
            continue
        if cluster.kind == "pd":
            own[cluster.name] = node
        else:
            far.append(node)
        if node.held_tokens:
            sources.append(node)
    if len(sources) > 1:
        sources.sort(key=_by_tokens, reverse=True)
    return PrefillCandidates(own, far, sources)


def able_to_send(
    request: RoutingRequest, view: View, decode: InstanceView, prefill: PrefillCandidates
) -> PrefillCandidates:
    """Of all who would prefill those who can send to `decode`."""
    reached = view.towards(decode.name)
    return prefill if reached is view else prefill_candidates(request, reached)


def prefillers(cluster: ClusterView, view: View) -> list[InstanceView]:
    """The instances of `cluster` that may be given prefills."""
    return [each for each in cluster.instances if each.takes_prefills and each.name not in view.avoid]


def is_kept_apart(view: View, decode: InstanceView, kind: ClusterKind) -> bool:
    """Whether an instance that may prefill gets nothing only because `decode` takes no KV from it."""
    unable = {producer for producer, consumer in view.blocked if consumer == decode.name}
    return any(
        each.name in unable
        for cluster in view.clusters.values()
        if unable and cluster.kind == kind and (kind == "prfaas" or cluster.name == decode.cluster)
        for each in prefillers(cluster, view)
    )


def decode_choices(request: RoutingRequest, view: View) -> list[tuple[ClusterView, InstanceView]]:
    """Per PD cluster the instance that would decode.

    Healthy ones that are not being drained; if no cluster has one, draining ones; then those that only prefill, since
    every engine of a PD cluster can decode; then unhealthy ones, since nothing else can answer a client. Never one
    that an operator has closed.

    Raises:
        NoDecodeInstanceError: there is not even one of these.
    """
    found = []
    for cluster in view.clusters.values():
        if cluster.kind == "pd":
            decode = _decoder(request, [each for each in cluster.instances if each.takes_decodes], view)
            if decode is not None:
                found.append((cluster, decode))
    return found or _last_resorts(request, view)


def load_of(decode: InstanceView) -> float:
    """The share of its slots in use."""
    return decode.decoding / decode.decode_slots


def _last_resorts(request: RoutingRequest, view: View) -> list[tuple[ClusterView, InstanceView]]:
    for is_able in (
        lambda each: each.decodes and each.healthy,
        lambda each: each.healthy,
        lambda _: True,
    ):
        found = []
        for cluster in view.clusters.values():
            if cluster.kind == "pd":
                decode = _decoder(
                    request, [each for each in cluster.instances if is_able(each) and not each.closed], view
                )
                if decode is not None:
                    found.append((cluster, decode))
        if found:
            return found
    raise NoDecodeInstanceError("no instance of any PD cluster can decode")


def _decoder(request: RoutingRequest, able: Sequence[InstanceView], view: View) -> InstanceView | None:
    """The best of these that need not be avoided; None if there is none.

    Each is worth the share of the prompt that it spares the network, less the share of its slots in use. So one that
    holds more of the prompt is taken, until its load exceeds another's by more than that share. One without a free
    slot comes after all others. Equal ones are compared by the fewer requests in flight, then by their order.
    """
    if view.avoid:
        able = [each for each in able if each.name not in view.avoid]
    held_at, num_tokens, can_skip = request.held.get, request.num_tokens, view.kv.can_skip
    chosen: InstanceView | None = None
    worth = 0.0
    for instance in able:
        load = instance.decoding / instance.decode_slots
        here = -load if load < 1.0 else -load - 2.0
        if (at := held_at(instance.name)) is not None:
            # Of windows nothing is skipped; what spares neither bytes nor computing is worth nothing.
            spared = at.attention_tokens if can_skip else at.reusable_tokens
            here += spared / num_tokens if spared < num_tokens else 1.0
        if chosen is None or here > worth or (here == worth and instance.in_flight < chosen.in_flight):
            chosen, worth = instance, here
    return chosen


def least_loaded(instances: Sequence[InstanceView]) -> InstanceView | None:
    """The decode instance where none holds anything and none is to be avoided; None if none may decode."""
    chosen: InstanceView | None = None
    least = math.inf
    for instance in instances:
        if instance.takes_decodes:
            load = instance.decoding / instance.decode_slots
            if load <= least and (load < least or chosen is None or instance.in_flight < chosen.in_flight):
                chosen, least = instance, load
    return chosen
