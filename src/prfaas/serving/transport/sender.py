"""The producer's end: connections to every peer, kept open ahead of time, and the transfers that go over
them.

What a sender knows about its links, summed over the peers and connections of each.
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from prfaas.serving.transport.connection import SenderConnection
from prfaas.serving.transport.handshake import ROLE_PRODUCER, ClientHello, Fingerprint
from prfaas.serving.transport.options import Peer, SenderOptions
from prfaas.serving.transport.outgoing import OutgoingTransfer
from prfaas.serving.transport.pacing import LinkPacer
from prfaas.serving.transport.peer_queue import Lane
from prfaas.serving.transport.sockets import LinkSample
from prfaas.serving.transport.ticket import Ticket


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


log = logging.getLogger(__name__)


class Sender:
    """Sends KV transfers; thread-safe. Two threads per connection and one that watches over all.

    Raises ValueError when peers of one link name different bandwidths.
    """

    def __init__(
        self,
        *,
        name: str,
        key: bytes,
        peers: Mapping[str, Peer],
        fingerprint: Fingerprint,
        options: SenderOptions | None = None,
    ) -> None:
        self.name = name
        self._key = key
        self._fingerprint = dict(fingerprint)
        self._options = options or SenderOptions()
        # New with each start: a consumer tells a producer that lost its connections from one that was
        # restarted.
        self._session = secrets.token_hex(8)
        self._wake = threading.Event()
        self._closing = False
        self._errors = 0
        self._pacers: dict[str, LinkPacer] = {}
        self._lanes: dict[str, Lane] = {}
        self._connections: dict[str, list[SenderConnection]] = {}
        self._starting = threading.Lock()
        self._samples: dict[tuple[str, int], LinkSample] = {}
        for peer_key, peer in peers.items():
            self._add(peer_key, peer)
        self._supervisor = threading.Thread(target=self._supervise, name=f"prfaas-send-{name}", daemon=True)

    def start(self) -> None:
        """Open the connections to all peers but those on demand, in the background; returns at once."""
        for peer_key, lane in self._lanes.items():
            if not lane.peer.on_demand:
                self._connect(peer_key)
        self._supervisor.start()

    def close(self) -> None:
        """Fail unfinished transfers, end every thread and socket; idempotent."""
        self._closing = True
        for lane in self._lanes.values():
            lane.close()
        for connection in self._started():
            connection.close()
        self._wake.set()
        for connection in self._started():
            connection.join()
        if self._supervisor.ident is not None:
            self._supervisor.join()

    def open(self, ticket: Ticket, sealed: str, region_bytes: Sequence[int]) -> OutgoingTransfer:
        """Begin the transfer that `ticket` (sealed: `sealed`) allows; never blocks, never raises for the
        network.

        A consumer that is not among the peers gives a transfer that is FAILED already. A ticket names an
        instance; of its ranks this sender's own rank is meant ("p/1" sends to "c/1").
        """
        peer_key = ticket.consumer
        if peer_key not in self._lanes and "/" in self.name:
            peer_key = f"{ticket.consumer}/{self.name.rpartition('/')[2]}"
        lane = self._lanes.get(peer_key)
        if lane is None:
            reason = f"{self.name} has no peer named {ticket.consumer}"
            return OutgoingTransfer.stillborn(ticket.transfer_id, region_bytes, reason)
        self._connect(peer_key)
        return lane.open(ticket.transfer_id, sealed, region_bytes)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, per peer; every gauge but `connections` is 0 when nothing is going on."""
        return {
            "name": self.name,
            "peers": {
                name: lane.stats()
                | {"congestion": sorted({c.congestion for c in self._connections.get(name, ())})}
                for name, lane in self._lanes.items()
            },
            "threads": sum(c.alive for c in self._started()) + self._supervisor.is_alive(),
            "thread_errors": self._errors + sum(c.errors for c in self._started()),
        }

    def set_bandwidth(self, link: str, bits_per_s: float) -> None:
        """Pace `link` at another rate from now on; KeyError for a link that no peer is on."""
        self._pacers[link].set_bandwidth(bits_per_s)

    def telemetry(self) -> dict[str, Any]:
        """`{"links": {name: LinkReport's fields}}`: what observers of this engine are told."""
        return {"links": link_reports(self._lanes.values(), self.link_samples())}

    def link_samples(self) -> list[LinkSample]:
        """The newest look at each connection: at most `sample_s` old while its peer has work, else older."""
        return list(self._samples.values())

    def _add(self, peer_key: str, peer: Peer) -> None:
        pacer = self._pacers.setdefault(peer.link, LinkPacer(peer.bandwidth_bits_per_s))
        if pacer.bandwidth_bits_per_s != peer.bandwidth_bits_per_s:
            raise ValueError(f"peers of link {peer.link!r} name different bandwidths")
        self._lanes[peer_key] = Lane(peer, self._options, pacer, self._wake.set)

    def _connect(self, peer_key: str) -> None:
        with self._starting:
            if peer_key in self._connections or self._closing:
                return
            lane = self._lanes[peer_key]
            self._connections[peer_key] = [
                SenderConnection(lane, number, partial(self._hello, lane.peer.name), self._options)
                for number in range(lane.peer.connections)
            ]
            for connection in self._connections[peer_key]:
                connection.start()

    def _hello(self, peer_name: str) -> ClientHello:
        return ClientHello.new(
            key=self._key,
            name=self.name,
            server_name=peer_name,
            role=ROLE_PRODUCER,
            session=self._session,
            fingerprint=self._fingerprint,
        )

    def _started(self) -> list[SenderConnection]:
        with self._starting:
            return [connection for slots in self._connections.values() for connection in slots]

    def _supervise(self) -> None:
        while not self._closing:
            # Asleep without a timeout while no peer has work.
            self._wake.wait()
            self._wake.clear()
            while not self._closing and any(lane.busy for lane in self._lanes.values()):
                try:
                    self._look()
                except Exception:
                    self._errors += 1
                    log.exception("supervision of sender %s failed", self.name)
                self._wake.wait(self._options.sample_s)
                self._wake.clear()

    def _look(self) -> None:
        now_s = time.monotonic()
        for peer_key, lane in self._lanes.items():
            if not lane.busy:
                continue
            for connection in self._connections.get(peer_key, ()):
                info = connection.tcp_info()
                if info is not None:
                    self._samples[peer_key, connection.number] = LinkSample(
                        peer=lane.peer.name,
                        link=lane.peer.link,
                        connection=connection.number,
                        congestion=connection.congestion,
                        at_s=now_s,
                        info=info,
                    )
            moved = {c for c in self._connections.get(peer_key, ()) if c.moved()}
            for stuck in lane.check(now_s, moved):
                log.warning("%s acknowledges nothing: connection %d closed", lane.peer.name, stuck.number)
                stuck.shut()
