"""Whether what a transfer spares is worth the bytes that it sends, where bytes over a link have a price.

All machines of a deployment are there anyway, so what they cost is the same wherever a request goes. But a second of
an instance that is not used for one request is there for another, and what it costs is what it is taken to be worth.
"""

import math

from prfaas.core.scheduling.candidates import PrefillCandidate, kv_bytes_to
from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.view import InstanceView, LinkView, View

_LEAST_S = 1e-3


def is_worth_its_bytes(link: LinkView, kv_bytes: int, spared_s: float, price_per_s: float) -> bool:
    """Whether `kv_bytes` over the link cost no more than the seconds that they spare: p · S ≤ c · t."""
    return link.egress_price_per_byte * kv_bytes <= price_per_s * spared_s


def is_worth_offloading(
    request: RoutingRequest,
    view: View,
    decode: InstanceView,
    local: PrefillCandidate,
    far: PrefillCandidate,
    link: LinkView,
) -> bool:
    """Whether a prefill elsewhere spares what its bytes cost:

        p · S ≤ c · T · (1 + max(0, w − w') / τ)

    p: price of a byte over the link; S: bytes of KV that the decode instance lacks. c: price of a second of an
    instance of the PD cluster; T: what the prefill would take there, with the cluster's own cache. w: until it could
    start there; w': until it could start elsewhere, or its bytes could leave, whichever is later. τ: the prefill of a
    prompt of the threshold's length, or T where there is no threshold.

    So w / τ prompts of usual length stand in such a queue, and each waits T less if this one goes elsewhere. A second
    of waiting counts as a second of an instance, for so much of another one would spare it. Backlog times work
    against a price is a drift and a penalty (Neely 2010): where a price keeps prompts in the PD cluster, its queue is
    never more than τ · (p · S / (c · T) − 1) ahead of the other one. So what a load needs is offloaded at any price,
    and first what takes the most computing per byte.
    What the other instance costs is not counted: it prefills for others, or it is idle.

    Args:
        request: The prompt.
        view: The deployment.
        decode: Who decodes.
        local: The best prefill in the cluster of `decode`.
        far: The prefill elsewhere, before its transfer.
        link: What its KV would cross.
    """
    elsewhere_s = max(far.start_s, link.drained_s - view.now_s)
    ahead_s = local.start_s - elsewhere_s
    spared_s = local.prefill_s
    if ahead_s > 0.0:
        threshold = view.threshold_tokens.get(local.cluster.name, math.inf)
        usual_s = local.cluster.prefill_s(threshold) if threshold < math.inf else spared_s
        spared_s *= 1.0 + ahead_s / max(usual_s, _LEAST_S)
    kv_bytes = kv_bytes_to(request, view, decode, link)
    return is_worth_its_bytes(link, kv_bytes, spared_s, local.cluster.instance_price_per_s)
