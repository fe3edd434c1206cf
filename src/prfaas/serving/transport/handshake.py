"""The handshake: mutual proof of the shared key, then agreement on version and KV layout.

Four steps: HELLO (client's name, role, nonce, fingerprint) → CHALLENGE (the server's, and its proof) →
AUTH (client's proof) → WELCOME or REJECT. Both proofs cover everything sent before, so nothing of it can be
changed or replayed, and each names its own side, so neither can be reflected.

An encrypted connection does all of it inside mutual TLS 1.3, which also binds the names to certificates. A fifth step,
KEYS, hands over the secret that all later frames of this connection are sealed with; TLS ends with it.
"""

import asyncio
import hmac
import json
import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from prfaas.serving.transport.fingerprint import Fingerprint, fingerprint_difference
from prfaas.serving.transport.region_layout import PeerLayouts, note_layout, reported_layout
from prfaas.serving.transport.sealing import SECRET_BYTES, Sealing, read_frame
from prfaas.serving.transport.sentences import legible
from prfaas.serving.transport.sockets import (
    ByteStream,
    ConnectionEnded,
    HandshakeError,
    drain,
    limit,
    receive_control,
)
from prfaas.serving.transport.tls_identity import TlsIdentity, names_instance, names_of
from prfaas.serving.transport.tls_stream import (
    HANDSHAKE_RECORD,
    AsyncTlsStream,
    NotTlsError,
    TlsStream,
    receive_record,
    tls_trouble,
)
from prfaas.serving.transport.wire import (
    PROTOCOL_VERSION,
    FrameType,
    Header,
    VersionError,
    WireError,
    pack_control,
    text_field,
)

ROLE_PRODUCER = "producer"
ROLE_OBSERVER = "observer"
NONCE_BYTES = 16
MAX_HANDSHAKE_BYTES = 8 << 10
"""Most bytes of a payload that is read of an unauthenticated peer."""

# Of version 4, before a CHALLENGE named them.
FRAMES_BEFORE_TOLD = frozenset(range(FrameType.COPIED + 1))
# A name in a deployment file, and the rank of a tensor-parallel engine.
_PEER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(/[0-9]{1,4})?")
_SESSION = re.compile(r"[A-Za-z0-9]{1,64}")
_NONCE = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")
_SECRET = re.compile(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}")


