"""One connection to a peer: a writer thread that keeps it up and sends, a reader thread that takes the
answers.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable

from prfaas.serving.transport.handshake import ClientHello, HandshakeError, greet
from prfaas.serving.transport.options import SenderOptions
from prfaas.serving.transport.outgoing import ControlJob, Flight, SourceGone, Span
from prfaas.serving.transport.peer_queue import Lane
from prfaas.serving.transport.sockets import (
    ConnectionEnded,
    TcpInfo,
    read_tcp_info,
    receive_exactly,
    send_all,
    set_pacing,
    set_unsent_limit,
    shut,
    tune,
)
from prfaas.serving.transport.wire import (
    HEADER_BYTES,
    FrameType,
    Header,
    WireError,
    checksum,
    pack_header,
    parse_control,
    unpack_header,
)

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_READ_BYTES = 64 << 10
# What may wait unsent in the kernel: about 20 ms on a paced link.
_UNSENT_S = 0.02
_MIN_UNSENT_BYTES = 16 << 10
_MAX_UNSENT_BYTES = 1 << 20


class SenderConnection:
    """Slot `number` of a lane: reconnects with back-off for as long as the lane lives."""

    def __init__(
        self, lane: Lane, number: int, hello: Callable[[], ClientHello], options: SenderOptions
    ) -> None:
        self.lane = lane
        self.number = number
        self.congestion = ""
        self.errors = 0
        self._hello = hello
        self._options = options
        self._buffer = bytearray(options.chunk_bytes)
        self._buffer[::_PAGE_BYTES] = bytes(-(-options.chunk_bytes // _PAGE_BYTES))
        self._sock: socket.socket | None = None
        self._up = False
        self._closing = False
        self._chunk_bytes = options.chunk_bytes
        self._bytes_acked = 0
        name = f"prfaas-send-{lane.peer.name}-{number}"
        self._reader_name = f"{name}-acks"
        self._writer = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._writer.start()

    def close(self) -> None:
        """Wake the threads; call `join` after the lane was closed."""
        self._closing = True
        self.shut()

    def join(self) -> None:
        if self._writer.ident is not None:
            self._writer.join()

    @property
    def alive(self) -> bool:
        return self._writer.is_alive()

    def shut(self) -> None:
        """Break the connection; the slot makes a new one unless it closes."""
        sock = self._sock
        if sock is not None:
            shut(sock)

    def set_rate(self, bytes_per_s: int | None) -> None:
        """Pace the socket, and cut chunks small enough that a slow link still acknowledges smoothly."""
        options = self._options
        chunk = options.chunk_bytes if bytes_per_s is None else int(bytes_per_s * options.chunk_s)
        self._chunk_bytes = max(
            min(options.min_chunk_bytes, options.chunk_bytes), min(options.chunk_bytes, chunk)
        )
        unsent = _MAX_UNSENT_BYTES if bytes_per_s is None else int(bytes_per_s * _UNSENT_S)
        sock = self._sock
        if sock is None:
            return
        try:
            set_pacing(sock, bytes_per_s)
            set_unsent_limit(sock, max(_MIN_UNSENT_BYTES, min(_MAX_UNSENT_BYTES, unsent)))
        except OSError:
            pass  # the connection is going down: its threads notice by themselves

    def tcp_info(self) -> TcpInfo | None:
        """None while the connection is down."""
        sock = self._sock
        if sock is None or not self._up:
            return None
        try:
            return read_tcp_info(sock)
        except OSError:
            return None

    def moved(self) -> bool:
        """Whether the peer's kernel has acknowledged bytes since the last call."""
        info = self.tcp_info()
        before, self._bytes_acked = self._bytes_acked, info.bytes_acked if info is not None else 0
        return self._bytes_acked > before

    # The writer thread

    def _run(self) -> None:
        backoff_s = self._options.backoff_min_s
        again = True
        while again:
            began_s = time.monotonic()
            try:
                trouble, rejected = self._live()
            except Exception as error:
                self.errors += 1
                log.exception("connection to %s failed", self.lane.peer.name)
                trouble, rejected = repr(error), False
            if trouble:
                self.lane.unreachable(trouble, rejected=rejected)
            lived = time.monotonic() - began_s > self._options.backoff_max_s
            backoff_s = self._options.backoff_min_s if lived else backoff_s
            again = self.lane.wait_before_retry(backoff_s)
            backoff_s = min(2 * backoff_s, self._options.backoff_max_s)

    def _live(self) -> tuple[str, bool]:
        """One life of the connection. Returns why it never came up ("" if it did) and whether that is
        final.
        """
        try:
            sock = self._connect()
        except HandshakeError as error:
            return str(error), True
        except (OSError, WireError) as error:
            return str(error) or repr(error), False
        flight = Flight(connection=self)
        self._bytes_acked = 0
        reader = threading.Thread(target=self._read, args=(sock, flight), name=self._reader_name, daemon=True)
        self._up = True
        self.lane.connected(flight)
        trouble = ""
        try:
            reader.start()
            self._write(sock, flight)
            trouble = "connection lost"
        except OSError as error:
            trouble = str(error)
        except Exception as error:
            trouble = repr(error)
            self.errors += 1
            log.exception("writer to %s failed", self.lane.peer.name)
        finally:
            self._up = False
            shut(sock)
            if reader.ident is not None:
                reader.join()
            self.lane.disconnected(flight, trouble)
            self._sock = None
            sock.close()
        return "", False

    def _connect(self) -> socket.socket:
        peer, options = self.lane.peer, self._options
        family, kind, protocol, _, address = socket.getaddrinfo(
            peer.host, peer.port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, protocol)
        self._sock = sock
        try:
            if self._closing:
                raise ConnectionEnded("closing")
            self.congestion = tune(sock, user_timeout_s=options.user_timeout_s, congestion=options.congestion)
            set_unsent_limit(sock, _MAX_UNSENT_BYTES)
            sock.settimeout(options.connect_s)
            sock.connect(address)
            greet(sock, self._hello())
            sock.settimeout(None)
        except BaseException:
            self._sock = None
            sock.close()
            raise
        return sock

    def _write(self, sock: socket.socket, flight: Flight) -> None:
        while (job := self.lane.next_job(flight, self._current_chunk_bytes)) is not None:
            if isinstance(job, ControlJob):
                send_all(sock, job.frame)
            else:
                self._send_chunk(sock, job)

    def _current_chunk_bytes(self) -> int:
        return self._chunk_bytes

    def _send_chunk(self, sock: socket.socket, span: Span) -> None:
        chunk = memoryview(self._buffer)[: span.nbytes]
        error = ""
        try:
            span.source.read_into(span.start - span.base, chunk)
        except SourceGone as gone:
            error = f"source gone: {gone}"
        except Exception as failure:
            self.errors += 1
            log.exception("a chunk for %s cannot be read", self.lane.peer.name)
            error = f"source failed: {failure!r}"
        transfer_id, region, start = span.transfer.transfer_id, span.region, span.start
        if not self.lane.read_done(span, error):
            return
        header = pack_header(
            FrameType.DATA,
            transfer_id,
            region=region,
            offset=start,
            length_bytes=chunk.nbytes,
            payload_checksum=checksum(chunk),
        )
        send_all(sock, header, chunk)

    # The reader thread

    def _read(self, sock: socket.socket, flight: Flight) -> None:
        try:
            self._read_answers(sock, flight)
        except (ConnectionEnded, OSError):
            pass
        except WireError as error:
            log.warning("connection to %s closed: %s", self.lane.peer.name, error)
        except Exception:
            self.errors += 1
            log.exception("reader from %s failed", self.lane.peer.name)
        finally:
            shut(sock)
            self.lane.end_flight(flight)

    def _read_answers(self, sock: socket.socket, flight: Flight) -> None:
        buffer = bytearray(_READ_BYTES)
        view = memoryview(buffer)
        filled = 0
        while True:
            count = sock.recv_into(view[filled:])
            if count == 0:
                raise ConnectionEnded("connection ended")
            filled += count
            at = 0
            while filled - at >= HEADER_BYTES:
                header = unpack_header(view[at : at + HEADER_BYTES])
                at += HEADER_BYTES
                if header.length_bytes:
                    payload = bytearray(header.length_bytes)
                    have = min(filled - at, header.length_bytes)
                    payload[:have] = view[at : at + have]
                    at += have
                    receive_exactly(sock, memoryview(payload)[have:])
                    self._take_answer(flight, header, payload)
                else:
                    self._take_answer(flight, header, b"")
            buffer[: filled - at] = buffer[at:filled]
            filled -= at

    def _take_answer(self, flight: Flight, header: Header, payload: bytes | bytearray) -> None:
        if header.kind is FrameType.ACK:
            self.lane.acked(flight, header)
        elif header.kind is FrameType.NACK:
            self.lane.nacked(flight, header)
        elif header.kind is FrameType.ACCEPT:
            self.lane.accepted(flight, header)
        elif header.kind in (FrameType.REFUSE, FrameType.ABORT):
            self.lane.refused(flight, header, parse_control(header, payload))
        else:
            raise WireError(f"a consumer may not send {header.kind.name}")
