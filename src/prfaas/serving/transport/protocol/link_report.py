"""Reports of one sender's links, summed over the peers and connections of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prfaas.core.link.samples import LinkReport
from prfaas.serving.transport.protocol.liveness import TcpInfo
from prfaas.serving.transport.protocol.peer_queue import PeerQueue

_COUNTED = ("retransmits", "sent_bytes", "resent_bytes", "busy_s", "receiver_limited_s")


class KernelTotals:
    """Sums of the kernel's counters by link, which go on when a connection is replaced."""

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
    """The fields of each link's `LinkReport`, by link.

    Args:
        queues: of all peers.
        paces: by link, in bits per second.
        infos: by link, the kernel's counters of every connection that is up.
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
    transfers = [transfer for queue in queues for transfer in queue.transfers]
    least_rtt_s = min((info.least_rtt_s for info in infos if info.least_rtt_s > 0), default=0.0)
    # The round trip of an idle connection is out of date.
    at_work = [info.rtt_s for info in infos if info.notsent_bytes or info.in_flight]
    return LinkReport(
        pace_bits_per_s=pace_bits_per_s,
        queued_bytes=sum(each.put_bytes - each.acked_bytes for each in transfers),
        waiting_bytes=sum(each.waiting_bytes for each in transfers),
        background_bytes=sum(
            each.put_bytes - each.acked_bytes for each in transfers if each.service.background
        ),
        open_bytes=sum(each.total_bytes - each.acked_bytes for each in transfers),
        acked_bytes_total=sum(queue.acked_bytes for queue in queues),
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
        connections_up=sum(queue.connections_up for queue in queues),
        connections=sum(
            queue.peer.connections
            for queue in queues
            if queue.connections_up or queue.busy or not queue.peer.on_demand
        ),
    )
