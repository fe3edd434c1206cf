"""Whether what a transfer spares is worth the bytes that it sends, where bytes over a link have a price.

All machines of a deployment are there anyway, so what they cost is the same wherever a request goes. But a second of
an instance that is not used for one request is there for another, and what it costs is what it is taken to be worth.
"""

from prfaas.core.scheduling.candidates import PrefillCandidate, kv_bytes_to
from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.view import InstanceView, LinkView, View


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

        p · S ≤ c · (T + max(0, w − w'))

    p: price of a byte over the link; S: bytes of KV that the decode instance lacks. c: price of a second of an
    instance of the PD cluster; T: what the prefill would take there, with the cluster's own cache. w: until it could
    start there; w': until it could start elsewhere, or its bytes could leave, whichever is later.

    A second of waiting counts as a second of an instance: so much of another one would spare it. So where a price
    keeps requests in the PD cluster, its queue is never more than p · S / c seconds ahead of the other one: what a
    load needs to be served is offloaded at any price.
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
    spared_s = local.prefill_s + max(local.start_s - elsewhere_s, 0.0)
    kv_bytes = kv_bytes_to(request, view, decode)
    return is_worth_its_bytes(link, kv_bytes, spared_s, local.cluster.instance_price_per_s)
