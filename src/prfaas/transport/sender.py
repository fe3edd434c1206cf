"""The producer's end: connections to every peer, kept open ahead of time, and the transfers that go over
them.
"""

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prfaas.transport.connection import SenderConnection
from prfaas.transport.handshake import ROLE_PRODUCER, ClientHello, Fingerprint
from prfaas.transport.lane import Lane
from prfaas.transport.options import SenderOptions
from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pacing import LinkPacer
from prfaas.transport.peer import Peer
from prfaas.transport.tcpinfo import LinkSample
from prfaas.transport.telemetry import link_reports
from prfaas.transport.ticket import Ticket

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
