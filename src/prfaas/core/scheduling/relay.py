"""Whether a prefill instance goes on decoding while its KV travels, and what that is worth there."""

import math
from dataclasses import dataclass
from typing import Literal

from prfaas.core.planner.relay import WORTH_STEPS
from prfaas.core.scheduling.decision import Decision
from prfaas.core.scheduling.hazard import streamed_s
from prfaas.core.scheduling.view import ClusterView, InstanceView, LinkView
from prfaas.core.scheduling.waits import prefill_queue_s
from prfaas.core.units import BITS_PER_BYTE

RelayReason = Literal["link-bound", "short-gap", "busy-prefill"]


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """What was decided about one request, with the numbers that decided."""

    tokens: int
    """Tokens that the prefill instance may decode after the first one; 0: none."""
    reason: RelayReason
    """`link-bound`: it may. Else why not: the gap is short, or the instance has prefills to do meanwhile."""
    exposed_s: float
    """How long after the prefill its KV is there, as predicted: what the client would wait for the second token."""
    step_s: float
    """What a decode step takes at the decode instance."""
    queue_s: float
    """Seconds of other prefills that wait for the prefill instance."""


def relay_plan(
    decision: Decision,
    prefill: InstanceView,
    cluster: ClusterView,
    link: LinkView | None,
    *,
    most_tokens: int,
    step_s: float,
    now_s: float,
) -> RelayPlan:
    """Weigh the client's wait for the second token with the work of the prefill instance.

    A prefill instance relays where the link is what the request waits for, by at least `WORTH_STEPS` decode steps, and
    where other prefills leave it idle for a part of that time. With more of them waiting, its steps are theirs: relayed
    tokens would hold them up, and would come no faster than their chunks.

    Args:
        decision: About the request, before its prefill begins.
        prefill: Its prefill instance.
        cluster: Of that instance.
        link: That its KV crosses; None: it stays in its cluster, whose network is never the bottleneck.
        most_tokens: What the deployment file allows, or less.
        step_s: What a decode step takes at the decode instance.
        now_s: By the clock of the view.
    """
    exposed_s = 0.0 if link is None else _exposed_s(decision, cluster, link, now_s)
    queue_s = prefill_queue_s(prefill, cluster, now_s)
    reason: RelayReason = "link-bound"
    if exposed_s < WORTH_STEPS * step_s:
        reason = "short-gap"
    elif queue_s > exposed_s:
        reason = "busy-prefill"
    return RelayPlan(most_tokens if reason == "link-bound" else 0, reason, exposed_s, step_s, queue_s)


def _exposed_s(decision: Decision, cluster: ClusterView, link: LinkView, now_s: float) -> float:
    """What of a transfer its prefill does not hide."""
    if link.capacity_bits_per_s <= 0:
        return math.inf
    prefill_s = cluster.after_prefix_s(decision.prefill_tokens, decision.reused_tokens)
    link_s = BITS_PER_BYTE * decision.kv_bytes / link.capacity_bits_per_s
    wait_s = max(link.drained_s - now_s, 0.0)
    return streamed_s(0.0, prefill_s, wait_s, link_s, link.rtt_s) - prefill_s
