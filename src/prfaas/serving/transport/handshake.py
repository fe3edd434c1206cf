"""The handshake: mutual proof of the shared key, then agreement on version and KV layout.

Four steps: HELLO (client's name, role, nonce, fingerprint) → CHALLENGE (server's name, nonce and proof) →
AUTH (client's proof) → WELCOME or REJECT. Both proofs cover everything sent before, so nothing of it can be
changed or replayed, and each names its own side, so neither can be reflected.
"""

import hmac
import json
import secrets
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.serving.transport.sockets import receive_control
from prfaas.serving.transport.wire import (
    PROTOCOL_VERSION,
    FrameType,
    Header,
    WireError,
    pack_control,
    text_field,
)

ROLE_PRODUCER = "producer"
ROLE_OBSERVER = "observer"
NONCE_BYTES = 16

Fingerprint = Mapping[str, str | int]


class HandshakeError(ConnectionError):
    """The peer is not who or what was expected; the message says why. Retrying soon won't help."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The authenticated other end of a connection."""

    name: str
    role: str
    """`ROLE_PRODUCER` or `ROLE_OBSERVER`."""
    session: str
    """New with each start of the client."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a client sends first, and the proofs that follow from it."""

    key: bytes
    name: str
    server_name: str
    """The name that the server must prove to have."""
    role: str
    session: str
    """New with each start of the client."""
    nonce: str
    """16 random bytes as hex."""
    fingerprint: Fingerprint
    """The client's KV layout."""

    @classmethod
    def new(
        cls, *, key: bytes, name: str, server_name: str, role: str, session: str, fingerprint: Fingerprint
    ) -> "ClientHello":
        """A hello with a fresh nonce."""
        nonce = secrets.token_hex(NONCE_BYTES)
        return cls(key, name, server_name, role, session, nonce, dict(fingerprint))

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
        name, nonce = text_field(body, "name"), text_field(body, "nonce", 2 * NONCE_BYTES)
        if name != self.server_name:
            raise HandshakeError(f"expected {self.server_name} at this address and found {name}")
        if not _proved(self.key, "server", self.body(), nonce, text_field(body, "proof")):
            raise HandshakeError(f"{self.server_name} does not have this deployment's key")
        return pack_control(
            FrameType.AUTH, body={"proof": _proof(self.key, "client", self.body(), nonce).hex()}
        )

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


def greet(sock: socket.socket, hello: ClientHello) -> None:
    """Client side on a blocking socket (give it a timeout).

    Raises:
        HandshakeError: the server is not the expected one, or rejected the connection.
        WireError: it does not speak this protocol.
        OSError: the connection is broken.
    """
    sock.sendall(hello.frame())
    sock.sendall(hello.answer(*receive_control(sock)))
    hello.finish(*receive_control(sock))


def welcome(
    sock: socket.socket,
    *,
    key: bytes,
    name: str,
    session: str,
    fingerprint: Fingerprint,
    producers: Collection[str] | None,
) -> PeerIdentity:
    """Server side on a blocking socket (give it a timeout).

    Args:
        sock: a connection that was just accepted.
        key: of the deployment, 32 bytes.
        name: this side's.
        session: this side's, new with each start.
        fingerprint: this side's KV layout.
        producers: the only names that may send; None: all that have the key.

    Returns:
        Who the client is.

    Raises:
        HandshakeError: the client was refused; it got a REJECT with the same reason.
        WireError: it does not speak this protocol.
        OSError: the connection is broken.
    """
    header, body = _first_frame(sock)
    if header.kind is not FrameType.HELLO:
        raise HandshakeError(f"a client began with {header.kind.name} instead of HELLO")
    if body.get("version") != PROTOCOL_VERSION:
        said = body.get("version")
        _reject(sock, f"{name} speaks protocol version {PROTOCOL_VERSION}, the peer {said!r}")
    client, role = text_field(body, "name", 255), text_field(body, "role", 16)
    client_session = text_field(body, "session", 64)
    text_field(body, "nonce", 2 * NONCE_BYTES)
    if text_field(body, "server", 255) != name:
        _reject(sock, f"this is {name}, not {body['server']}")
    nonce = secrets.token_hex(NONCE_BYTES)
    proof = _proof(key, "server", body, nonce).hex()
    sock.sendall(pack_control(FrameType.CHALLENGE, body={"name": name, "nonce": nonce, "proof": proof}))
    header, auth = receive_control(sock)
    if header.kind is not FrameType.AUTH or not _proved(
        key, "client", body, nonce, text_field(auth, "proof")
    ):
        _reject(sock, f"{client} does not have this deployment's key")
    if role not in (ROLE_PRODUCER, ROLE_OBSERVER):
        _reject(sock, f"role {role!r} is neither {ROLE_PRODUCER!r} nor {ROLE_OBSERVER!r}")
    if role == ROLE_PRODUCER:
        if producers is not None and client not in producers:
            _reject(sock, f"{name} takes no KV from {client}: it is not among its producers")
        difference = fingerprint_difference(fingerprint, body.get("fingerprint"), name, client)
        if difference is not None:
            _reject(sock, difference)
    sock.sendall(pack_control(FrameType.WELCOME, body={"name": name, "session": session}))
    return PeerIdentity(client, role, client_session)


def fingerprint_difference(ours: Fingerprint, theirs: object, name: str, peer: str) -> str | None:
    """A sentence naming the first field in which two layouts differ, or None if they are equal."""
    if not isinstance(theirs, dict):
        return f"{peer} sent no layout fingerprint"
    for field in sorted(set(ours) | {str(field) for field in theirs}):
        mine, other = ours.get(field), theirs.get(field)
        if mine != other:
            return f"KV layout differs in {field!r}: {name} has {mine!r}, {peer} has {repr(other)[:200]}"
    return None


def _first_frame(sock: socket.socket) -> tuple[Header, dict[str, Any]]:
    try:
        return receive_control(sock)
    except WireError as error:
        # Another version's client learns at least why; its header layout up to the type is the same.
        sock.sendall(pack_control(FrameType.REJECT, body={"reason": str(error)}))
        raise HandshakeError(str(error)) from None


def _reject(sock: socket.socket, reason: str) -> None:
    sock.sendall(pack_control(FrameType.REJECT, body={"reason": reason}))
    raise HandshakeError(reason)


def _raise_if_rejected(header: Header, body: Mapping[str, Any], server_name: str) -> None:
    if header.kind is FrameType.REJECT:
        raise HandshakeError(f"{server_name} rejected the connection: {text_field(body, 'reason')}")


def _proof(key: bytes, side: str, hello: Mapping[str, Any], server_nonce: str) -> bytes:
    # Canonical JSON of the whole HELLO: names, role, version, fingerprint and the client's nonce are all
    # covered.
    sent = json.dumps([side, server_nonce, dict(hello)], sort_keys=True, separators=(",", ":"))
    return hmac.digest(key, b"prfaas handshake\x00" + sent.encode(), "sha256")


def _proved(key: bytes, side: str, hello: Mapping[str, Any], server_nonce: str, proof: str) -> bool:
    return hmac.compare_digest(
        _proof(key, side, hello, server_nonce).hex().encode(), proof.encode(errors="replace")
    )
