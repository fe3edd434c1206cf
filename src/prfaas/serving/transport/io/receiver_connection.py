"""One accepted connection at the consumer, served by one blocking thread.

`_receive_chunk` moves KV bytes from the wire into staging. From there the engine takes complete transfers.
"""

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec

from prfaas.core.link.samples import NOTHING_ARRIVED, ArrivalReport
from prfaas.serving.transport.io.received_transfers import ReceivedTransfers
from prfaas.serving.transport.io.sockets import (
    BulkReader,
    ConnectionEnded,
    expedite,
    read_arrived,
    read_tcp_info,
    receive_exactly,
    shut,
)
from prfaas.serving.transport.protocol.compression import PREFIX_BYTES, decompress, decompressed_bytes
from prfaas.serving.transport.protocol.handshake import ROLE_PRODUCER, HandshakeError, PeerIdentity
from prfaas.serving.transport.protocol.incoming import ProducerFrame, ProducerSession
from prfaas.serving.transport.protocol.liveness import HEARTBEAT_BYTES, ProducerLiveness
from prfaas.serving.transport.protocol.options import ReceiverOptions
from prfaas.serving.transport.protocol.pacing import PaceOrder, ProbeOrder
from prfaas.serving.transport.protocol.peer_list import PeerList
from prfaas.serving.transport.protocol.permissions import permitted_frames
from prfaas.serving.transport.protocol.requests import ORDERS, PeerRequest
from prfaas.serving.transport.protocol.sealing import (
    SEALED_HEADER_BYTES,
    TAG_BYTES,
    ForgedFrameError,
    Scratch,
    Sealing,
)
from prfaas.serving.transport.protocol.wire import (
    COMPRESSED,
    HEADER_BYTES,
    UNCHECKED,
    FrameType,
    Header,
    RunningChecksum,
    WireError,
    checksum,
    nack,
    pack_control,
    parse_control,
    ping,
    pong,
    read_body,
    text_field,
    unpack_header,
)

log = logging.getLogger(__name__)

_MAX_OUTBOX_FRAMES = 8192
_OUTBOX_PRESSURE_FRAMES = 64
_MAX_WATCHED = 65536
_OF_TRANSFERS = frozenset({FrameType.OPEN, FrameType.END, FrameType.ABORT})
# Bytes are checksummed in pieces of this size, while they are still in the processor's second cache.
_CACHED_BYTES = 512 << 10


class WatchFields(msgspec.Struct):
    """The fields of a WATCH frame."""

    lead_s: Annotated[float, msgspec.Meta(ge=0.0, le=60.0)] = 0.0


ObserverOrder: TypeAlias = PaceOrder | ProbeOrder | PeerList | PeerRequest


class ConnectionHost(Protocol):
    """The receiver as its connections see it; called in a connection's own thread."""

    name: str
    """As producers and tickets call it."""
    is_leaving: bool
    """Observers hear that this process is to end. Only the next process takes that back."""

    def shake_hands(
        self, connection: "ReceiverConnection", sock: socket.socket
    ) -> tuple[PeerIdentity, Sealing | None]:
        """Authenticate the peer; raises as `ServerHandshake.welcome`."""

    def handshake_failed(self, sentence: str, peer: str) -> None:
        """Note why a handshake failed; `peer`: its name, if it had proved that."""

    def stats(self) -> dict[str, Any]:
        """The fields of a STATS answer."""

    def telemetry(self) -> dict[str, Any]:
        """The same of links alone."""

    def carry_out(self, order: ObserverOrder) -> None:
        """Carry out an observer's PACE, PROBE, ROSTER, COPY or PULL."""


