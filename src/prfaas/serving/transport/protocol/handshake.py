"""The handshake: mutual proof of the shared key, then agreement on version and KV layout.

Four steps: HELLO (client's name, role, nonce, fingerprint) → CHALLENGE (the server's, and its proof) →
AUTH (client's proof) → WELCOME or REJECT. Both proofs cover everything sent before, so nothing of it can be
changed or replayed, and each names its own side, so neither can be reflected.

An encrypted connection does all of it inside mutual TLS 1.3, which also binds the names to certificates. A fifth step,
KEYS, hands over the secret that all later frames of this connection are sealed with; TLS ends with it.
"""

import hmac
import json
import re
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas.serving.transport.protocol.fingerprint import Fingerprint, fingerprint_difference
from prfaas.serving.transport.protocol.sealing import SECRET_BYTES, Sealing
from prfaas.serving.transport.protocol.sentences import legible
from prfaas.serving.transport.protocol.wire import (
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


class HandshakeError(ConnectionError):
    """The peer is not who or what was expected; the message says why. Retrying soon won't help."""

    def __init__(self, sentence: str, *, peer: str = "", reply: bytes = b"") -> None:
        """
        Args:
            sentence: why.
            peer: name of the refused peer, if it has proved to have the key.
            reply: the REJECT to send it; empty: none.
        """
        super().__init__(sentence)
        self.peer = peer
        self.reply = reply


Frame = tuple[Header, dict[str, Any]]
"""A control frame, and its fields."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a client knows of the server that has taken it."""

    session: str
    """New with each of its starts."""
    frames: frozenset[int]
    """Types of the frames that it understands."""
    sealing: Sealing | None
    """The keys that seal all further frames; None on a plain connection."""


class ReportedLayout(Protocol):
    """Exchange of both sides' KV layouts."""

    reported: object
    """This side's, as JSON."""

    def note(self, peer: str, reported: object, *, sends: bool) -> str | None:
        """Note an authenticated peer's; a sentence if no KV can travel. `sends`: this side sends to the peer."""


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
    nonce: str
    """16 random bytes as hex."""
    fingerprint: Fingerprint
    """Compared with the server's."""
    layouts: ReportedLayout | None = None
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
            "layout": None if self.layouts is None else self.layouts.reported,
        }

    def frame(self) -> bytes:
        """The HELLO frame."""
        return pack_control(FrameType.HELLO, body=self.body())

    def converse(self, *, encrypted: bool) -> Generator[bytes, Frame, Welcome]:
        """Yield what to send to the server, if anything, and take what comes then.

        Raises:
            HandshakeError: the server is another one or has another key; or one side refuses the other.
            WireError: the server does not speak this protocol.
        """
        server = self.server_name
        challenge = self._answer((yield self.frame()), FrameType.CHALLENGE, "HELLO")
        if (name := text_field(challenge, "name")) != server:
            raise HandshakeError(f"expected {server} at this address and found {legible(name, 100)}")
        said = (self.body(), {field: value for field, value in challenge.items() if field != "proof"})
        if not _proved(self.key, "server", *said, text_field(challenge, "proof")):
            raise HandshakeError(f"{server} does not have this deployment's key")
        proof = _proof(self.key, "client", *said).hex()
        welcome = self._answer(
            (yield pack_control(FrameType.AUTH, body={"proof": proof})), FrameType.WELCOME, "AUTH"
        )
        session = text_field(welcome, "session", 64)
        if self.role == ROLE_PRODUCER and (
            difference := fingerprint_difference(
                self.fingerprint, challenge.get("fingerprint"), self.name, server
            )
        ):
            raise HandshakeError(difference)
        if self.layouts is not None and (
            trouble := self.layouts.note(server, challenge.get("layout"), sends=True)
        ):
            raise HandshakeError(trouble)
        if not encrypted:
            return Welcome(session, frames_of(challenge), None)
        header, keys = yield b""
        secret = text_field(keys, "secret", 2 * SECRET_BYTES)
        if header.kind is not FrameType.KEYS or not _SECRET.fullmatch(secret):
            raise WireError(f"{server} followed WELCOME with {header.kind.name} instead of a secret")
        return Welcome(session, frames_of(challenge), Sealing.of_client(bytes.fromhex(secret)))

    def _answer(self, frame: Frame, kind: FrameType, to: str) -> dict[str, Any]:
        header, body = frame
        if header.kind is FrameType.REJECT:
            reason = legible(text_field(body, "reason"))
            if body.get("again") is True:
                # What came there was damaged: it says nothing of who was meant to send it.
                raise WireError(f"{self.server_name} could not read the HELLO: {reason}")
            raise HandshakeError(f"{self.server_name} rejected the connection: {reason}")
        if header.kind is not kind:
            raise HandshakeError(f"{self.server_name} answered {to} with {header.kind.name}")
        return body

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