def is_peer_name(name: str) -> bool:
    """True if an engine, a gateway or a tool of a deployment may have this name."""
    return _PEER_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The authenticated other end of a connection."""

    name: str
    role: str
    """`ROLE_PRODUCER` or `ROLE_OBSERVER`."""
    session: str
    """New with each start of the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHello:
    """A client's side of the handshake: its HELLO, and the proofs that follow from it."""

    key: bytes
    name: str
    server_name: str
    """The name that the server must prove to have."""
    role: str
    session: str
    """New with each start of the client."""
    nonce: str = field(default_factory=partial(secrets.token_hex, NONCE_BYTES))
    """16 random bytes as hex."""
    fingerprint: Fingerprint
    """Compared with the server's."""
    layouts: PeerLayouts[Any] | None = None
    """Exchange of both sides' KV layouts; None: this side keeps to the fingerprint."""

    def body(self) -> dict[str, Any]:
        """The fields of the HELLO frame."""
        return {
            "version": PROTOCOL_VERSION,
            "name": self.name,
            "server": self.server_name,
            "role": self.role,
            "session": self.session,
            "nonce": self.nonce,
            "fingerprint": dict(self.fingerprint),
            "layout": reported_layout(self.layouts),
        }

    def frame(self) -> bytes:
        """The HELLO frame."""
        return pack_control(FrameType.HELLO, body=self.body())

    def answer(self, header: Header, body: Mapping[str, Any]) -> bytes:
        """Check the server's CHALLENGE.

        Returns:
            The AUTH frame.

        Raises:
            HandshakeError: the server is another one, has another key, or rejected the connection.
        """
        _raise_if_rejected(header, body, self.server_name)
        if header.kind is not FrameType.CHALLENGE:
            raise HandshakeError(f"{self.server_name} answered HELLO with {header.kind.name}")
        name = text_field(body, "name")
        if name != self.server_name:
            raise HandshakeError(
                f"expected {self.server_name} at this address and found {legible(name, 100)}"
            )
        said = (self.body(), {field: value for field, value in body.items() if field != "proof"})
        if not _proved(self.key, "server", *said, text_field(body, "proof")):
            raise HandshakeError(f"{self.server_name} does not have this deployment's key")
        return pack_control(FrameType.AUTH, body={"proof": _proof(self.key, "client", *said).hex()})

    def finish(self, header: Header, body: Mapping[str, Any]) -> str:
        """Check that the last answer is WELCOME.

        Returns:
            The server's session, which is new with each of its starts.

        Raises:
            HandshakeError: the server rejected the connection.
        """
        _raise_if_rejected(header, body, self.server_name)
        if header.kind is not FrameType.WELCOME:
            raise HandshakeError(f"{self.server_name} answered AUTH with {header.kind.name}")
        return text_field(body, "session", 64)

    def check_certificate(self, certificate: Mapping[str, Any]) -> None:
        """Check that the server's certificate is its own.

        Raises:
            HandshakeError: it is another one's.
        """
        if not names_instance(certificate, self.server_name):
            raise HandshakeError(
                f"the certificate at this address does not belong to {self.server_name}: "
                f"its names are {legible(names_of(certificate), 100)}"
            )

    def keys(self, header: Header, body: Mapping[str, Any]) -> Sealing:
        """The keys of an encrypted connection, from what comes after WELCOME.

        Raises:
            WireError: it is not KEYS.
        """
        secret = text_field(body, "secret", 2 * SECRET_BYTES)
        if header.kind is not FrameType.KEYS or not _SECRET.fullmatch(secret):
            raise WireError(
                f"{self.server_name} followed WELCOME with {header.kind.name} instead of a secret"
            )
        return Sealing.of_client(bytes.fromhex(secret))


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
        _introduce(sock, hello, deadline_s)
        return None
    try:
        stream = TlsStream(sock, tls.client_context(), server_side=False, deadline_s=deadline_s)
        hello.check_certificate(stream.certificate())
        _introduce(stream, hello, deadline_s)
        return hello.keys(*receive_control(stream, deadline_s, MAX_HANDSHAKE_BYTES))
    except (ssl.SSLError, NotTlsError) as error:
        raise tls_trouble(error, hello.server_name) from None


def frames_of(challenge: Mapping[str, Any]) -> frozenset[int]:
    """Types of the frames that the sender of a CHALLENGE understands; older releases don't say."""
    told = challenge.get("frames")
    if told is None:
        return FRAMES_BEFORE_TOLD
    return (
        frozenset(each for each in told if isinstance(each, int)) if isinstance(told, list) else frozenset()
    )


