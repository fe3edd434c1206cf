"""The handshake on sockets: blocking for engines, asyncio for observers; inside TLS 1.3 on encrypted connections.

It is one conversation for both kinds of sockets: a generator that yields what to send and how many bytes it needs
next, and gets just these. TLS is kept in memory and fed record by record, so no byte behind the last record is taken
off the socket, which goes on without TLS.
"""

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from prfaas.serving.transport.io.sockets import ConnectionEnded, drain, limit, receive_exactly
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    ClientHello,
    Frame,
    HandshakeError,
    PeerIdentity,
    ServerHello,
    Welcome,
    rejected,
)
from prfaas.serving.transport.protocol.sealing import SECRET_BYTES, Sealing
from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    MAGIC,
    FrameType,
    WireError,
    pack_control,
    parse_control,
    unpack_header,
)

# The type of the first record of every TLS connection; frames in the clear begin with another byte.
_HANDSHAKE_RECORD = 0x16
_RECORD_HEADER_BYTES = 5
_RECORD_TYPES = range(20, 24)
# RFC 8446, 5.2.
_MAX_RECORD_BYTES = (1 << 14) + 256
_READ_BYTES = 1 << 14

_T = TypeVar("_T")
_Talk: TypeAlias = Generator[tuple[bytes, int], bytes | bytearray, _T]
"""Yields what to send and the number of bytes to receive then, of which there may be none."""


class NotTlsError(WireError):
    """The peer has answered with a frame in the clear."""


def _frames(side: Generator[bytes, Frame, _T]) -> _Talk[_T]:
    """Carry the frames of one side of the handshake."""
    try:
        out = next(side)
        while True:
            try:
                header = unpack_header((yield out, HEADER_BYTES))
                if header.length_bytes > MAX_HANDSHAKE_BYTES:
                    raise WireError(
                        f"{header.kind.name} frame of {header.length_bytes} bytes has no place here"
                    )
                came = header, parse_control(header, (yield b"", header.length_bytes))
            except WireError as error:
                side.throw(error)
                raise
            out = side.send(came)
    except StopIteration as end:
        result: _T = end.value
        return result