class ReceiverConnection:
    """Reads frames of a producer or an observer; any thread may post answers to its outbox.

    1. `serve`, in the connection's own thread, shakes hands through the host.
    2. It then reads frames until the connection ends: a producer's go to the transfer table (`_serve_producer`), an
       observer's to the table or the host (`_serve_observer`).
    3. The table answers through `post` from any thread; `flush` sends without blocking.
    4. The receiver's sweep calls `check`, which pings a silent producer and in the end closes the connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        transfers: ReceivedTransfers,
        host: ConnectionHost,
        options: ReceiverOptions,
    ) -> None:
        self._sock = sock
        self._arrived = NOTHING_ARRIVED
        self._transfers = transfers
        self._host = host
        self._options = options
        self._outbox: deque[bytes] = deque()
        self._unsent = memoryview(b"")
        self._sending = threading.Lock()
        self._inside_frame = False
        self._liveness = ProducerLiveness()
        self._session: ProducerSession | None = None
        self._trouble = ""
        self._header = bytearray(SEALED_HEADER_BYTES)
        self._scratch = Scratch()
        self._bulk = BulkReader(sock)
        self._watched: set[bytes] = set()
        self._permitted: frozenset[FrameType] = frozenset()
        self.identity: PeerIdentity | None = None
        """The authenticated peer; None until the handshake is over."""
        self.sealing: Sealing | None = None
        """The keys of an encrypted connection."""
        self.failure = ""
        """Why the connection ended, unless it ended in order."""
        self.knows_leaving = False
        """An observer has been told that this process is to end."""
        self.forged = False
        """True if it ended because of a forged or replayed frame."""

    # Any thread

    def post(self, frame: bytes) -> None:
        """Send soon, without blocking: bytes that the socket does not take now leave with the next flush."""
        if len(self._outbox) >= _MAX_OUTBOX_FRAMES:
            self.shut()  # a peer that doesn't read its answers
            return
        self._outbox.append(frame)
        self.flush()

    def flush(self) -> None:
        """Send waiting frames, as far as the socket takes them without blocking."""
        # The holder of the lock sends for all; the second check catches frames that were posted meanwhile.
        while self._has_unsent and self._sending.acquire(blocking=False):
            try:
                while self._has_unsent:
                    if not self._unsent:
                        # Frames are sealed in the order in which they leave.
                        frame = self._outbox.popleft()
                        sealed = frame if self.sealing is None else self.sealing.sealer.seal(frame)
                        self._unsent = memoryview(sealed)
                    sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT)
                    self._unsent = self._unsent[sent:]
            except BlockingIOError:
                return
            except OSError:
                self._outbox.clear()
                self._unsent = memoryview(b"")
                self.shut()
                return
            finally:
                self._sending.release()

    @property
    def _has_unsent(self) -> bool:
        return bool(self._outbox or self._unsent)

    def shut(self) -> None:
        """Make the connection's thread end."""
        shut(self._sock)

    def add_arrived(self, sums: dict[str, ArrivalReport]) -> None:
        """Add what has come over this connection to its producer's; after its end, the last totals."""
        try:
            self._arrived = read_arrived(self._sock)
        except OSError:
            self._arrived = self._arrived.ended
        who = self.identity
        if who is not None and who.role == ROLE_PRODUCER:
            sums[who.name] = sums.get(who.name, NOTHING_ARRIVED) + self._arrived

    def check(self, now_s: float, elapsed_s: float, awaited: Collection[tuple[str, str]]) -> None:
        """Send a PING to a silent producer, close its connection after its timeout, and flush the outbox.

        Args:
            now_s: time.monotonic().
            elapsed_s: since the last check.
            awaited: name and session of the producers that have a transfer to finish.
        """
        if self._has_unsent:
            self.flush()
        who = self.identity
        if who is None or not (self._inside_frame or (who.name, who.session) in awaited):
            self._liveness.rest()
            return
        liveness = self._liveness
        try:
            info = read_tcp_info(self._sock)
        except OSError:
            return
        found = liveness.check(info, now_s, elapsed_s, self._options.limits, inside_frame=self._inside_frame)
        if self._session is not None and liveness.new_bytes > HEARTBEAT_BYTES:
            # On a slow link it takes a while until a chunk is whole.
            self._session.progressed_at_s = now_s
        if isinstance(found, str):
            self.failure = self._trouble = found
            self.shut()
        elif found:
            self.post(ping(found))

    # The connection's own thread

    def serve(self) -> None:
        """Shake hands, then serve frames until the connection ends. Never raises."""
        try:
            self.identity, self.sealing = self._host.shake_hands(self, self._sock)
            is_here = self.sealing is not None or self._sock.getpeername()[0] == self._sock.getsockname()[0]
            self._permitted = permitted_frames(self.identity, self._host.name, is_here=is_here)
            if self.identity.role == ROLE_PRODUCER:
                self._serve_producer(self.identity)
            else:
                self._serve_observer(self.identity)
        except ConnectionEnded:
            pass
        except (OSError, WireError) as error:
            self.failure = str(error)
            self.forged = isinstance(error, ForgedFrameError)
            if self.identity is None:
                peer = error.peer if isinstance(error, HandshakeError) else ""
                self._host.handshake_failed(self.failure, peer)
            else:
                said = log.warning if isinstance(error, WireError) else log.info
                said("connection from %s ended: %s", self.identity.name, error)
        except Exception as error:
            self.failure = repr(error)
            log.exception("connection from %s failed", self._whom())
        finally:
            self.add_arrived({})
            self.shut()
            # Not while another thread posts: its send must not meet a reused file number.
            with self._sending:
                self._sock.close()

    def _whom(self) -> str:
        return "an unknown peer" if self.identity is None else self.identity.name

    def _serve_producer(self, identity: PeerIdentity) -> None:
        with self._transfers as table:
            session = self._session = table.connected(identity, self)
        try:
            while True:
                header = self._next_header()
                if header.kind is FrameType.DATA:
                    self._receive_chunk(session, header)
                elif header.kind in _OF_TRANSFERS:
                    body = self._body(header)
                    frame = ProducerFrame(
                        session=session,
                        connection=self,
                        header=header,
                        body=body,
                        now_s=time.monotonic(),
                        unix_s=time.time(),
                    )
                    with self._transfers as table:
                        table.take_frame(frame)
                elif header.kind is FrameType.FILLER:
                    self._body(header)
                else:
                    self._take_heartbeat(header)
                if len(self._outbox) > _OUTBOX_PRESSURE_FRAMES:
                    self._wait_for_outbox()
        finally:
            heard_at_s = time.monotonic() - self._liveness.path_s
            with self._transfers as table:
                table.disconnected(session, self, heard_at_s, self._trouble)

    def _serve_observer(self, identity: PeerIdentity) -> None:
        expedite(self._sock)
        try:
            while True:
                header = self._next_header()
                body = self._body(header)
                if header.kind is FrameType.WATCH:
                    self._watch(header.transfer_id, read_body(WatchFields, body).lead_s)
                elif header.kind is FrameType.ABANDON:
                    keep = body.get("keep") is True
                    self._transfers.drop(header.transfer_id, text_field(body, "reason"), keep=keep)
                elif header.kind is FrameType.STATS:
                    stats = self._host.telemetry() if body.get("of") == "links" else self._host.stats()
                    self.knows_leaving = self.knows_leaving or stats.get("leaving") is True
                    self.post(pack_control(FrameType.STATS, body=stats))
                elif header.kind is FrameType.LEAVE:
                    self._host.is_leaving = True
                elif (order := self._order(header, body, identity.name)) is not None:
                    self._host.carry_out(order)
                else:
                    self._take_heartbeat(header)
                if len(self._outbox) > _OUTBOX_PRESSURE_FRAMES:
                    self._wait_for_outbox()
        finally:
            with self._transfers as table:
                table.watchers.remove(self, self._watched)

    def _watch(self, transfer_id: bytes, lead_s: float) -> None:
        with self._transfers as table:
            if len(self._watched) >= _MAX_WATCHED:
                self._watched = {each for each in self._watched if table.watchers.has(self, each)}
            if len(self._watched) >= _MAX_WATCHED:
                raise WireError(f"an observer may watch {_MAX_WATCHED} transfers at once")
            self._watched.add(transfer_id)
            table.watch(self, transfer_id, lead_s, time.monotonic())

    def _order(self, header: Header, body: dict[str, Any], sent_by: str) -> ObserverOrder | None:
        if header.kind is FrameType.PACE:
            return read_body(PaceOrder, body)
        if header.kind is FrameType.ROSTER:
            return PeerList.from_body(body)
        if header.kind is FrameType.PROBE:
            return read_body(ProbeOrder, body)
        if header.kind in ORDERS:
            order = read_body(ORDERS[header.kind], body)
            return PeerRequest(sent_by, header.transfer_id, order, self.post)
        return None

    def _take_heartbeat(self, header: Header) -> None:
        if header.length_bytes:
            raise WireError(f"{header.kind.name} has no payload")
        if header.kind is FrameType.PING:
            self.post(pong(header))
        else:
            self._liveness.heard(header.offset)

    def _next_header(self) -> Header:
        """The next frame's header, of a frame that this peer may send."""
        opener = None if self.sealing is None else self.sealing.opener
        raw = memoryview(self._header)[: HEADER_BYTES if opener is None else SEALED_HEADER_BYTES]
        receive_exactly(self._sock, raw)
        header = unpack_header(raw if opener is None else opener.open_header(raw))
        if header.kind not in self._permitted:
            raise WireError(f"{self._whom()} may not send {header.kind.name}")
        return header

    def _body(self, header: Header) -> dict[str, Any]:
        return parse_control(header, self._payload(header))

    def _payload(self, header: Header) -> memoryview:
        """A whole payload, unchecked where it is not sealed; valid until the next frame."""
        if self.sealing is not None and header.length_bytes:
            return memoryview(self.sealing.opener.open_payload(self._read_sealed(header)))
        payload = self._scratch.of(header.length_bytes)
        self._read_payload([payload])
        return payload

    def _read_sealed(self, header: Header) -> memoryview:
        sealed = self._scratch.of(header.length_bytes + TAG_BYTES)
        self._read_payload([sealed])
        return sealed

    def _read_payload(self, pieces: list[memoryview]) -> None:
        self._inside_frame = True
        try:
            for piece in pieces:
                self._bulk.fill(piece)
        finally:
            self._inside_frame = False

    def _receive_chunk(self, session: ProducerSession, header: Header) -> None:
        """Move a chunk's bytes from the wire into staging; its header has been read."""
        payload = None
        if header.flags & COMPRESSED:
            payload = self._payload(header)
            is_checked = self.sealing is None and not header.flags & UNCHECKED
            if is_checked and checksum(payload) != header.checksum:
                # Even its length may be damaged, so it has no place.
                self.post(nack(header))
                return
            header = replace(header, length_bytes=decompressed_bytes(payload[:PREFIX_BYTES]))
        # 1. Where they belong: a place in the transfer's staging, which is held until step 4.
        place = self._transfers.place_chunk(session, self, header)
        try:
            # 2. Into that place; what is of no use goes into the scratch buffer.
            # 3. Are they the bytes that the producer sent?
            if payload is not None:
                place.spared_bytes = max(header.length_bytes - len(payload), 0)
                verified = place.transfer is None or decompress(payload, place.pieces)
            elif self.sealing is None:
                # Straight from the socket.
                unused = place.transfer is None
                verified = self._read_checked(
                    header, [self._scratch.of(header.length_bytes)] if unused else place.pieces
                )
            else:
                # Decryption writes and verifies.
                self.sealing.opener.open_into(self._read_sealed(header), place.pieces)
                verified = True
        except BaseException:
            with self._transfers as table:
                table.abandon_chunk(place, time.monotonic())
            raise
        # 4. Record them and answer: ACK, or NACK for damaged ones. The last chunk completes the transfer.
        with self._transfers as table:
            table.finish_chunk(place, time.monotonic(), verified=verified)

    def _read_checked(self, header: Header, pieces: list[memoryview]) -> bool:
        """Read a chunk; returns whether its checksum fits."""
        if header.flags & UNCHECKED:
            self._read_payload(pieces)
            return True
        running = RunningChecksum()
        for piece in pieces:
            for start in range(0, piece.nbytes, _CACHED_BYTES):
                part = piece[start : start + _CACHED_BYTES]
                self._read_payload([part])
                running.update(part)
        return running.value == header.checksum

    def _wait_for_outbox(self) -> None:
        # Its answers don't fit into the socket: reading on would only pile up more.
        deadline_s = time.monotonic() + self._options.limits.progress_deadline_s
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while self._has_unsent:
            if time.monotonic() > deadline_s:
                raise WireError("the other side does not read its answers")
            poll.poll(100)
            self.flush()
