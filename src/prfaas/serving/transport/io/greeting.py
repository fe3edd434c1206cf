"""The handshake on sockets: blocking for engines, asyncio for observers; inside TLS on encrypted connections."""

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from prfaas.serving.transport.io.sockets import (
    ByteStream,
    ConnectionEnded,
    drain,
    limit,
    read_frame,
    receive_control,
)
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.serving.transport.io.tls_stream import (
    HANDSHAKE_RECORD,
    AsyncTlsStream,
    NotTlsError,
    TlsStream,
    receive_record,
    tls_trouble,
)
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
from prfaas.serving.transport.protocol.wire import FrameType, WireError, pack_control

_ResultT = TypeVar("_ResultT")


def _converse(
    stream: ByteStream, side: Generator[bytes, Frame, _ResultT], deadline_s: float | None
) -> _ResultT:
    frame = next(side)
    while True:
        if frame:
            if deadline_s is not None:
                limit(stream, deadline_s)
            stream.sendall(frame)
        try:
            came = receive_control(stream, deadline_s, MAX_HANDSHAKE_BYTES)
        except WireError as error:
            side.throw(error)
            raise
        try:
            frame = side.send(came)
        except StopIteration as end:
            result: _ResultT = end.value
            return result


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
    if tls is None:
        return _converse(sock, hello.converse(encrypted=False), deadline_s).sealing
    try:
        stream = TlsStream(sock, tls.client_context(), server_side=False, deadline_s=deadline_s)
        hello.check_certificate(stream.certificate())
        return _converse(stream, hello.converse(encrypted=True), deadline_s).sealing
    except (ssl.SSLError, NotTlsError) as error:
        raise tls_trouble(error, hello.server_name) from None


async def greet_async(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: ClientHello, tls: TlsIdentity | None
) -> Welcome:
    """Client side on asyncio streams, without a deadline; else as `greet`.

    Raises:
        asyncio.IncompleteReadError: the server has ended it.
    """
    side = hello.converse(encrypted=tls is not None)
    try:
        source: asyncio.StreamReader | AsyncTlsStream = reader
        sink: asyncio.StreamWriter | AsyncTlsStream = writer
        if tls is not None:
            source = sink = await AsyncTlsStream.open(reader, writer, tls.client_context())
            hello.check_certificate(sink.certificate())
        frame = next(side)
        while True:
            if frame:
                sink.write(frame)
            try:
                header, body = await read_frame(source)
                frame = side.send((header, dict(body)))
            except StopIteration as end:
                welcome: Welcome = end.value
                return welcome
    except (ssl.SSLError, NotTlsError) as error:
        raise tls_trouble(error, hello.server_name) from None


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
        is_tls = first[0] == HANDSHAKE_RECORD
        stream: ByteStream = sock
        certificate: Mapping[str, Any] | None = None
        try:
            if is_tls and self.tls is None:
                receive_record(sock, deadline_s)
                raise rejected(f"{self.hello.name} takes no encrypted connections")
            if is_tls and self.tls is not None:
                context = self.tls.server_context()
                stream = opened = TlsStream(sock, context, server_side=True, deadline_s=deadline_s)
                certificate = opened.certificate()
            side = self.hello.converse(secrets.token_hex(NONCE_BYTES), producers, certificate)
            identity = _converse(stream, side, deadline_s)
            if not is_tls and self.tls is not None and identity.name.partition("/")[0] not in plain_peers:
                sentence = f"{self.hello.name} takes only encrypted connections from {identity.name}"
                raise rejected(sentence, identity.name)
        except HandshakeError as error:
            if error.reply:
                stream.sendall(error.reply)
            raise
        except (ssl.SSLError, NotTlsError) as error:
            drain(sock, deadline_s)
            raise tls_trouble(error, "the client") from None
        limit(stream, deadline_s)
        admit(identity)
        stream.sendall(self.hello.welcome())
        if not is_tls:
            return identity, None
        secret = secrets.token_bytes(SECRET_BYTES)
        stream.sendall(pack_control(FrameType.KEYS, body={"secret": secret.hex()}))
        return identity, Sealing.of_server(secret)