class TlsState:
    """TLS without a socket, for the conversations of one connection."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._opened = b""

    def shake_hands(self) -> _Talk[Mapping[str, Any]]:
        """The handshake of TLS; returns the peer's certificate, verified.

        Raises:
            ssl.SSLError: one of the two will not have the other's certificate, or the records make no sense.
            WireError: the peer does not speak TLS.
        """
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    yield from self._take_record()
        except ssl.SSLError:
            # The last record has the reason for the peer.
            with contextlib.suppress(OSError):
                yield self._outgoing.read(), 0
            raise
        yield self._outgoing.read(), 0
        return self._tls.getpeercert() or {}

    def encrypted(self, data: bytes) -> bytes:
        """Records that hold `data`."""
        self._tls.write(data)
        return self._outgoing.read()

    def inside(self, talk: _Talk[_T]) -> _Talk[_T]:
        """Carry another conversation, encrypted; raises as `shake_hands`, or ConnectionError if the peer ends TLS."""
        try:
            out, wanted_bytes = next(talk)
            while True:
                if out:
                    self._tls.write(out)
                while len(self._opened) < wanted_bytes:
                    yield from self._take_record()
                    self._open()
                data, self._opened = self._opened[:wanted_bytes], self._opened[wanted_bytes:]
                out, wanted_bytes = talk.send(data)
        except StopIteration as end:
            result: _T = end.value
            return result

    def _take_record(self) -> _Talk[None]:
        """Send what is to be sent, and take the peer's next record."""
        self._incoming.write((yield from one_record(self._outgoing.read())))

    def _open(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            while data := self._tls.read(_READ_BYTES):
                self._opened += data
            raise ConnectionError("the peer has ended TLS")


def one_record(out: bytes = b"") -> _Talk[bytes]:
    """Send `out`, then receive a record of TLS, header included.

    Raises:
        NotTlsError: it is the beginning of a frame.
        WireError: it is damaged.
    """
    header = yield out, _RECORD_HEADER_BYTES
    if header.startswith(MAGIC):
        raise NotTlsError("the peer does not speak TLS")
    nbytes = int.from_bytes(header[3:5], "big")
    if header[0] not in _RECORD_TYPES or header[1] != 3 or nbytes > _MAX_RECORD_BYTES:
        raise WireError("a TLS record is damaged")
    return bytes(header + (yield b"", nbytes))


def _tls_trouble(error: ssl.SSLError | NotTlsError, peer: str) -> HandshakeError | WireError:
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


def converse(sock: socket.socket, talk: _Talk[_T], deadline_s: float | None) -> _T:
    """Lead a conversation on a blocking socket.

    Raises:
        OSError: the connection is broken, or the deadline (by `time.monotonic`) has passed.
    """
    try:
        out, wanted_bytes = next(talk)
        while True:
            data = bytearray(wanted_bytes)
            try:
                if out:
                    if deadline_s is not None:
                        limit(sock, deadline_s)
                    sock.sendall(out)
                receive_exactly(sock, memoryview(data), deadline_s)
            except OSError as error:
                talk.throw(error)
                raise
            out, wanted_bytes = talk.send(data)
    except StopIteration as end:
        result: _T = end.value
        return result


def _client(hello: ClientHello, tls: TlsIdentity | None) -> _Talk[Welcome]:
    frames = _frames(hello.converse(encrypted=tls is not None))
    if tls is None:
        return (yield from frames)
    state = TlsState(tls.client_context(), server_side=False)
    try:
        hello.check_certificate((yield from state.shake_hands()))
        return (yield from state.inside(frames))
    except (ssl.SSLError, NotTlsError) as error:
        raise _tls_trouble(error, hello.server_name) from None


def greet(
    sock: socket.socket,
    hello: ClientHello,
    deadline_s: float | None = None,
    tls: TlsIdentity | None = None,
) -> Sealing | None:
    """Client side on a blocking socket.

    Args:
        sock: a connection to the server; give it a timeout where there is no deadline.
        hello: who this side is.
        deadline_s: by `time.monotonic`, for the whole handshake.
        tls: the connection is to be encrypted, with this identity; None: it is to be plain.

    Returns:
        The keys that seal all further frames; None on a plain connection.

    Raises:
        HandshakeError: the server is not the expected one, or rejected the connection.
        WireError: it does not speak this protocol.
        OSError: the connection is broken.
    """
    return converse(sock, _client(hello, tls), deadline_s).sealing


async def greet_async(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: ClientHello, tls: TlsIdentity | None
) -> Welcome:
    """Client side on asyncio streams, without a deadline; else as `greet`.

    Raises:
        asyncio.IncompleteReadError: the server has ended it.
    """
    talk = _client(hello, tls)
    try:
        out, wanted_bytes = next(talk)
        while True:
            if out:
                writer.write(out)
            out, wanted_bytes = talk.send(await reader.readexactly(wanted_bytes))
    except StopIteration as end:
        welcome: Welcome = end.value
        return welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHandshake:
    """A server's side of the handshake on accepted sockets."""

    hello: ServerHello
    handshake_s: float = 5.0
    """For all of a handshake, however many bytes the client sends one by one."""
    tls: TlsIdentity | None = None
    """Encrypted connections are taken, with this identity; None: all connections are plain."""

    def welcome(
        self,
        sock: socket.socket,
        *,
        producers: Collection[str] | None,
        plain_peers: Collection[str] = (),
        admit: Callable[[PeerIdentity], None] = lambda _: None,
    ) -> tuple[PeerIdentity, Sealing | None]:
        """Shake hands on a blocking socket, which is left with a timeout.

        Args:
            sock: a connection that was just accepted.
            producers: the only names that may send; None: all that have the key.
            plain_peers: with `tls`, the only instances whose connections may be plain.
            admit: called with an authenticated client before WELCOME is sent; if it raises, nothing is sent.

        Returns:
            The client, and the keys that seal all further frames; None on a plain connection.

        Raises:
            HandshakeError: the client was refused, by a REJECT with the same reason or by a TLS alert.
            WireError: it does not speak this protocol.
            OSError: the connection is broken.
        """
        deadline_s = time.monotonic() + self.handshake_s
        limit(sock, deadline_s)
        first = sock.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionEnded("connection ended")
        state: TlsState | None = None
        certificate: Mapping[str, Any] | None = None
        try:
            if first[0] == _HANDSHAKE_RECORD:
                if self.tls is None:
                    converse(sock, one_record(), deadline_s)
                    raise rejected(f"{self.hello.name} takes no encrypted connections")
                state = TlsState(self.tls.server_context(), server_side=True)
                certificate = converse(sock, state.shake_hands(), deadline_s)
            frames = _frames(self.hello.converse(secrets.token_hex(NONCE_BYTES), producers, certificate))
            identity = converse(sock, frames if state is None else state.inside(frames), deadline_s)
            is_plain = state is None and self.tls is not None
            if is_plain and identity.name.partition("/")[0] not in plain_peers:
                sentence = f"{self.hello.name} takes only encrypted connections from {identity.name}"
                raise rejected(sentence, identity.name)
        except HandshakeError as error:
            if error.reply:
                sock.sendall(error.reply if state is None else state.encrypted(error.reply))
            raise
        except (ssl.SSLError, NotTlsError) as error:
            drain(sock, deadline_s)
            raise _tls_trouble(error, "the client") from None
        limit(sock, deadline_s)
        admit(identity)
        if state is None:
            sock.sendall(self.hello.welcome())
            return identity, None
        secret = secrets.token_bytes(SECRET_BYTES)
        keys = pack_control(FrameType.KEYS, body={"secret": secret.hex()})
        sock.sendall(state.encrypted(self.hello.welcome()) + state.encrypted(keys))
        return identity, Sealing.of_server(secret)