def _introduce(stream: ByteStream, hello: ClientHello, deadline_s: float | None) -> None:
    stream.sendall(hello.frame())
    header, challenge = receive_control(stream, deadline_s, MAX_HANDSHAKE_BYTES)
    stream.sendall(hello.answer(header, challenge))
    hello.finish(*receive_control(stream, deadline_s, MAX_HANDSHAKE_BYTES))
    if hello.role == ROLE_PRODUCER:
        both = (hello.fingerprint, challenge.get("fingerprint"), hello.name, hello.server_name)
        if difference := fingerprint_difference(*both):
            raise HandshakeError(difference)
    if trouble := note_layout(hello.layouts, hello.server_name, challenge.get("layout"), sends=True):
        raise HandshakeError(trouble)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a client knows of the server that has taken it."""

    session: str
    """New with each of its starts."""
    frames: frozenset[int]
    """Types of the frames that it understands."""
    sealing: Sealing | None
    """The keys that seal all further frames; None on a plain connection."""


async def greet_async(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: ClientHello, tls: TlsIdentity | None
) -> Welcome:
    """Client side on asyncio streams, without a deadline. `tls`: encrypt the connection; None: it is plain.

    Raises:
        HandshakeError: one side has refused the other.
        WireError: the server does not speak this protocol.
        OSError: the connection is broken.
        asyncio.IncompleteReadError: the server has ended it.
    """
    if tls is None:
        writer.write(hello.frame())
        header, challenge = await read_frame(reader)
        writer.write(hello.answer(header, challenge))
        session = hello.finish(*await read_frame(reader))
        return Welcome(session, frames_of(challenge), None)
    try:
        stream = await AsyncTlsStream.open(reader, writer, tls.client_context())
        hello.check_certificate(stream.certificate())
        stream.write(hello.frame())
        header, challenge = await read_frame(stream)
        stream.write(hello.answer(header, challenge))
        session = hello.finish(*await read_frame(stream))
        return Welcome(session, frames_of(challenge), hello.keys(*await read_frame(stream)))
    except (ssl.SSLError, NotTlsError) as error:
        raise tls_trouble(error, hello.server_name) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHandshake:
    """A server's side of the handshake."""

    key: bytes
    """Of the deployment, 32 bytes."""
    name: str
    session: str = field(default_factory=partial(secrets.token_hex, 8))
    """New with each start, so that clients can distinguish a lost connection from a restarted server."""
    fingerprint: Fingerprint
    """What must be equal at both sides."""
    layouts: PeerLayouts[Any] | None = None
    """Exchange of both sides' KV layouts; None: producers keep KV as this side does."""
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
        encrypted = first[0] == HANDSHAKE_RECORD
        if encrypted and self.tls is None:
            receive_record(sock, deadline_s)
            _reject(sock, f"{self.name} takes no encrypted connections")
        certificate: Mapping[str, Any] | None = None
        stream: ByteStream = sock
        try:
            if encrypted and self.tls is not None:
                context = self.tls.server_context()
                stream = opened = TlsStream(sock, context, server_side=True, deadline_s=deadline_s)
                certificate = opened.certificate()
            identity = self._examine(stream, producers, deadline_s, certificate)
        except (ssl.SSLError, NotTlsError) as error:
            drain(sock, deadline_s)
            raise tls_trouble(error, "the client") from None
        if not encrypted and self.tls is not None and identity.name.partition("/")[0] not in plain_peers:
            sentence = f"{self.name} takes only encrypted connections from {identity.name}"
            _reject(sock, sentence, identity.name)
        admit(identity)
        stream.sendall(pack_control(FrameType.WELCOME, body={"name": self.name, "session": self.session}))
        if not encrypted:
            return identity, None
        secret = secrets.token_bytes(SECRET_BYTES)
        stream.sendall(pack_control(FrameType.KEYS, body={"secret": secret.hex()}))
        return identity, Sealing.of_server(secret)

    def _examine(
        self,
        stream: ByteStream,
        producers: Collection[str] | None,
        deadline_s: float,
        certificate: Mapping[str, Any] | None,
    ) -> PeerIdentity:
        """HELLO, CHALLENGE and AUTH, which authenticate the client or reject it. `certificate`: None without TLS."""
        header, body = _first_frame(stream, deadline_s)
        if header.kind is not FrameType.HELLO:
            raise HandshakeError(f"a client began with {header.kind.name} instead of HELLO")
        if body.get("version") != PROTOCOL_VERSION:
            said = legible(repr(body.get("version")), 40)
            _reject(stream, f"{self.name} speaks protocol version {PROTOCOL_VERSION}, the peer {said}")
        client, role = text_field(body, "name", 255), text_field(body, "role", 16)
        client_session, server = text_field(body, "session", 64), text_field(body, "server", 255)
        if not is_peer_name(client):
            _reject(stream, f"{legible(repr(client), 80)} is no name of an engine, a gateway or a tool")
        if not _SESSION.fullmatch(client_session) or not _NONCE.fullmatch(text_field(body, "nonce")):
            _reject(
                stream,
                f"session and nonce of {client} must be letters and digits, the nonce {2 * NONCE_BYTES} of hex",
            )
        if server != self.name:
            _reject(stream, f"this is {self.name}, not {legible(server, 80)}")
        nonce = secrets.token_hex(NONCE_BYTES)
        answer = {
            "name": self.name,
            "nonce": nonce,
            "fingerprint": dict(self.fingerprint),
            "layout": reported_layout(self.layouts),
            "frames": sorted(FrameType),
        }
        exchanged = (body, answer)
        challenge = answer | {"proof": _proof(self.key, "server", *exchanged).hex()}
        stream.sendall(pack_control(FrameType.CHALLENGE, body=challenge))
        header, auth = receive_control(stream, deadline_s, MAX_HANDSHAKE_BYTES)
        if header.kind is not FrameType.AUTH or not _proved(
            self.key, "client", *exchanged, text_field(auth, "proof")
        ):
            _reject(stream, f"{client} does not have this deployment's key")
        limit(stream, deadline_s)
        if certificate is not None and not names_instance(certificate, client):
            _reject(
                stream, f"{client} has shown the certificate of {legible(names_of(certificate), 100)}", client
            )
        if role not in (ROLE_PRODUCER, ROLE_OBSERVER):
            said = legible(repr(role))
            _reject(stream, f"role {said} is neither {ROLE_PRODUCER!r} nor {ROLE_OBSERVER!r}", client)
        if role == ROLE_PRODUCER:
            if producers is not None and client not in producers:
                _reject(
                    stream, f"{self.name} takes no KV from {client}: it is not among its producers", client
                )
            difference = fingerprint_difference(self.fingerprint, body.get("fingerprint"), self.name, client)
            difference = difference or note_layout(self.layouts, client, body.get("layout"), sends=False)
            if difference is not None:
                _reject(stream, difference, client)
        return PeerIdentity(client, role, client_session)


