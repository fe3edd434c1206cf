"""One connection to a peer: a writer thread that keeps it up and sends, a reader thread that takes the answers.

`_send_chunk` moves KV bytes from the engine's memory to the wire, after the engine has put them into the peer queue.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable

from prfaas.serving.transport.io.greeting import greet
from prfaas.serving.transport.io.shared_queue import SharedQueue
from prfaas.serving.transport.io.sockets import (
    ConnectionEnded,
    choose_congestion_control,
    packet_bytes,
    read_tcp_info,
    send_pieces,
    set_pacing,
    set_unsent_limit,
    shut,
    tune,
)
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.chunk_source import SourceGone
from prfaas.serving.transport.protocol.compression import ChunkCompressor, CompressionCounters
from prfaas.serving.transport.protocol.handshake import ClientHello, HandshakeError
from prfaas.serving.transport.protocol.in_flight import ControlJob, InFlightWindow
from prfaas.serving.transport.protocol.liveness import TcpInfo, heartbeat_period_s
from prfaas.serving.transport.protocol.options import SenderOptions
from prfaas.serving.transport.protocol.outgoing import Chunk, PeerAnswer
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
    WireError,
    checksum_of,
    pack_header,
    unpack_header,
)

log = logging.getLogger(__name__)

_READ_BYTES = 64 << 10
# What may wait unsent in the kernel on a paced link.
_UNSENT_S = 0.02
# The longest that one packet may take at the pace.
_PACKET_S = 0.5
# Share of resent bytes: more than a long transfer loses by filling a queue once.
_SPOILED_SHARE = 0.005
# How long an attempt to connect lasts, in times of the pause behind it.
_ATTEMPT_BACKOFFS = 4
_MIN_UNSENT_BYTES = 16 << 10
_MAX_UNSENT_BYTES = 1 << 20


class SenderConnection:
    """Connection `number` of a peer queue: reconnects with back-off for as long as the queue lives.

    1. The writer thread (`_run`) connects and greets, then asks the queue for jobs and sends them.
    2. The reader thread (`_read`) passes the peer's answers to the queue.
    3. When either fails, both end, the queue takes back what is unanswered, and the writer connects again.
    """

    def __init__(
        self,
        queue: SharedQueue,
        number: int,
        hello: Callable[[], ClientHello],
        options: SenderOptions,
        tls: TlsIdentity | None = None,
    ) -> None:
        """`tls`: every connection is encrypted, with this identity; None: all are plain."""
        self.queue = queue
        self.number = number
        self.chunk_bytes = options.chunk_bytes
        """The largest chunk to cut at the present rate."""
        self.congestion = ""
        """The congestion control in use; empty before the first connection."""
        self.errors = 0
        """Unexpected exceptions in the two threads."""
        self.forged_frames = 0
        """Forged or replayed answers; each has ended a connection."""
        self._hello = hello
        self._tls = tls
        self._sealing: Sealing | None = None
        self._options = options
        self._buffer = Scratch()
        self._compressor = ChunkCompressor(time.thread_time) if queue.peer.compressed else None
        self._pace_bits_per_s: float | None = None
        self._sock: socket.socket | None = None
        self._up = False
        self._closing = False
        self._renewal = (0, 0)  # bytes sent, and sent again, at the last look for a spoiled connection
        name = f"prfaas-send-{queue.peer.name}-{number}"
        self._reader_name = f"{name}-acks"
        self._writer = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Connect in the background."""
        self._writer.start()

    def close(self) -> None:
        """Wake the threads; call `join` after the queue was closed."""
        self._closing = True
        self.shut()

    def join(self) -> None:
        """Wait until both threads have ended."""
        if self._writer.ident is not None:
            self._writer.join()

    @property
    def alive(self) -> bool:
        return self._writer.is_alive()

    def shut(self) -> None:
        """Break the connection; a new one is made unless this closes."""
        sock = self._sock
        if sock is not None:
            shut(sock)

    def set_rate(self, bytes_per_s: int | None) -> None:
        """Pace the socket; a slow link gets small chunks, to acknowledge smoothly, and little waits unsent."""
        options = self._options
        self._pace_bits_per_s = None if bytes_per_s is None else 8.0 * bytes_per_s
        chunk = options.chunk_bytes if bytes_per_s is None else int(bytes_per_s * options.chunk_s)
        self.chunk_bytes = max(
            min(options.min_chunk_bytes, options.chunk_bytes), min(options.chunk_bytes, chunk)
        )
        unsent_bytes = None
        if bytes_per_s is not None:
            unsent_bytes = max(_MIN_UNSENT_BYTES, min(_MAX_UNSENT_BYTES, int(bytes_per_s * _UNSENT_S)))
        sock = self._sock
        if sock is None:
            return
        try:
            set_pacing(sock, bytes_per_s)
            set_unsent_limit(sock, unsent_bytes)
        except OSError:
            pass  # the connection is going down: its threads notice by themselves

    @property
    def least_bytes_per_s(self) -> float:
        """See `Paced`; 0 while the connection is down."""
        sock = self._sock
        try:
            return 0.0 if sock is None else packet_bytes(sock) / _PACKET_S
        except OSError:
            return 0.0

    @property
    def compression(self) -> CompressionCounters | None:
        """Counters of this connection's compression; None where the peer's chunks are not compressed."""
        return None if self._compressor is None else self._compressor.counters

    def tcp_info(self) -> TcpInfo | None:
        """None while the connection is down."""
        sock = self._sock
        if sock is None or not self._up:
            return None
        try:
            return read_tcp_info(sock)
        except OSError:
            return None

    def renew_if_spoiled(self) -> None:
        """Reconnect, while idle, if losses have left this connection slow.

        BBR measures anew by itself. Others keep a small window after a lossy spell, and the first transfer after it
        is several times as slow.
        """
        info, before = self.tcp_info(), self._renewal
        if info is None or self.congestion == "bbr":
            return
        self._renewal = (info.sent_bytes, info.resent_bytes)
        sent_bytes, resent_bytes = info.sent_bytes - before[0], info.resent_bytes - before[1]
        if resent_bytes > _SPOILED_SHARE * sent_bytes:
            log.info("connection %d to %s is renewed after losses", self.number, self.queue.peer.name)
            self.shut()

    # The writer thread

    def _run(self) -> None:
        options = self._options
        backoff_s = options.backoff_min_s
        while not self.queue.queue.closing:
            began_s = time.monotonic()
            try:
                trouble, answer = self._serve_one_connection(backoff_s)
            except Exception as error:
                self.errors += 1
                log.exception("connection to %s failed", self.queue.peer.name)
                trouble, answer = repr(error), PeerAnswer.NOTHING
            if trouble:
                self.queue.unreachable(trouble, answer)
            rejected = answer is PeerAnswer.REJECTED
            lived = time.monotonic() - began_s > options.backoff_max_s and not rejected
            if lived or answer is PeerAnswer.CLOSED:
                # A closed port may be that of a starting peer, which is to be found soon.
                backoff_s = min(backoff_s, options.backoff_max_s) if not lived else options.backoff_min_s
            if self.queue.wait_before_retry(backoff_s):
                backoff_s = options.backoff_min_s
            else:
                backoff_s = min(
                    2 * backoff_s, options.rejected_backoff_max_s if rejected else options.backoff_max_s
                )

    def _serve_one_connection(self, backoff_s: float) -> "tuple[str, PeerAnswer]":
        """Connect and send until the connection ends.

        Args:
            backoff_s: between this attempt and the next.

        Returns:
            Why it did not come up ("" if it did), and the peer's answer.
        """
        try:
            sock = self._connect(backoff_s)
        except HandshakeError as error:
            return str(error), PeerAnswer.REJECTED
        except ConnectionRefusedError as error:
            return str(error), PeerAnswer.CLOSED
        except (OSError, WireError) as error:
            return str(error) or repr(error), PeerAnswer.NOTHING
        window = InFlightWindow(connection=self)
        reader = threading.Thread(target=self._read, args=(sock, window), name=self._reader_name, daemon=True)
        self._up = True
        self._renewal = (0, 0)
        with self.queue as queue:
            queue.connected(window, time.monotonic())
        trouble = ""
        try:
            reader.start()
            self._write(sock, window)
            trouble = "connection lost"
        except OSError as error:
            trouble = str(error)
        except Exception as error:
            trouble = repr(error)
            self.errors += 1
            log.exception("writer to %s failed", self.queue.peer.name)
        finally:
            self._up = False
            shut(sock)
            if reader.ident is not None:
                reader.join()
            with self.queue as queue:
                queue.disconnected(window, trouble, time.monotonic())
            self._sock = None
            sock.close()
        return "", PeerAnswer.NOTHING

    def _connect(self, backoff_s: float) -> socket.socket:
        peer, options = self.queue.peer, self._options
        # A path that comes back is found soon: TCP's own next attempt may be seconds away.
        attempt_s = max(heartbeat_period_s(options.limits.silence_s), _ATTEMPT_BACKOFFS * backoff_s)
        stage = "no answer from its machine"
        family, kind, protocol, _, address = socket.getaddrinfo(
            peer.host, peer.port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, protocol)
        self._sock = sock
        try:
            if self._closing:
                raise ConnectionEnded("closing")
            tune(sock, user_timeout_s=options.limits.user_timeout_s, keepalive_s=options.limits.keepalive_s)
            deadline_s = time.monotonic() + options.connect_s
            sock.settimeout(min(attempt_s, options.connect_s))
            sock.connect(address)
            stage = "its machine answers, its engine does not"
            sock.settimeout(options.connect_s)
            self._sealing = greet(sock, self._hello(), deadline_s, self._tls)
            self.congestion = choose_congestion_control(sock, options.congestion)
            sock.settimeout(None)
        except BaseException as error:
            self._sock = None
            sock.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(stage) from None
            raise
        return sock

    def _write(self, sock: socket.socket, window: InFlightWindow) -> None:
        while (job := self.queue.next_job(window)) is not None:
            if isinstance(job, ControlJob):
                sealing = self._sealing
                sock.sendall(job.frame if sealing is None else sealing.sealer.seal(job.frame))
            else:
                self._send_chunk(sock, job)

    def _send_chunk(self, sock: socket.socket, chunk: Chunk) -> None:
        """Send a chunk of the engine's KV, which `next_job` has cut and counts as in flight."""
        # 1. The bytes: the engine's memory itself where it can be shown, else a copy.
        shown: list[memoryview] | None = None
        copied: list[memoryview] = []
        error = ""
        try:
            shown = chunk.source.views(chunk.start - chunk.base, chunk.nbytes)
            if shown is None or (
                len(shown) > 1 and (self._sealing is not None or self._compressor is not None)
            ):
                # Sealing and compression read one piece; a source copies its own scattered memory best.
                shown, copied = None, self._copied(chunk)
        except SourceGone as gone:
            error = f"source gone: {gone}"
        except Exception as failure:
            self.errors += 1
            log.exception("a chunk for %s cannot be read", self.queue.peer.name)
            error = f"source failed: {failure!r}"
        # 2. After a copy the engine's memory is free for others; a transfer that ended meanwhile sends nothing.
        if shown is None and not self.queue.read_done(chunk, error):
            return
        # 3. The bytes leave behind a header; the reader thread takes the ACK.
        try:
            plain = copied if shown is None else shown
            compressed = self._compressed(plain)
            frame = self._frame_chunk(
                chunk, plain if compressed is None else [compressed], is_compressed=compressed is not None
            )
            if shown is not None and (self._sealing is not None or compressed is not None):
                # Sealed and compressed bytes are a copy.
                shown = None
                self.queue.read_done(chunk)
            send_pieces(sock, frame)
        finally:
            if shown is not None:
                self.queue.read_done(chunk)

    def _copied(self, chunk: Chunk) -> list[memoryview]:
        payload = self._buffer.of(chunk.nbytes)
        chunk.source.read_into(chunk.start - chunk.base, payload)
        return [payload]

    def _compressed(self, pieces: list[memoryview]) -> memoryview | None:
        """The chunk's compressed bytes; None: send it uncompressed."""
        if self._compressor is None:
            return None
        bits_per_s = self._pace_bits_per_s
        if bits_per_s is None:
            info = self.tcp_info()
            bits_per_s = info.delivery_bits_per_s if info is not None else None
        compressed = self._compressor.compressed(pieces[0], bits_per_s or None)
        return None if compressed is None else memoryview(compressed)

    def _frame_chunk(
        self, chunk: Chunk, pieces: list[memoryview], *, is_compressed: bool = False
    ) -> list[memoryview]:
        """The DATA frame of a chunk; its header says where the bytes belong, and carries their checksum.

        Sealed bytes need none.
        """
        sealing = self._sealing
        checked = sealing is None and self._options.limits.checksums
        header = pack_header(
            FrameType.DATA,
            chunk.transfer.transfer_id,
            region=chunk.region,
            offset=chunk.start,
            length_bytes=sum(piece.nbytes for piece in pieces),
            payload_checksum=checksum_of(pieces) if checked else 0,
            flags=(0 if checked else UNCHECKED) | (COMPRESSED if is_compressed else 0),
        )
        if sealing is None:
            return [memoryview(header), *pieces]
        return sealing.sealer.seal_pieces(header, pieces)

    # The reader thread

    def _read(self, sock: socket.socket, window: InFlightWindow) -> None:
        try:
            self._read_answers(sock, window)
        except (ConnectionEnded, OSError):
            pass
        except WireError as error:
            self.forged_frames += isinstance(error, ForgedFrameError)
            log.warning("connection to %s closed: %s", self.queue.peer.name, error)
        except Exception:
            self.errors += 1
            log.exception("reader from %s failed", self.queue.peer.name)
        finally:
            shut(sock)
            with self.queue as queue:
                queue.close_window(window)

    def _read_answers(self, sock: socket.socket, window: InFlightWindow) -> None:
        opener = None if self._sealing is None else self._sealing.opener
        header_bytes, tag_bytes = (HEADER_BYTES, 0) if opener is None else (SEALED_HEADER_BYTES, TAG_BYTES)
        # Buffered: many answers come at once, and each is short.
        with sock.makefile("rb", _READ_BYTES) as answers:
            while len(raw := answers.read(header_bytes)) == header_bytes:
                header, payload = unpack_header(raw if opener is None else opener.open_header(raw)), b""
                if header.length_bytes:
                    payload = answers.read(header.length_bytes + tag_bytes)
                    if len(payload) < header.length_bytes + tag_bytes:
                        break
                    payload = payload if opener is None else opener.open_payload(payload)
                with self.queue as queue:
                    queue.take_frame(window, header, payload, time.monotonic())
        raise ConnectionEnded("connection ended")