def frames_of(challenge: Mapping[str, Any]) -> frozenset[int]:
    """Types of the frames that the sender of a CHALLENGE understands; older releases don't say."""
    told = challenge.get("frames")
    if told is None:
        return FRAMES_BEFORE_TOLD
    return (
        frozenset(each for each in told if isinstance(each, int)) if isinstance(told, list) else frozenset()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHello:
    """A server's side of the handshake."""

    key: bytes
    """Of the deployment, 32 bytes."""
    name: str
    session: str
    """New with each start, so that clients can distinguish a lost connection from a restarted server."""
    fingerprint: Fingerprint
    """What must be equal at both sides."""
    layouts: ReportedLayout | None = None
    """None: producers keep KV as this side does."""

    def converse(
        self, nonce: str, producers: Collection[str] | None, certificate: Mapping[str, Any] | None
    ) -> Generator[bytes, Frame, PeerIdentity]:
        """Yield what to send to a client, if anything, take what comes then; in the end it is authenticated.

        Args:
            nonce: 16 random bytes as hex, of this connection alone.
            producers: the only names that may send; None: all that have the key.
            certificate: that the client has shown; None without TLS.

        Raises:
            HandshakeError: the client is refused; mostly with the REJECT to send.
            WireError: it does not speak this protocol.
        """
        try:
            header, hello = yield b""
        except WireError as error:
            # Another version's client learns at least why; its header layout up to the type is the same.
            raise rejected(str(error), again=not isinstance(error, VersionError)) from None
        client, role, session = self._read(header, hello)
        answer = {
            "name": self.name,
            "nonce": nonce,
            "fingerprint": dict(self.fingerprint),
            "layout": None if self.layouts is None else self.layouts.reported,
            "frames": sorted(FrameType),
        }
        proof = _proof(self.key, "server", hello, answer).hex()
        header, auth = yield pack_control(FrameType.CHALLENGE, body=answer | {"proof": proof})
        if header.kind is not FrameType.AUTH or not _proved(
            self.key, "client", hello, answer, text_field(auth, "proof")
        ):
            raise rejected(f"{client} does not have this deployment's key")
        if certificate is not None and not names_instance(certificate, client):
            shown = legible(names_of(certificate), 100)
            raise rejected(f"{client} has shown the certificate of {shown}", client)
        if role not in (ROLE_PRODUCER, ROLE_OBSERVER):
            sentence = f"role {legible(repr(role))} is neither {ROLE_PRODUCER!r} nor {ROLE_OBSERVER!r}"
            raise rejected(sentence, client)
        if role == ROLE_PRODUCER:
            if producers is not None and client not in producers:
                raise rejected(
                    f"{self.name} takes no KV from {client}: it is not among its producers", client
                )
            difference = fingerprint_difference(self.fingerprint, hello.get("fingerprint"), self.name, client)
            if difference is None and self.layouts is not None:
                difference = self.layouts.note(client, hello.get("layout"), sends=False)
            if difference is not None:
                raise rejected(difference, client)
        return PeerIdentity(client, role, session)

    def _read(self, header: Header, hello: Mapping[str, Any]) -> tuple[str, str, str]:
        """Name, role and session in a HELLO."""
        if header.kind is not FrameType.HELLO:
            raise HandshakeError(f"a client began with {header.kind.name} instead of HELLO")
        if hello.get("version") != PROTOCOL_VERSION:
            said = legible(repr(hello.get("version")), 40)
            raise rejected(f"{self.name} speaks protocol version {PROTOCOL_VERSION}, the peer {said}")
        client, role = text_field(hello, "name", 255), text_field(hello, "role", 16)
        session, server = text_field(hello, "session", 64), text_field(hello, "server", 255)
        if not is_peer_name(client):
            raise rejected(f"{legible(repr(client), 80)} is no name of an engine, a gateway or a tool")
        if not _SESSION.fullmatch(session) or not _NONCE.fullmatch(text_field(hello, "nonce")):
            raise rejected(
                f"session and nonce of {client} must be letters and digits, the nonce {2 * NONCE_BYTES} of hex"
            )
        if server != self.name:
            raise rejected(f"this is {self.name}, not {legible(server, 80)}")
        return client, role, session

    def welcome(self) -> bytes:
        """The WELCOME frame."""
        return pack_control(FrameType.WELCOME, body={"name": self.name, "session": self.session})


def rejected(reason: str, peer: str = "", *, again: bool | None = None) -> HandshakeError:
    """An error with the REJECT that says why. `again`: whether what came was damaged, where that is asked."""
    more = {} if again is None else {"again": again}
    reply = pack_control(FrameType.REJECT, body={"reason": reason} | more)
    return HandshakeError(reason, peer=peer, reply=reply)


def names_instance(certificate: Mapping[str, Any], peer_name: str) -> bool:
    """True if a verified certificate belongs to the instance of `peer_name`, which may be one of its ranks.

    Args:
        certificate: as `ssl.SSLObject.getpeercert` gives it.
        peer_name: of an engine, a gateway or a tool.
    """
    return peer_name.partition("/")[0].lower() in _dns_names(certificate)


def names_of(certificate: Mapping[str, Any]) -> str:
    """The names in a verified certificate, as part of a sentence."""
    return ", ".join(_dns_names(certificate)) or "nobody"


def _dns_names(certificate: Mapping[str, Any]) -> list[str]:
    return [value.lower() for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]


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