def _first_frame(stream: ByteStream, deadline_s: float) -> tuple[Header, dict[str, Any]]:
    try:
        return receive_control(stream, deadline_s, MAX_HANDSHAKE_BYTES)
    except WireError as error:
        # Another version's client learns at least why; its header layout up to the type is the same.
        damaged = not isinstance(error, VersionError)
        stream.sendall(pack_control(FrameType.REJECT, body={"reason": str(error), "again": damaged}))
        raise HandshakeError(str(error)) from None


def _reject(stream: ByteStream, reason: str, peer: str = "") -> NoReturn:
    stream.sendall(pack_control(FrameType.REJECT, body={"reason": reason}))
    raise HandshakeError(reason, peer=peer)


def _raise_if_rejected(header: Header, body: Mapping[str, Any], server_name: str) -> None:
    if header.kind is FrameType.REJECT:
        reason = legible(text_field(body, "reason"))
        if body.get("again") is True:
            # What came there was damaged: it says nothing of who was meant to send it.
            raise WireError(f"{server_name} could not read the HELLO: {reason}")
        raise HandshakeError(f"{server_name} rejected the connection: {reason}")


def _proof(key: bytes, side: str, hello: Mapping[str, Any], challenge: Mapping[str, Any]) -> bytes:
    # Canonical JSON of all of HELLO and CHALLENGE: names, role, version, fingerprints, layouts and nonces are covered.
    said = [side, dict(challenge), dict(hello)]
    sent = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hmac.digest(key, b"prfaas handshake\x00" + sent.encode(), "sha256")


def _proved(
    key: bytes, side: str, hello: Mapping[str, Any], challenge: Mapping[str, Any], proof: str
) -> bool:
    ours = _proof(key, side, hello, challenge).hex().encode()
    return hmac.compare_digest(ours, proof.encode(errors="replace"))
