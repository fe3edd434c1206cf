"""The TLS 1.3 part of a connection's handshake, on a socket that goes on without TLS afterwards.

TLS is kept in memory and fed record by record, so that no byte behind the last record is taken off the socket.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from prfaas.serving.transport.io.sockets import receive_exactly
from prfaas.serving.transport.protocol.handshake import HandshakeError
from prfaas.serving.transport.protocol.wire import MAGIC, WireError

# The type of the first record of every TLS connection; frames in the clear begin with another byte.
HANDSHAKE_RECORD = 0x16

_RECORD_HEADER_BYTES = 5
_RECORD_TYPES = range(20, 24)
# RFC 8446, 5.2.
_MAX_RECORD_BYTES = (1 << 14) + 256
_READ_BYTES = 1 << 14


class NotTlsError(WireError):
    """The peer has answered with a frame in the clear."""


def record_bytes(header: bytes | bytearray) -> int:
    """How many bytes follow the five of a record's header.

    Raises:
        NotTlsError: it is the beginning of a frame.
        WireError: it is damaged.
    """
    if header.startswith(MAGIC):
        raise NotTlsError("the peer does not speak TLS")
    nbytes = int.from_bytes(header[3:5], "big")
    if header[0] not in _RECORD_TYPES or header[1] != 3 or nbytes > _MAX_RECORD_BYTES:
        raise WireError("a TLS record is damaged")
    return nbytes


def receive_record(sock: socket.socket, deadline_s: float | None) -> bytes:
    """One record, header included; raises as `receive_exactly` and `record_bytes` do."""
    record = bytearray(_RECORD_HEADER_BYTES)
    receive_exactly(sock, memoryview(record), deadline_s)
    body = bytearray(record_bytes(record))
    receive_exactly(sock, memoryview(body), deadline_s)
    return bytes(record + body)


def tls_trouble(error: ssl.SSLError | NotTlsError, peer: str) -> HandshakeError | WireError:
    """The exception for an error of TLS: certificates stay refused, damaged records may be whole next time."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return HandshakeError(f"the certificate of {peer} is not accepted: {error.verify_message}")
    if isinstance(error, NotTlsError):
        return HandshakeError(f"{peer} does not encrypt: it has answered without TLS")
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "did not return a certificate" in reason:
        return HandshakeError(f"{peer} has shown no certificate")
    if "alert" in reason and ("certificate" in reason or "unknown ca" in reason):
        return HandshakeError(f"{peer} does not accept this side's certificate: {reason}")
    return WireError(f"TLS with {peer} failed: {reason}")


class TlsState:
    """TLS without a socket: records in, records out."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._opened = bytearray()

    def shake_hands(self) -> bool:
        """Go on with the handshake. False: the peer's next record is needed.

        Raises:
            ssl.SSLError: one of the two will not have the other's certificate, or the records make no sense.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def certificate(self) -> Mapping[str, Any]:
        """The peer's, verified."""
        return self._tls.getpeercert() or {}

    def write(self, data: bytes) -> None:
        """Encrypt; `outgoing` has the records."""
        self._tls.write(data)

    def outgoing(self) -> bytes:
        """Records to be sent now."""
        return self._outgoing.read()

    def feed(self, record: bytes | bytearray) -> None:
        """A whole record that came, its header included."""
        self._incoming.write(record)

    def read(self, nbytes: int) -> bytes:
        """Read decrypted bytes; empty while more records are needed.

        Raises:
            ConnectionError: the peer has ended TLS.
            ssl.SSLError: see `shake_hands`.
        """
        try:
            while len(self._opened) < nbytes:
                data = self._tls.read(_READ_BYTES)
                if not data:
                    raise ConnectionError("the peer has ended TLS")
                self._opened += data
        except ssl.SSLWantReadError:
            return b""
        data = bytes(self._opened[:nbytes])
        del self._opened[:nbytes]
        return data


class TlsStream:
    """TLS on a blocking socket, as a `ByteStream`."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, deadline_s: float | None
    ) -> None:
        """Shakes hands.

        Raises:
            ssl.SSLError: one of the two will not have the other's certificate, or the records make no sense.
            WireError: the peer does not speak TLS.
            OSError: the connection is broken, or the deadline (by `time.monotonic`) has passed.
        """
        self._sock = sock
        self._deadline_s = deadline_s
        self._state = TlsState(context, server_side=server_side)
        try:
            while not self._state.shake_hands():
                self._flush()
                self._state.feed(receive_record(self._sock, self._deadline_s))
        except ssl.SSLError:
            # The last record has the reason for the peer.
            with contextlib.suppress(OSError):
                self._flush()
            raise
        self._flush()

    def certificate(self) -> Mapping[str, Any]:
        """The peer's, verified."""
        return self._state.certificate()

    def sendall(self, data: bytes) -> None:
        """Send as `socket.sendall`."""
        self._state.write(data)
        self._flush()

    def recv_into(self, view: memoryview, *_: int) -> int:
        """Fills `view`, which is not empty; a socket's other arguments change nothing."""
        while not (data := self._state.read(view.nbytes)):
            self._state.feed(receive_record(self._sock, self._deadline_s))
        view[:] = data
        return view.nbytes

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout as `socket.settimeout`."""
        self._sock.settimeout(seconds)

    def _flush(self) -> None:
        records = self._state.outgoing()
        if records:
            self._sock.sendall(records)


class AsyncTlsStream:
    """The same on the streams of asyncio; `open` shakes hands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state: TlsState) -> None:
        self._reader = reader
        self._writer = writer
        self._state = state

    @classmethod
    async def open(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> "AsyncTlsStream":
        """The client's side.

        Raises:
            ssl.SSLError: one of the two will not have the other's certificate, or the records make no sense.
            WireError: the peer does not speak TLS.
            OSError: the connection is broken.
        """
        stream = cls(reader, writer, TlsState(context, server_side=False))
        try:
            while not stream._state.shake_hands():
                stream._flush()
                await stream._receive_record()
        finally:
            # After a failed handshake, the last record has the reason for the peer.
            stream._flush()
        return stream

    def certificate(self) -> Mapping[str, Any]:
        """The peer's, verified."""
        return self._state.certificate()

    def write(self, data: bytes) -> None:
        """Write as `asyncio.StreamWriter.write`."""
        self._state.write(data)
        self._flush()

    async def readexactly(self, nbytes: int) -> bytes:
        """Read as `asyncio.StreamReader.readexactly`."""
        if nbytes == 0:
            return b""
        while not (data := self._state.read(nbytes)):
            await self._receive_record()
        return data

    def _flush(self) -> None:
        self._writer.write(self._state.outgoing())

    async def _receive_record(self) -> None:
        header = await self._reader.readexactly(_RECORD_HEADER_BYTES)
        self._state.feed(header + await self._reader.readexactly(record_bytes(header)))
