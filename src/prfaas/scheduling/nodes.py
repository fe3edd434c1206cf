"""Which instance of a cluster prefills."""

import math
from dataclasses import dataclass

from prfaas.scheduling.options import Option
from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.view import ClusterView, InstanceView, View


@dataclass(slots=True)
class PrefillNode(Option):
    """The instance of one cluster that would prefill a request, and what the cluster has besides.

    `least_wait_s`: its shortest prefill queue. `holder` has its longest reusable prefix, `held_tokens`.
    """

    least_wait_s: float
    holder: InstanceView
    held_tokens: int


def is_prefiller(instance: InstanceView, view: View) -> bool:
    """Whether prefills may be sent there."""
    return (
        instance.prefills and instance.healthy and not instance.draining and instance.name not in view.avoid
    )


def prefill_node(request: RoutingRequest, cluster: ClusterView, view: View) -> PrefillNode | None:
    """The instance that would be done first: its queue, then what it does not hold. None if none may be used.

    What waits for any instance of the cluster is ahead of it as well, a part of it at each.

    So the cache-affine one is taken unless its queue costs more than its cache saves. Equal ones: the longer
    prefix, then the fewer requests in flight, then the earlier in the cluster's list.
    """
    if not request.held:
        return least_queued(request, cluster, view)
    now_s, avoid, num_tokens = view.now_s, view.avoid, request.num_tokens
    held_at = request.held.get
    chosen: InstanceView | None = None
    holder: InstanceView | None = None
    reusable, longest, in_flight, asked_tokens = 0, -1, 0, -1
    done_s = wait_s = prefill_s = seconds = least_wait_s = math.inf
    # `is_prefiller` and `reusable_at` in line: this loop is most of a decision's time.
    for instance in cluster.instances:
        if not instance.prefills or not instance.healthy or instance.draining or instance.name in avoid:
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
        shared_s = _shared_s(cluster, view)
        least_wait_s += shared_s
        wait_s += shared_s
        done_s += shared_s
    return PrefillNode(
        cluster,
        chosen,
        reusable,
        wait_s,
        prefill_s,
        None,
        0.0,
        0.0,
        done_s,
        None,
        least_wait_s,
        holder,
        longest,
    )


def least_queued(request: RoutingRequest, cluster: ClusterView, view: View) -> PrefillNode | None:
    """The same where nobody holds anything, several times as fast: the shortest queue, then the fewest in flight."""
    avoid, now_s = view.avoid, view.now_s
    chosen: InstanceView | None = None
    holder: InstanceView | None = None
    least_s, in_flight = math.inf, 0
    for instance in cluster.instances:
        if not instance.prefills or not instance.healthy or instance.draining:
            continue
        if avoid and instance.name in avoid:
            continue
        if holder is None:
            holder = instance
        busy_s = instance.busy_until_s
        if busy_s < now_s:
            busy_s = now_s
        if busy_s < least_s or (busy_s == least_s and instance.in_flight < in_flight):
            chosen, least_s, in_flight = instance, busy_s, instance.in_flight
            if busy_s == now_s and not in_flight:
                break  # nobody can be better
    if chosen is None or holder is None:
        return None
    wait_s = least_s - now_s
    prefill_s = cluster.prefill_s(request.num_tokens)
    done_s = wait_s + prefill_s
    if cluster.waiting_s > 0.0:
        shared_s = _shared_s(cluster, view)
        wait_s += shared_s
        done_s += shared_s
    return PrefillNode(cluster, chosen, 0, wait_s, prefill_s, None, 0.0, 0.0, done_s, None, wait_s, holder, 0)


def _shared_s(cluster: ClusterView, view: View) -> float:
    """What waits for any instance of the cluster, divided among them."""
    return cluster.waiting_s / sum(is_prefiller(instance, view) for instance in cluster.instances)
