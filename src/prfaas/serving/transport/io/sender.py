"""The producer's end: connections to every peer, kept open ahead of time, and the transfers over them."""

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import msgspec

from prfaas.core.link.send_order import order_of_checkpoint
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.sender_connection import SenderConnection
from prfaas.serving.transport.io.shared_queue import SentTransfer, SharedQueue
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.fingerprint import Fingerprint
from prfaas.serving.transport.protocol.handshake import NONCE_BYTES, ROLE_PRODUCER, ClientHello
from prfaas.serving.transport.protocol.link_report import KernelTotals, link_reports
from prfaas.serving.transport.protocol.liveness import TcpInfo
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.options import Peer, SenderOptions
from prfaas.serving.transport.protocol.outgoing import Carrier, OutgoingTransfer
from prfaas.serving.transport.protocol.pacing import LinkPacer, PaceOrder
from prfaas.serving.transport.protocol.peer_queue import PeerQueue
from prfaas.serving.transport.protocol.sentences import bounded_sentences
from prfaas.serving.transport.protocol.ticket import Ticket, TransferClass, checkpoint_id, part_id

log = logging.getLogger(__name__)


class Sender:
    """Sends KV transfers; thread-safe. Two threads per connection and one that supervises all.

    1. `start` connects to all peers that are not on demand. `apply_peers` replaces the peers later.
    2. `open` begins a transfer in its peer's `PeerQueue`; the engine feeds it through the `SentTransfer`.
    3. Connections (`SenderConnection`) pull chunks from the queue, at the pace of the link's `LinkPacer`.
    4. The supervisor applies deadlines and renews connections that have lost packets.

    Raises:
        ValueError: peers of one link name different bandwidths, or one is encrypted and there is no `tls`.
    """

    def __init__(
        self,
        *,
        name: str,
        key: bytes,
        peers: Mapping[str, Peer],
        fingerprint: Fingerprint,
        options: SenderOptions | None = None,
        tls: TlsIdentity | None = None,
        layouts: PeerLayouts[Any] | None = None,
    ) -> None:
        """`layouts`: None where all peers keep KV as this side does, as the fingerprint says."""
        self.name = name
        self._key = key
        self._fingerprint = dict(fingerprint)
        self._layouts = layouts
        self._tls = tls
        self._options = options or SenderOptions()
        # New with each start, so that consumers can distinguish lost connections from a restart.
        self._session = secrets.token_hex(8)
        self._wake = threading.Event()
        self._closing = False
        self._errors = 0
        self._pacers: dict[str, LinkPacer] = {}
        self._queues: dict[str, SharedQueue] = {}
        self._lock = threading.Lock()  # of the queues and pacers
        self._connections: dict[str, list[SenderConnection]] = {}
        self._starting = threading.Lock()
        self._is_started = False
        # Connections of former peers, until their threads have ended.
        self._left: list[SenderConnection] = []
        self._used: set[str] = set()  # peers that had work at the last look
        self._totals = KernelTotals()
        self._reporting = threading.Lock()
        self.apply_peers(peers)
        self._supervisor = threading.Thread(target=self._supervise, name=f"prfaas-send-{name}", daemon=True)

    def start(self) -> None:
        """Open the connections to all peers but those on demand, in the background; returns at once."""
        self._is_started = True
        for peer_key, queue in self._queues.items():
            if not queue.peer.on_demand:
                self._connect(peer_key)
        self._supervisor.start()

    def close(self) -> None:
        """Fail unfinished transfers, end every thread and socket; idempotent."""
        self._closing = True
        for shared in self._queues.values():
            with shared as queue:
                queue.close(time.monotonic())
        for connection in self._started():
            connection.close()
        self._wake.set()
        for connection in (*self._started(), *self._left):
            connection.join()
        if self._supervisor.ident is not None:
            self._supervisor.join()

    def meet(self, instance: str, timeout_s: float = 0.0) -> bool:
        """Connect to a consumer, and wait until all its ranks have reported their KV layouts.

        Returns:
            True if there is nothing more to wait for: they have reported, reject this side, or are no peers.
        """
        if self._layouts is None:
            return True
        queues = self._queues
        ranks = [
            peer for peer in self.ranks_of(instance) if peer in queues and not queues[peer].queue.rejection
        ]
        for peer_key in ranks:
            self._connect(peer_key)
        return self._layouts.await_reports(ranks, timeout_s)

    def open(
        self,
        ticket: Ticket,
        sealed: str,
        region_bytes: Sequence[int],
        peer: str = "",
        **said: Any,
    ) -> SentTransfer:
        """Begin the transfer that a ticket allows; never blocks, never raises for the network.

        A consumer that is not among the peers gives a transfer that is FAILED already.

        Args:
            ticket: whose transfer it is.
            sealed: the same ticket as the consumer checks it.
            region_bytes: size of each region, in bytes, as the consumer computes them too.
            peer: which of `ranks_of` the consumer it goes to; "": the first.
            said: other fields of its `Offer`.
        """
        offer = Offer(ticket=sealed, regions=tuple(region_bytes), **said)
        transfer_id = part_id(ticket.transfer_id, offer.part)
        peer_key = peer or next(iter(self.ranks_of(ticket.consumer)))
        return self._open(peer_key, transfer_id, offer, ticket.attributes.service)

    def open_checkpoint(
        self, transfer: OutgoingTransfer, num_tokens: int, region_bytes: Sequence[int], peer: str
    ) -> SentTransfer:
        """Begin a checkpoint of a transfer to a peer, after `num_tokens` of its tokens.

        It leaves before what the transfer has still to send, and not before the consumer has let that in. Never
        blocks, never raises for the network.
        """
        transfer_id = checkpoint_id(transfer.transfer_id, num_tokens)
        offer = replace(transfer.offer, regions=tuple(region_bytes), checkpoint=num_tokens)
        checkpoint = self._open(peer, transfer_id, offer, transfer.service, transfer)
        # Its place may still change, since it has nothing to send yet.
        checkpoint.place = order_of_checkpoint(transfer.place, checkpoint.place)
        return checkpoint

    def _open(
        self,
        peer_key: str,
        transfer_id: bytes,
        offer: Offer,
        service: TransferClass,
        owner: OutgoingTransfer | None = None,
    ) -> SentTransfer:
        shared = self._queues.get(peer_key)
        transfer = SentTransfer(shared, transfer_id, offer, service, owner)
        if shared is None:
            transfer.fail(f"{self.name} has no peer named {peer_key}")
            return transfer
        self._connect(peer_key)
        with shared as queue:
            queue.open(transfer, time.monotonic())
        self._wake.set()
        return transfer

    def ranks_of(self, instance: str) -> tuple[str, ...]:
        """The peers that are ranks of an instance, which a ticket names; its own name if there are none."""
        known = self._queues
        ranks = tuple(key for key in known if key.rpartition("/")[0] == instance)
        return ranks if ranks and instance not in known else (instance,)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, per peer; every gauge but `connections` is 0 when nothing is going on."""
        return {
            "name": self.name,
            "peers": {
                name: _stats(queue)
                | {
                    "encrypted": queue.peer.encrypted,
                    "coding": _compression(self._connections.get(name, ())),
                    "congestion": sorted({c.congestion for c in self._connections.get(name, ())}),
                    "forged_frames": sum(c.forged_frames for c in self._connections.get(name, ())),
                }
                for name, queue in self._queues.items()
            },
            "threads": sum(c.alive for c in self._started()) + self._supervisor.is_alive(),
            "thread_errors": self._errors + sum(c.errors for c in self._started()),
        }

    def set_bandwidth(self, link: str, bits_per_s: float) -> None:
        """Set a limit on `link` that orders of `pace` never exceed.

        Raises:
            KeyError: no peer is on this link.
        """
        with self._lock:
            self._pacers[link].set_bandwidth(bits_per_s)

    def apply_peers(self, peers: Mapping[str, Peer]) -> None:
        """Replace the peers: connect to new ones, leave missing ones, and pace the links as the new peers say.

        Transfers to peers that stay go on. Peers that rejected this side are tried again at once.

        Raises:
            ValueError: peers of one link name different bandwidths, or one is encrypted and there is no TLS identity,
                or a link that is encrypted would not be any more. Nothing has changed then.
        """
        with self._reporting:
            self._check(peers)
            stay = {
                key: queue
                for key, queue in self._queues.items()
                # A peer that rejected this side may know it by now, and would otherwise be tried again only rarely.
                if key in peers and _is_same_way(queue.peer, peers[key]) and not queue.queue.rejection
            }
            gone = {key: queue for key, queue in self._queues.items() if key not in stay}
            pacers = {
                peer.link: self._pacers.get(peer.link)
                or LinkPacer(peer.bandwidth_bits_per_s, peer.share_bits_per_s)
                for peer in peers.values()
            }
            for peer in peers.values():
                if peer.bandwidth_bits_per_s is not None:
                    with self._lock:
                        pacers[peer.link].set_bandwidth(peer.bandwidth_bits_per_s, peer.share_bits_per_s)
            self._pacers = pacers
            self._queues = {
                key: stay.get(key) or self._queue_of(peer, pacers[peer.link]) for key, peer in peers.items()
            }
        self._leave(gone)
        if self._is_started:
            for key, peer in peers.items():
                if not peer.on_demand:
                    self._connect(key)

    def _queue_of(self, peer: Peer, pacer: LinkPacer) -> SharedQueue:
        return SharedQueue(PeerQueue(peer, self._options, pacer, time.monotonic()), self._lock)

    def pace(self, order: PaceOrder) -> None:
        """Apply a control plane's order; unknown and unpaced links are ignored."""
        for link, bits_per_s in order.bits_per_s.items():
            pacer = self._pacers.get(link)
            if pacer is not None:
                with self._lock:
                    pacer.order(bits_per_s, order.hold_ms / 1000, time.monotonic())

    def telemetry(self) -> dict[str, Any]:
        """State of links and peers for observers.

        `{"links": {name: LinkReport's fields}, "rejected": {peer: why it rejects this sender},
        "silent": {peer: why its path was given up}, "stalled": {peer: why it counts as stalled}}`
        """
        queues = {name: shared.queue for name, shared in self._queues.items()}
        silent = {name: queue.silent for name, queue in queues.items() if queue.silent}
        stalled = {name: queue.stalled for name, queue in queues.items() if queue.stalled}
        rejected = {name: queue.rejection for name, queue in queues.items() if queue.rejection}
        infos: dict[str, list[TcpInfo]] = {}
        with self._reporting:
            for connection in self._started():
                info = connection.tcp_info()
                if info is not None:
                    peer = connection.queue.peer
                    self._totals.add(peer.link, (peer, connection.number), info)
                    infos.setdefault(peer.link, []).append(info)
            paces = {link: pacer.pace_bits_per_s for link, pacer in self._pacers.items()}
            with self._lock:
                links = link_reports(
                    [each.queue for each in self._queues.values()], paces, infos, self._totals
                )
        return {
            "links": links,
            "rejected": bounded_sentences(rejected),
            "silent": bounded_sentences(silent),
            "stalled": bounded_sentences(stalled),
        }

    def probe(self, link: str, nbytes: int) -> None:
        """Send about `nbytes` of filler on `link`, or less (`LinkPacer.admit_probe`), to measure what it carries.

        Nothing is sent where the link is unknown, its connections are down, or transfers are open.
        """
        queues = [queue for queue in self._queues.values() if queue.peer.link == link]
        pacer, now_s = self._pacers.get(link), time.monotonic()
        with self._lock:
            admitted_bytes = 0 if pacer is None else pacer.admit_probe(nbytes, now_s)
        for shared in queues if admitted_bytes else ():
            with shared as queue:
                queue.fill(admitted_bytes // len(queues), now_s)

    def _check(self, peers: Mapping[str, Peer]) -> None:
        bandwidths: dict[str, float | None] = {}
        encrypted = {queue.peer.link for queue in self._queues.values() if queue.peer.encrypted}
        for peer in peers.values():
            if peer.encrypted and self._tls is None:
                raise ValueError(f"peer {peer.name} is encrypted, and {self.name} has no TLS identity")
            if peer.link in encrypted and not peer.encrypted:
                raise ValueError(f"link {peer.link!r} is encrypted, and would not be to {peer.name}")
            before = self._pacers.get(peer.link)
            was_paced = before is not None and before.bandwidth_bits_per_s is not None
            if before is not None and was_paced != (peer.bandwidth_bits_per_s is not None):
                raise ValueError(f"link {peer.link!r} is paced in one peer list and not in the other")
            if bandwidths.setdefault(peer.link, peer.bandwidth_bits_per_s) != peer.bandwidth_bits_per_s:
                raise ValueError(f"peers of link {peer.link!r} name different bandwidths")

    def _leave(self, gone: Mapping[str, SharedQueue]) -> None:
        leaving: list[SenderConnection] = []
        for key, shared in gone.items():
            with shared as queue:
                queue.close(time.monotonic())
            with self._starting:
                leaving += self._connections.pop(key, ())
        for connection in leaving:
            connection.close()
        self._left = [connection for connection in (*self._left, *leaving) if connection.alive]

    def _connect(self, peer_key: str) -> None:
        with self._starting:
            queue = self._queues.get(peer_key)
            if queue is None or peer_key in self._connections or self._closing:
                return
            hello = partial(self._hello, queue.peer.name)
            tls = self._tls if queue.peer.encrypted else None
            self._connections[peer_key] = [
                SenderConnection(queue, number, hello, self._options, tls)
                for number in range(queue.peer.connections)
            ]
            for connection in self._connections[peer_key]:
                connection.start()

    def _hello(self, peer_name: str) -> ClientHello:
        return ClientHello(
            key=self._key,
            name=self.name,
            server_name=peer_name,
            role=ROLE_PRODUCER,
            session=self._session,
            nonce=secrets.token_hex(NONCE_BYTES),
            fingerprint=self._fingerprint,
            layouts=self._layouts,
        )

    def _started(self) -> list[SenderConnection]:
        with self._starting:
            return [connection for slots in self._connections.values() for connection in slots]

    def _supervise(self) -> None:
        while not self._closing:
            # Asleep without a timeout while no peer has work.
            self._wake.wait()
            self._wake.clear()
            while not self._closing and any(shared.queue.busy for shared in self._queues.values()):
                try:
                    self._supervise_once()
                except Exception:
                    self._errors += 1
                    log.exception("supervision of sender %s failed", self.name)
                self._wake.wait(self._options.sample_s)
                self._wake.clear()
            self._renew_idle()

    def _renew_idle(self) -> None:
        queues = self._queues
        for peer_key in [key for key in self._used if key not in queues or not queues[key].queue.busy]:
            self._used.discard(peer_key)
            for connection in self._connections.get(peer_key, ()):
                connection.renew_if_spoiled()

    def _supervise_once(self) -> None:
        """Apply the deadlines, and close silent connections."""
        now_s = time.monotonic()
        self._renew_idle()
        with self._lock:
            for pacer in self._pacers.values():
                pacer.look(now_s)
        for peer_key, shared in self._queues.items():
            if not shared.queue.busy:
                continue
            self._used.add(peer_key)
            infos: dict[Carrier, TcpInfo] = {}
            for connection in self._connections.get(peer_key, ()):
                info = connection.tcp_info()
                if info is not None:
                    infos[connection] = info
            with shared as queue:
                closing = queue.apply_deadlines(now_s, infos)
            for silent, why in closing.items():
                log.warning("connection %d to %s is closed: %s", silent.number, shared.peer.name, why)
                silent.shut()


def _is_same_way(before: Peer, after: Peer) -> bool:
    """True if the connections to a peer can stay."""
    return before == msgspec.structs.replace(
        after,
        bandwidth_bits_per_s=before.bandwidth_bits_per_s,
        share_bits_per_s=before.share_bits_per_s,
        on_demand=before.on_demand,
    )


def _compression(connections: Sequence[SenderConnection]) -> dict[str, float] | None:
    """Sums of the compression counters of a peer's connections; None where chunks are not compressed."""
    counted = [asdict(counters) for each in connections if (counters := each.compression) is not None]
    return {name: sum(counters[name] for counters in counted) for name in counted[0]} if counted else None


def _stats(shared: SharedQueue) -> dict[str, Any]:
    with shared as queue:
        return queue.stats()
