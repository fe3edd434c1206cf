"""The consumer's end: listens, stages what producers send, and reports to the engine and to observers."""

import contextlib
import errno
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from prfaas import __version__
from prfaas.core.deployment import CONTROL
from prfaas.core.link.samples import ArrivalReport
from prfaas.serving.logs import PEER
from prfaas.serving.transport.io.greeting import ServerHandshake
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.received_transfers import ReceivedTransfers
from prfaas.serving.transport.io.receiver_connection import ObserverOrder, ReceiverConnection
from prfaas.serving.transport.io.sender import Sender
from prfaas.serving.transport.io.sockets import shut, tune
from prfaas.serving.transport.io.staging_memory import StagingArena
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.io.unauthenticated import UnauthenticatedPeers
from prfaas.serving.transport.protocol.fingerprint import Fingerprint
from prfaas.serving.transport.protocol.handshake import (
    ROLE_PRODUCER,
    HandshakeError,
    PeerIdentity,
    ServerHello,
)
from prfaas.serving.transport.protocol.liveness import LONGEST_LOOK_S, LookClock
from prfaas.serving.transport.protocol.options import ReceiverOptions
from prfaas.serving.transport.protocol.pacing import PaceOrder, ProbeOrder
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.region_layout import TransferLayout
from prfaas.serving.transport.protocol.requests import PeerRequest, refuse_request
from prfaas.serving.transport.protocol.sealing import Sealing
from prfaas.serving.transport.protocol.sentences import bounded_sentences
from prfaas.serving.transport.protocol.transfer_table import TransferTable

log = logging.getLogger(__name__)

_TICK_S = 0.2
_ACCEPT_BACKLOG = 128
# Errors of the machine, not of the peer: wait until resources are free, and go on.
_NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_RESOURCES_WAIT_S = 0.1


