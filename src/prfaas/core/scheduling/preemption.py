"""Prefill capacity that is taken away at short notice: what it may still begin, and what a kill costs on average."""

import math

from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.hazard import streamed_s
from prfaas.core.scheduling.view import ClusterView, InstanceView, View
from prfaas.core.units import BITS_PER_BYTE


def ends_in_s(request: RoutingRequest, view: View, cluster: ClusterView, instance: InstanceView) -> float:
    """Seconds until a prefill that is routed to `instance` now has left it, by prediction: over its slowest link."""
    start_s = max(instance.busy_until_s - view.now_s, 0.0)
    reused_tokens = request.reusable_at(instance.name)
    prefill_s = cluster.after_prefix_s(request.num_tokens - reused_tokens, reused_tokens)
    ends_s = start_s + prefill_s
    for link in view.links.values():
        if link.source == cluster.name and link.up:
            kv_bits = BITS_PER_BYTE * (link.kv or view.kv).bytes_to_move(request.num_tokens, 0)
            wait_s, link_s = max(link.drained_s - view.now_s, 0.0), kv_bits / link.capacity_bits_per_s
            ends_s = max(ends_s, streamed_s(start_s, prefill_s, wait_s, link_s, link.rtt_s))
    return ends_s


def goes_on_at_decode(kept_tokens: int, num_tokens: int, *, is_preempted: bool) -> bool:
    """Whether the decode instance goes on from what has come of a prefill, and no other one begins it again.

    What has come is not computed and sent again: a client has waited for it. With notice nothing has failed yet, and
    another PrfaaS instance is as fast as the first: that one is asked unless less is left than has come.

    Args:
        kept_tokens: Of the prompt, those after which the decode instance can go on.
        num_tokens: Of the whole prompt.
        is_preempted: Its instance has notice, and could not have ended it in time.
    """
    return kept_tokens > 0 and (not is_preempted or 2 * kept_tokens >= num_tokens)


def with_time_left(request: RoutingRequest, view: View) -> View:
    """The same view, but instances get nothing that has not left them by the time of their notice."""
    if not view.leaves_s:
        return view
    late = [
        instance.name
        for cluster in view.clusters.values()
        for instance in cluster.instances
        if (leaves_s := view.leaves_s.get(instance.name, math.inf)) < math.inf
        and view.now_s + ends_in_s(request, view, cluster, instance) > leaves_s
    ]
    return view.without(late) if late else view
