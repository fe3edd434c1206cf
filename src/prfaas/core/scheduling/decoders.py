"""Which instance of every PD cluster would decode a request, and when it would have a slot for it."""

import math
from collections.abc import Callable, Iterable
from operator import attrgetter

from prfaas.core.scheduling.decision import PrefixHit, RoutingRequest
from prfaas.core.scheduling.view import ClusterView, InstanceView, NoDecodeInstanceError, View

_LEAST_S = 1e-3
# What a prior is worth, and how fast a change of the traffic shows: the mean of so many answers has a standard
# deviation of a tenth where their lengths are exponential.
_MEMORY_ANSWERS = 100


def decode_choices(request: RoutingRequest, view: View) -> list[tuple[ClusterView, InstanceView]]:
    """Per PD cluster the instance that would decode.

    Healthy ones that are not being drained; if no cluster has one, draining ones; then those that only prefill, since
    every engine of a PD cluster can decode; then unhealthy ones, since nothing else can answer a client. Never one
    that an operator has closed.

    Raises:
        NoDecodeInstanceError: there is not even one of these.
    """
    for is_able in _ABLE:
        found = []
        for cluster in view.clusters.values():
            if cluster.kind == "pd":
                decode = _decoder(request, cluster, filter(is_able, cluster.instances), view)
                if decode is not None:
                    found.append((cluster, decode))
        if found:
            return found
    raise NoDecodeInstanceError("no instance of any PD cluster can decode")


def load_of(decode: InstanceView) -> float:
    """The share of its slots in use."""
    return decode.decoding / decode.decode_slots


def slot_free_s(decode: InstanceView, slot_s: float) -> float:
    """Seconds from now until one more request has a decode slot there; 0 where one is free.

    Of n requests that decode there or are on their way and s slots, n − s + 1 have to end first, and s slots end one
    every `slot_s` / s seconds.
    """
    ahead = decode.decoding - decode.decode_slots + 1
    return ahead * slot_s / decode.decode_slots if ahead > 0 else 0.0


def slot_wait_s(decode: InstanceView, view: View, ttft_s: float) -> float:
    """Seconds that come after the predicted TTFT until a request has a decode slot there."""
    return max(slot_free_s(decode, view.clusters[decode.cluster].slot_s) - ttft_s, 0.0)


def learnt_slot_s(slot_s: float, answers: float, seconds: float) -> float:
    """What an answer keeps its slot for, after `answers` > 0 more that did so for `seconds` in all.

    A mean of the latest answers. What it begins with counts as a hundred of them.
    """
    return slot_s + answers / (answers + _MEMORY_ANSWERS) * (seconds / answers - slot_s)


# In which order instances are asked.
_ABLE: tuple[Callable[[InstanceView], bool], ...] = (
    attrgetter("takes_decodes"),
    lambda each: each.decodes and each.available,
    attrgetter("available"),
    lambda each: not each.closed,
)


def _decoder(
    request: RoutingRequest, cluster: ClusterView, able: Iterable[InstanceView], view: View
) -> InstanceView | None:
    """The best of these that need not be avoided; None if there is none.

    Each is worth the share of the prompt that it spares the network, less the share of its slots in use (at most 1),
    less the wait for a slot as a share of the whole prompt's prefill. So one that holds more of the prompt is taken,
    until its load and its wait exceed another's by more than that share. Equal ones are compared by the fewer
    requests in flight, then by their order.
    """
    held = request.held
    chosen, least = None, (math.inf, 0)
    for each in able:
        cost = each.decoding / each.decode_slots
        if cost >= 1.0:
            prefill_s = max(cluster.prefill_s(request.num_tokens), _LEAST_S)
            cost = 1.0 + slot_free_s(each, cluster.slot_s) / prefill_s
        if each.name in held:
            cost -= _spared_share(request, view, held[each.name])
        rank = cost, each.in_flight
        if (chosen is None or rank < least) and each.name not in view.avoid:
            chosen, least = each, rank
    return chosen


def _spared_share(request: RoutingRequest, view: View, held: PrefixHit) -> float:
    """Of windows nothing is skipped; what spares neither bytes nor computing is worth nothing."""
    spared_tokens = held.attention_tokens if view.kv.can_skip else held.reusable_tokens
    return spared_tokens / request.num_tokens if spared_tokens < request.num_tokens else 1.0
