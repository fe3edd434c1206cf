"""Which instance of every PD cluster would decode a request, and when it would have a slot for it."""

from collections.abc import Callable, Sequence

from prfaas.core.scheduling.decision import RoutingRequest
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
    found = []
    for cluster in view.clusters.values():
        if cluster.kind == "pd":
            if request.held or view.avoid:
                able = [each for each in cluster.instances if each.takes_decodes]
                decode = _decoder(request, cluster, able, view)
            else:
                decode = soonest_free(cluster.instances)
            if decode is not None:
                found.append((cluster, decode))
    return found or _last_resorts(request, view)


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


def _last_resorts(request: RoutingRequest, view: View) -> list[tuple[ClusterView, InstanceView]]:
    resorts: tuple[Callable[[InstanceView], bool], ...] = (
        lambda each: each.decodes and each.healthy,
        lambda each: each.healthy,
        lambda _: True,
    )
    for is_able in resorts:
        found = []
        for cluster in view.clusters.values():
            if cluster.kind == "pd":
                able = [each for each in cluster.instances if is_able(each) and not each.closed]
                decode = _decoder(request, cluster, able, view)
                if decode is not None:
                    found.append((cluster, decode))
        if found:
            return found
    raise NoDecodeInstanceError("no instance of any PD cluster can decode")


def _decoder(
    request: RoutingRequest, cluster: ClusterView, able: Sequence[InstanceView], view: View
) -> InstanceView | None:
    """The best of these that need not be avoided; None if there is none.

    Each is worth the share of the prompt that it spares the network, less the share of its slots in use (at most 1),
    less the wait for a slot as a share of the whole prompt's prefill. So one that holds more of the prompt is taken,
    until its load and its wait exceed another's by more than that share. Equal ones are compared by the fewer
    requests in flight, then by their order.
    """
    if view.avoid:
        able = [each for each in able if each.name not in view.avoid]
    held_at, num_tokens, can_skip = request.held.get, request.num_tokens, view.kv.can_skip
    chosen: InstanceView | None = None
    worth = prefill_s = 0.0
    for instance in able:
        here = -instance.decoding / instance.decode_slots
        if here <= -1.0:
            prefill_s = prefill_s or max(cluster.prefill_s(num_tokens), _LEAST_S)
            here = -1.0 - slot_free_s(instance, cluster.slot_s) / prefill_s
        if (at := held_at(instance.name)) is not None:
            # Of windows nothing is skipped; what spares neither bytes nor computing is worth nothing.
            spared = at.attention_tokens if can_skip else at.reusable_tokens
            here += spared / num_tokens if spared < num_tokens else 1.0
        if chosen is None or here > worth or (here == worth and instance.in_flight < chosen.in_flight):
            chosen, worth = instance, here
    return chosen


def soonest_free(instances: Sequence[InstanceView]) -> InstanceView | None:
    """Where none holds anything and none is to be avoided: of a cluster's instances the one with the soonest slot,
    then the lightest, then the fewest requests in flight. None if none may decode."""
    chosen: InstanceView | None = None
    decoding = slots = in_flight = 0
    for instance in instances:
        if not instance.takes_decodes:
            continue
        here = instance.decoding
        if instance.decode_slots == slots:
            # With as many slots the fewer requests are the lighter load.
            if here > decoding or (here == decoding and instance.in_flight >= in_flight):
                continue
        elif chosen is not None:
            load, least = _load_and_wait(here, instance.decode_slots), _load_and_wait(decoding, slots)
            if load > least or (load == least and instance.in_flight >= in_flight):
                continue
        chosen, decoding, slots, in_flight = instance, here, instance.decode_slots, instance.in_flight
    return chosen


def _load_and_wait(decoding: int, slots: int) -> float:
    """The share of its slots in use; of a full one 1 and the wait for a slot, in units of the cluster's `slot_s`."""
    load = decoding / slots
    return load + 1.0 / slots if load >= 1.0 else load
