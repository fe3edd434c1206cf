"""Which instance of every PD cluster would decode a request."""

import math
from collections.abc import Sequence

from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.view import ClusterView, InstanceView, NoDecodeInstanceError, View


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
