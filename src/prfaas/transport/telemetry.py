"""What a sender knows about its links, summed over the peers and connections of each."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prfaas.transport.lane import Lane
from prfaas.transport.tcpinfo import LinkSample


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One link as one sender sees it.

    `queued_bytes` are produced and not acknowledged yet, of which `waiting_bytes` are held back until the consumer
    has room; `open_bytes` are those and what the open transfers have
    still to produce. `acked_bytes_total` and `retransmits_total` only grow. `delivery_bits_per_s` is the sum of
    the kernel's delivery rates, `rtt_s` the least of the round trips; both are of the newest look, which was
    `sampled_age_s` ago (None: never, nothing was sent). `capacity_bits_per_s`: the configured pace, None: unpaced.
    `connections`: those that should be up, so not those to peers on demand that nothing was sent to yet.
    """

    capacity_bits_per_s: float | None
    queued_bytes: int
    waiting_bytes: int
    open_bytes: int
    acked_bytes_total: int
    delivery_bits_per_s: float
    rtt_s: float
    retransmits_total: int
    connections_up: int
    connections: int
    sampled_age_s: float | None


def link_reports(lanes: Iterable[Lane], samples: Sequence[LinkSample]) -> dict[str, dict[str, Any]]:
    """Link name → the fields of its `LinkReport`. Peers of a link share its bandwidth."""
    by_link: dict[str, list[Lane]] = {}
    for lane in lanes:
        by_link.setdefault(lane.peer.link, []).append(lane)
    looks: dict[str, list[LinkSample]] = {}
    for sample in samples:
        looks.setdefault(sample.link, []).append(sample)
    now_s = time.monotonic()
    return {link: asdict(_report(of_link, looks.get(link, []), now_s)) for link, of_link in by_link.items()}


def _report(lanes: Sequence[Lane], looks: Sequence[LinkSample], now_s: float) -> LinkReport:
    loads: Sequence[Mapping[str, int]] = [lane.load() for lane in lanes]
    newest_s = max((look.at_s for look in looks), default=None)
    # Connections of an idle peer keep their last look: it says nothing about now.
    fresh = [look for look in looks if newest_s is not None and look.at_s > newest_s - 1.0]
    return LinkReport(
        capacity_bits_per_s=lanes[0].peer.bandwidth_bits_per_s,
        queued_bytes=sum(load["queued_bytes"] for load in loads),
        waiting_bytes=sum(load["waiting_bytes"] for load in loads),
        open_bytes=sum(load["open_bytes"] for load in loads),
        acked_bytes_total=sum(load["acked_bytes"] for load in loads),
        delivery_bits_per_s=sum(look.info.delivery_bits_per_s for look in fresh),
        rtt_s=min((look.info.rtt_s for look in fresh), default=0.0),
        retransmits_total=sum(look.info.retransmits for look in looks),
        connections_up=sum(load["connections"] for load in loads),
        connections=sum(
            lane.peer.connections
            for lane, load in zip(lanes, loads, strict=True)
            if load["connections"] or lane.busy or not lane.peer.on_demand
        ),
        sampled_age_s=None if newest_s is None else now_s - newest_s,
    )
