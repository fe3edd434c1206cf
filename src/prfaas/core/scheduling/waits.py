"""How long a new request would wait for its prefill and for its link: what a gateway refuses requests by."""

import math

from prfaas.core.scheduling.decision import Decision
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView


def work_wait_s(
    decision: Decision, prefill: InstanceView, cluster: ClusterView, link: LinkView | None, now_s: float
) -> float:
    """Seconds until prefill and transfer of a request could begin; the longer of the two waits.

    Args:
        decision: About the request.
        prefill: Its prefill instance.
        cluster: Of that instance.
        link: That its KV crosses; None: it stays in its cluster.
        now_s: By the clock of the view.
    """
    queue_s = prefill.busy_until_s - now_s
    if decision.urgency_s is not None:
        queue_s = max(queue_s, 0.0) + _pool_s(cluster)
    link_s = link.drained_s - now_s if link is not None and decision.transfers else 0.0
    return max(queue_s, link_s, 0.0)


def least_prefill_wait_s(clusters: dict[str, ClusterView], now_s: float) -> float:
    """The least that any new request would wait for its prefill, in seconds; 0 where nothing takes prefills."""
    least_s = math.inf
    for cluster in clusters.values():
        soonest_s = math.inf
        for instance in cluster.instances:
            if instance.takes_prefills and instance.busy_until_s < soonest_s:
                soonest_s = instance.busy_until_s
        if soonest_s < math.inf:
            least_s = min(least_s, max(soonest_s - now_s, 0.0) + _pool_s(cluster))
    return 0.0 if least_s == math.inf else least_s


def _pool_s(cluster: ClusterView) -> float:
    """Each instance's part of the prefills that wait for any of them."""
    if not cluster.waiting_s:
        return 0.0
    return cluster.waiting_s / max(sum(each.takes_prefills for each in cluster.instances), 1)
