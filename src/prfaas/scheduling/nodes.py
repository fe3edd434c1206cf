"""Which instance of a cluster prefills, and which decodes."""

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
    now_s, avoid, num_tokens = view.now_s, view.avoid, request.num_tokens
    held_at = request.held.get if request.held else None
    chosen: InstanceView | None = None
    holder: InstanceView | None = None
    reusable, longest, in_flight, asked_tokens = 0, -1, 0, -1
    done_s = wait_s = prefill_s = seconds = least_wait_s = math.inf
    count = 0
    # `is_prefiller` and `reusable_at` in line: this loop is most of a decision's time.
    for instance in cluster.instances:
        if not instance.prefills or not instance.healthy or instance.draining or instance.name in avoid:
            continue
        count += 1
        queue_s = instance.busy_until_s - now_s
        if queue_s < 0.0:
            queue_s = 0.0
        if queue_s < least_wait_s:
            least_wait_s = queue_s
        tokens = 0
        if held_at is not None and (here := held_at(instance.name)) is not None:
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
        shared_s = cluster.waiting_s / count
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


def decode_instance(
    request: RoutingRequest,
    cluster: ClusterView,
    view: View,
    *,
    draining: bool = False,
    other_role: bool = False,
    unhealthy: bool = False,
) -> InstanceView | None:
    """The instance of a PD cluster that would decode; None if there is none.

    Each is worth the share of the prompt that it spares the network, less the share of its slots in use. So the
    cache-affine one is taken until it is overloaded: until its load exceeds another's by more than the share of
    the prompt that it holds more. One without a free slot comes after all others. Equal ones: the fewer requests
    in flight, then the earlier in the list. `draining`, `other_role`, `unhealthy`: take
    those too that are being drained, that only prefill, that are unhealthy.
    """
    avoid, held, num_tokens, can_skip = view.avoid, request.held, request.num_tokens, view.kv.can_skip
    chosen: InstanceView | None = None
    worth = 0.0
    for instance in cluster.instances:
        if (
            not (instance.decodes or other_role)
            or (instance.draining and not draining)
            or not (instance.healthy or unhealthy)
        ):
            continue
        if avoid and instance.name in avoid:
            continue
        load = instance.decoding / instance.decode_slots
        here = -load if load < 1.0 else -load - 2.0
        if held and (at := held.get(instance.name)) is not None:
            # Of windows nothing is skipped; what spares neither bytes nor computing is worth nothing.
            spared = at.attention_tokens if can_skip else at.reusable_tokens
            here += spared / num_tokens if spared < num_tokens else 1.0
        if chosen is None or here > worth or (here == worth and instance.in_flight < chosen.in_flight):
            chosen, worth = instance, here
    return chosen
