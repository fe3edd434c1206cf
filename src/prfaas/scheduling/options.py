"""One way to serve a request, with what is predicted of it."""

from dataclasses import dataclass

from prfaas.scheduling.request import RoutingRequest
from prfaas.scheduling.view import ClusterView, InstanceView, LinkView, View
from prfaas.units import BITS_PER_BYTE


# Not frozen, like all that doesn't outlive a decision: a frozen one takes five times as long to make.
@dataclass(slots=True)
class Option:
    """Prefill by `instance` of `cluster` and, unless it decodes too, a transfer.

    `link`: what the KV crosses; None inside a PD cluster, whose network is never the bottleneck (section 3.4.1).
    `start_s`: until the prefill starts: its queue, or the arrival of a cache. `prefill_s`: what it takes.
    `link_wait_s`: until the bytes accepted for the link have left. `link_s`: seconds of the link for this KV alone.
    `ttft_s`: until the decode instance has everything. `moved_cache`: the fields of a CacheTransfer, if there is one.
    """

    cluster: ClusterView
    instance: InstanceView
    reusable_tokens: int
    start_s: float
    prefill_s: float
    link: LinkView | None
    link_wait_s: float
    link_s: float
    ttft_s: float
    moved_cache: tuple[InstanceView, int, int] | None


def prefill_by(request: RoutingRequest, view: View, cluster: ClusterView, instance: InstanceView) -> Option:
    """Prefill by an instance, as if its KV had no way to go."""
    held_tokens = request.reusable_at(instance.name) if request.held else 0
    wait_s = max(instance.busy_until_s - view.now_s, 0.0)
    prefill_s = cluster.prefill_s(request.num_tokens - held_tokens)
    return Option(cluster, instance, held_tokens, wait_s, prefill_s, None, 0.0, 0.0, wait_s + prefill_s, None)


def bits_to(request: RoutingRequest, view: View, decode: InstanceView) -> int:
    """What a prefill elsewhere has to send to an instance that decodes."""
    skip = request.attention_at(decode.name) if request.held and view.kv.can_skip else 0
    return view.kv.bytes_to_move(request.num_tokens, skip) * BITS_PER_BYTE


def streamed(option: Option, link: LinkView, now_s: float, bits: int) -> Option:
    """The prefill of another cluster, its KV streamed over `link` while it is made (section 3.3)."""
    link_s = bits / link.capacity_bits_per_s
    link_wait_s = link.drained_s - now_s
    if link_wait_s < 0.0:
        link_wait_s = 0.0
    start_s, prefill_s = option.start_s, option.prefill_s
    # `streamed_s` in line: this is asked for every long prompt.
    computed_s = start_s + prefill_s
    sent_s = (start_s if start_s > link_wait_s else link_wait_s) + link_s
    ttft_s = (computed_s if computed_s > sent_s else sent_s) + link.rtt_s
    return Option(
        option.cluster,
        option.instance,
        option.reusable_tokens,
        start_s,
        prefill_s,
        link,
        link_wait_s,
        link_s,
        ttft_s,
        None,
    )


def streamed_s(start_s: float, prefill_s: float, link_wait_s: float, link_s: float, rtt_s: float) -> float:
    """Seconds until a streamed prefill has arrived.

    Both are needed: the prefill's end, and this KV's bytes after those that the link has already accepted.
    """
    computed_s = start_s + prefill_s
    sent_s = (start_s if start_s > link_wait_s else link_wait_s) + link_s
    return (computed_s if computed_s > sent_s else sent_s) + rtt_s