class Receiver:
    """Receives KV transfers into staging; thread-safe.

    1. `start` listens. One thread accepts, one serves each connection (`ReceiverConnection`), one applies deadlines.
       Connections in their handshake have places of their own (`UnauthenticatedPeers`).
    2. Connections write verified chunks into staging, through `transfers`, which owns all decisions.
    3. The engine asks `transfers` for what has arrived.
    4. Observers get statuses, `stats` and `telemetry`, and steer the `sender` beside this receiver.
    """

    def __init__(
        self,
        *,
        name: str,
        key: bytes,
        host: str,
        port: int,
        arena: StagingArena,
        layout: TransferLayout,
        fingerprint: Fingerprint,
        options: ReceiverOptions | None = None,
        peer_list: PeerList | None = None,
        sender: Sender | None = None,
        tls: TlsIdentity | None = None,
        on_request: Callable[[PeerRequest], None] = refuse_request,
        more_stats: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Make it without listening.

        Args:
            name: this side's, as producers and tickets call it.
            key: of the deployment, 32 bytes.
            host: the address to listen at.
            port: the port to listen at, 0: any free one.
            arena: the staging of all transfers.
            layout: the regions that this side expects of a transfer, of all producers or of each; or the transfers
                that it has asked for.
            fingerprint: the KV layout, compared field by field with each producer's.
            options: deadlines and limits.
            peer_list: this rank's peers until the control plane sends another list; None: all that have the key.
            sender: read and steered by observers; None: there is none.
            tls: takes encrypted connections too; None: all connections are plain.
            on_request: called with an observer's request to a pool; in the connection's thread.
            more_stats: further fields of `stats`; called in the connection's thread.
        """
        self.name = name
        self._address = (host, port)
        self._options = options or ReceiverOptions()
        hello = ServerHello(
            key=key,
            name=name,
            session=secrets.token_hex(8),
            fingerprint=dict(fingerprint),
            layouts=layout if isinstance(layout, PeerLayouts) else None,
        )
        self._handshake = ServerHandshake(hello=hello, handshake_s=self._options.handshake_s, tls=tls)
        self._producers = None if peer_list is None else peer_list.producers
        self._plain_peers: frozenset[str] = frozenset() if peer_list is None else peer_list.plain
        digest = "" if peer_list is None else peer_list.digest
        self._peer_list_state: dict[str, Any] = {"digest": digest, "told": False, "trouble": ""}
        self._sender = sender
        self._on_request = on_request
        self._more_stats = more_stats
        table = TransferTable(name=name, key=key, arena=arena, layout=layout, options=self._options)
        self.transfers = ReceivedTransfers(table)
        self._lock = threading.Lock()
        self._connections: dict[ReceiverConnection, threading.Thread] = {}
        self._unauthenticated = UnauthenticatedPeers(name, self._options.max_unauthenticated)
        if peer_list is not None:
            self._unauthenticated.know(*(peer.host for peer in peer_list.peers.values()))
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._arrived_before: dict[str, ArrivalReport] = {}  # over connections that have ended
        self.is_leaving = False
        self._failed_connections = 0
        self._forged_frames = 0
        self._accept_failures = 0
        self._thread_errors = 0

    @property
    def port(self) -> int:
        """The port listened at: the real one when 0 was asked for."""
        listener = self._listener
        return self._address[1] if listener is None else int(listener.getsockname()[1])

    def start(self) -> None:
        """Listen, in the background.

        Raises:
            OSError: the address is taken or not one of this machine.
        """
        if self._listener is not None:
            raise RuntimeError(f"receiver {self.name} was started already")
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._listener = socket.create_server(self._address, family=family, backlog=_ACCEPT_BACKLOG)
        for job, what in ((self._accept, "accept"), (self._sweep, "sweep")):
            thread = threading.Thread(target=job, name=f"prfaas-recv-{what}-{self.name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End every thread and connection, free every lease that was not taken; idempotent."""
        self._closing.set()
        if self._listener is not None:
            shut(self._listener)
        for thread in self._threads:
            thread.join()
        with self._lock:
            open_now = dict(self._connections)
        for connection in open_now:
            connection.shut()
        for thread in open_now.values():
            thread.join()
        if self._listener is not None:
            self._listener.close()
        with self.transfers as table:
            table.close(time.monotonic())

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; every gauge of use is 0 when no transfer is going on."""
        with self._lock:
            connections = list(self._connections)
            threads = sum(thread.is_alive() for thread in self._threads) + len(connections)
        roles = [each.identity.role for each in connections if each.identity is not None]
        with self.transfers as table:
            transfers = table.stats()
        return transfers | {
            "name": self.name,
            "version": __version__,
            "connections": len(roles),
            "producer_connections": roles.count("producer"),
            "observer_connections": roles.count("observer"),
            "encrypted_connections": sum(each.sealing is not None for each in connections),
            "failed_connections": self._failed_connections,
            "forged_frames": self._forged_frames,
            "strangers": len(self._unauthenticated),
            "closed_strangers": self._unauthenticated.closed,
            "accept_failures": self._accept_failures,
            "rejected": bounded_sentences(self._unauthenticated.rejected),
            "thread_errors": self._thread_errors,
            "threads": threads,
            "roster": self._peer_list_state,
            "leaving": self.is_leaving,
            "gateways_unaware": sum(
                each.identity is not None and each.identity.name == CONTROL and not each.knows_leaving
                for each in connections
            ),
            **self.telemetry(),
            **self._more_stats(),
        }

    def telemetry(self) -> dict[str, Any]:
        """State of the links, small enough for one packet: arrivals, and the sender's telemetry.

        `{"arrivals": {producer: fields of ArrivalReport}, "sender": Sender.telemetry()}`
        """
        with self._lock:
            arrived = dict(self._arrived_before)
            for connection in self._connections:
                connection.add_arrived(arrived)
        return {
            "arrivals": {name: asdict(report) for name, report in arrived.items()},
            "sender": {"links": {}} if self._sender is None else self._sender.telemetry(),
        }

    # The calls of its connections: see `ConnectionHost`

    def handshake_failed(self, sentence: str, peer: str) -> None:
        """Note why a handshake failed."""
        self._unauthenticated.note(sentence, peer)

    def carry_out(self, order: ObserverOrder) -> None:
        """Carry out an observer's order, by the sender, this receiver or the pool."""
        match order:
            case PeerList():
                self._apply_peer_list(order)
            case PeerRequest():
                self._on_request(order)
            case PaceOrder() if self._sender is not None:
                self._sender.pace(order)
            case ProbeOrder() if self._sender is not None:
                self._sender.probe(order.link, order.nbytes)

    def _apply_peer_list(self, peer_list: PeerList) -> None:
        """Replace this rank's peers, for the sender too; connections of producers that are no peers any more end."""
        try:
            if self._sender is not None:
                self._sender.apply_peers(peer_list.peers)
        except ValueError as error:
            log.warning("%s keeps its peer list: %s", self.name, error)
            self._peer_list_state = self._peer_list_state | {"told": True, "trouble": str(error)}
            return
        with self._lock:
            self._producers, self._plain_peers = peer_list.producers, peer_list.plain
            self._unauthenticated.know(*(peer.host for peer in peer_list.peers.values()))
            gone = [
                connection
                for connection in self._connections
                if (who := connection.identity) is not None
                and who.role == ROLE_PRODUCER
                and who.name not in peer_list.producers
            ]
            self._peer_list_state = {"digest": peer_list.digest, "told": True, "trouble": ""}
        for connection in gone:
            connection.shut()

    def shake_hands(
        self, connection: ReceiverConnection, sock: socket.socket
    ) -> tuple[PeerIdentity, Sealing | None]:
        """Authenticate the peer of an accepted connection, within the limit on connections."""
        options = self._options
        tune(sock, user_timeout_s=options.limits.user_timeout_s, keepalive_s=options.limits.keepalive_s)

        def admit(identity: PeerIdentity) -> None:
            with self._lock:
                peers = sum(each.identity is not None for each in self._connections)
                if peers >= options.max_connections:
                    raise HandshakeError(
                        f"{identity.name} finds {peers} other connections, which is the limit"
                    )
                connection.identity = identity
            self._unauthenticated.leave(sock)
            self._unauthenticated.forgive(identity.name)
            with contextlib.suppress(OSError):
                self._unauthenticated.know(str(sock.getpeername()[0]))

        identity, sealing = self._handshake.welcome(
            sock, producers=self._producers, plain_peers=self._plain_peers, admit=admit
        )
        sock.settimeout(None)
        return identity, sealing

    def _accept(self) -> None:
        listener = self._listener
        assert listener is not None
        while not self._closing.is_set():
            try:
                sock, address = listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self._accept_failed(error)
                continue
            try:
                self._serve(sock, str(address[0]))
            except Exception as error:
                self._forget(sock)
                # A thread that cannot be started is for lack of resources too.
                if isinstance(error, RuntimeError):
                    self._accept_failed(OSError(errno.ENOMEM, str(error)))
                else:
                    self._thread_errors += 1
                    log.exception("receiver %s cannot serve a connection", self.name)

    def _accept_failed(self, error: OSError) -> None:
        self._accept_failures += 1
        self._unauthenticated.note(f"it cannot be accepted: {error}")
        if error.errno in _NO_RESOURCES:
            self._unauthenticated.close_oldest()
        # A client that left before it was accepted needs no pause.
        if error.errno != errno.ECONNABORTED:
            self._closing.wait(_RESOURCES_WAIT_S)

    def _serve(self, sock: socket.socket, address: str) -> None:
        connection = ReceiverConnection(sock, self.transfers, self, self._options)

        def serve() -> None:
            # This thread is the connection's own.
            PEER.set(address)
            try:
                connection.serve()
            finally:
                self._unauthenticated.leave(sock)
                with self._lock:
                    del self._connections[connection]
                    connection.add_arrived(self._arrived_before)
                    self._failed_connections += bool(connection.failure)
                    self._forged_frames += connection.forged

        if not self._unauthenticated.enter(sock, address):
            sock.close()
            return
        thread = threading.Thread(target=serve, name=f"prfaas-recv-{self.name}", daemon=True)
        with self._lock:
            if self._closing.is_set():
                self._forget(sock)
                return
            thread.start()
            self._connections[connection] = thread

    def _forget(self, sock: socket.socket) -> None:
        self._unauthenticated.leave(sock)
        sock.close()

    def _sweep(self) -> None:
        clock, was_late = LookClock(time.monotonic()), False
        while not self._closing.wait(_TICK_S):
            try:
                now_s = time.monotonic()
                elapsed_s = clock.elapsed_s(now_s)
                with self.transfers as table:
                    awaited = table.awaited()
                with self._lock:
                    connections = list(self._connections)
                for connection in connections:
                    connection.check(now_s, elapsed_s, awaited)
                # After a stop of this process its connections are read first: frames that wait there count.
                late = elapsed_s >= LONGEST_LOOK_S and not was_late
                if not late:
                    with self.transfers as table:
                        table.sweep(now_s)
                was_late = late
            except Exception:
                self._thread_errors += 1
                log.exception("applying the deadlines of receiver %s failed", self.name)
