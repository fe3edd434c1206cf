"""What one sender knows of its links, summed over the peers and connections of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prfaas.serving.transport.peer_queue import PeerQueue
from prfaas.serving.transport.sockets import TcpInfo


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One link as one sender sees it, at the moment of the report. Totals only grow, over reconnections too."""

    pace_bits_per_s: float | None
    """What this sender was told that it may send; None: unpaced."""
    queued_bytes: int
    """Produced and not acknowledged yet."""
    waiting_bytes: int
    """Those of them that are held back until the consumer has room."""
    background_bytes: int
    """Those of `queued_bytes` that get what others leave."""
    open_bytes: int
    """`queued_bytes`, and what the open transfers have still to produce."""
    acked_bytes_total: int
    unsent_bytes: int
    """Bytes that the kernel has and could not send yet."""
    filled_connections: int
    """Connections with such bytes: the path, the pace or the peer holds them back, and not this process."""
    delivery_bits_per_s: float
    """Sum of the kernel's newest delivery rates."""
    rtt_s: float
    """The mean round trip of the connections that have something in flight; 0 without any."""
    least_rtt_s: float
    retransmits_total: int
    sent_bytes_total: int
    """By the kernel, those sent again included."""
    resent_bytes_total: int
    busy_s_total: float
    """Seconds with something in flight, summed over the connections."""
    receiver_limited_s_total: float
    """Those of them in which the peer's receive window was shut."""
    connections_up: int
    connections: int
    """Those that should be up, so not those to peers on demand that nothing was sent to yet."""


_COUNTED = ("retransmits", "sent_bytes", "resent_bytes", "busy_s", "receiver_limited_s")


class KernelTotals:
    """Adds up what the kernel counts per connection, so that a new connection does not start again from nothing."""

    def __init__(self) -> None:
        self._newest: dict[object, TcpInfo] = {}
        self._totals: dict[str, dict[str, float]] = {}

    def add(self, link: str, connection: object, info: TcpInfo) -> None:
        """`connection`: any key that stays the same over reconnections."""
        totals = self._totals.setdefault(link, dict.fromkeys(_COUNTED, 0.0))
        before = self._newest.get(connection)
        is_new = before is None or info.sent_bytes < before.sent_bytes or info.busy_s < before.busy_s
        for name in _COUNTED:
            totals[name] += getattr(info, name) - (0 if is_new else getattr(before, name))
        self._newest[connection] = info

    def of(self, link: str) -> Mapping[str, float]:
        """The totals of a link by the fields of `TcpInfo`."""
        return self._totals.get(link) or dict.fromkeys(_COUNTED, 0.0)


def link_reports(
    queues: Iterable[PeerQueue],
    paces: Mapping[str, float | None],
    infos: Mapping[str, Sequence[TcpInfo]],
    totals: KernelTotals,
) -> dict[str, dict[str, Any]]:
    """Link name → the fields of its `LinkReport`. Peers of a link share its bandwidth.

    Args:
        queues: of all peers.
        paces: by link, in bits per second.
        infos: by link, what the kernel says now of every connection that is up.
        totals: with `infos` added.
    """
    by_link: dict[str, list[PeerQueue]] = {}
    for queue in queues:
        by_link.setdefault(queue.peer.link, []).append(queue)
    return {
        link: asdict(_report(of_link, paces[link], infos.get(link, ()), totals.of(link)))
        for link, of_link in by_link.items()
    }


def _report(
    queues: Sequence[PeerQueue],
    pace_bits_per_s: float | None,
    infos: Sequence[TcpInfo],
    totals: Mapping[str, float],
) -> LinkReport:
    loads = [queue.load() for queue in queues]
    least_rtt_s = min((info.least_rtt_s for info in infos if info.least_rtt_s > 0), default=0.0)
    # A connection that has sent nothing lately knows only what was.
    at_work = [info.rtt_s for info in infos if info.notsent_bytes or info.in_flight]
    return LinkReport(
        pace_bits_per_s=pace_bits_per_s,
        queued_bytes=sum(load.queued_bytes for load in loads),
        waiting_bytes=sum(load.waiting_bytes for load in loads),
        background_bytes=sum(load.background_bytes for load in loads),
        open_bytes=sum(load.open_bytes for load in loads),
        acked_bytes_total=sum(load.acked_bytes_total for load in loads),
        unsent_bytes=sum(info.notsent_bytes for info in infos),
        filled_connections=sum(info.notsent_bytes > 0 for info in infos),
        delivery_bits_per_s=sum(info.delivery_bits_per_s for info in infos),
        rtt_s=sum(at_work) / len(at_work) if at_work else 0.0,
        least_rtt_s=least_rtt_s,
        retransmits_total=int(totals["retransmits"]),
        sent_bytes_total=int(totals["sent_bytes"]),
        resent_bytes_total=int(totals["resent_bytes"]),
        busy_s_total=totals["busy_s"],
        receiver_limited_s_total=totals["receiver_limited_s"],
        connections_up=sum(load.connections_up for load in loads),
        connections=sum(
            queue.peer.connections
            for queue, load in zip(queues, loads, strict=True)
            if load.connections_up or queue.busy or not queue.peer.on_demand
        ),
    )
