"""Frames of an encrypted connection: AES-128-GCM with a key for each direction. See docs/reference/wire-format.md.

A sealed frame is the header, encrypted and with a tag, then the payload, encrypted and with a tag of its own: so
a header is proved before anything is done on its word. The nonce is a counter, and both sides count: what was
altered, left out, repeated, moved or sent back to its maker does not open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from prfaas.serving.transport.protocol.wire import (
    HEADER_BYTES,
    WireError,
)

SECRET_BYTES = 32
TAG_BYTES = 16
SEALED_HEADER_BYTES = HEADER_BYTES + TAG_BYTES

_KEY_BYTES = 16
# Header and payload each take a nonce. At 4 MiB a frame, a key meets 2^34 blocks at most, which leaves an attacker who
# distinguishes ciphertext from noise an advantage of 2^-60 (q^2 / 2^128).
_NONCES_PER_KEY = 1 << 17


class ForgedFrameError(WireError):
    """A frame does not open."""

    def __init__(self) -> None:
        super().__init__("a frame was altered, left out, repeated or made by somebody else")


class _KeyChain:
    """The cipher of one direction and the next nonce; after enough nonces the next key follows from the last."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._next_key()

    def advance(self) -> tuple[AESGCM, bytes]:
        """The cipher, and a nonce that was never used with it."""
        if self._count == _NONCES_PER_KEY:
            self._next_key()
        self._count += 1
        return self._cipher, self._count.to_bytes(12, "big")

    def _next_key(self) -> None:
        self._cipher = AESGCM(_expand(self._secret, b"prfaas frame key", _KEY_BYTES))
        # The old secret is dropped: later access to this process's memory cannot open earlier frames.
        self._secret = _expand(self._secret, b"prfaas next secret", SECRET_BYTES)
        self._count = 0


class Scratch:
    """Memory that is used again, and grows."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def of(self, nbytes: int) -> memoryview:
        """`nbytes` of it, until the next call."""
        if len(self._bytes) < nbytes:
            self._bytes = bytearray(nbytes)
        return memoryview(self._bytes)[:nbytes]


class FrameSealer:
    """Seals frames in the order in which they are sent; for one thread at a time."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: of this direction, 32 bytes that are used for nothing else."""
        self._keys = _KeyChain(secret)
        self._plain = Scratch()
        self._sealed = Scratch()

    def seal(self, frame: bytes | memoryview) -> bytes:
        """A whole frame with a short payload or none."""
        header, payload = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
        sealed = self._seal_header(header)
        if not payload:
            return sealed
        cipher, nonce = self._keys.advance()
        return sealed + cipher.encrypt(nonce, payload, header)

    def seal_pieces(self, header: bytes, pieces: Sequence[memoryview]) -> list[memoryview]:
        """A frame with a long payload, in memory that the next call uses again.

        Args:
            header: 56 bytes.
            pieces: the payload, as it is scattered in memory; not empty. One piece costs no copy.
        """
        payload = pieces[0] if len(pieces) == 1 else self._gathered(pieces)
        sealed_header = self._seal_header(header)
        sealed = self._sealed.of(payload.nbytes + TAG_BYTES)
        cipher, nonce = self._keys.advance()
        cipher.encrypt_into(nonce, payload, header, sealed)
        return [memoryview(sealed_header), sealed]

    def _seal_header(self, header: bytes | memoryview) -> bytes:
        cipher, nonce = self._keys.advance()
        return cipher.encrypt(nonce, header, None)

    def _gathered(self, pieces: Sequence[memoryview]) -> memoryview:
        plain = self._plain.of(sum(piece.nbytes for piece in pieces))
        at = 0
        for piece in pieces:
            plain[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return plain


class FrameOpener:
    """Opens frames in the order in which they come; for one thread at a time."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: of this direction, the one that the peer seals with."""
        self._keys = _KeyChain(secret)
        self._header = b""
        self._plain = Scratch()

    def open_header(self, sealed: bytes | bytearray | memoryview) -> bytes:
        """The 56 bytes of a header, from 72 sealed ones.

        Raises:
            ForgedFrameError: they are not what the peer sent next.
        """
        cipher, nonce = self._keys.advance()
        try:
            self._header = cipher.decrypt(nonce, sealed, None)
        except InvalidTag:
            raise ForgedFrameError() from None
        return self._header

    def open_payload(self, sealed: bytes | bytearray | memoryview) -> bytes:
        """The payload that belongs to the header which was opened last.

        Raises:
            ForgedFrameError: it is not what the peer sent with that header.
        """
        cipher, nonce = self._keys.advance()
        try:
            return cipher.decrypt(nonce, sealed, self._header)
        except InvalidTag:
            raise ForgedFrameError() from None

    def open_into(self, sealed: memoryview, pieces: Sequence[memoryview]) -> None:
        """A long payload, straight to where it belongs.

        Args:
            sealed: the payload as it came, its tag behind it.
            pieces: memory for the payload, in order. One piece costs no copy. None: the payload is of no use.

        Raises:
            ForgedFrameError: it is not what the peer sent with the header; the pieces hold nothing of use then.
        """
        plain = pieces[0] if len(pieces) == 1 else self._plain.of(sealed.nbytes - TAG_BYTES)
        cipher, nonce = self._keys.advance()
        try:
            cipher.decrypt_into(nonce, sealed, self._header, plain)
        except InvalidTag:
            raise ForgedFrameError() from None
        if len(pieces) != 1:
            at = 0
            for piece in pieces:
                piece[:] = plain[at : at + piece.nbytes]
                at += piece.nbytes


@dataclass(frozen=True, slots=True)
class Sealing:
    """Both directions of one encrypted connection, as one of its ends uses them."""

    sealer: FrameSealer
    opener: FrameOpener

    @classmethod
    def of_client(cls, secret: bytes) -> Self:
        """For the side that connected; `secret`: 32 bytes that only the two ends know, and only for this connection."""
        to_server, to_client = _directions(secret)
        return cls(FrameSealer(to_server), FrameOpener(to_client))

    @classmethod
    def of_server(cls, secret: bytes) -> Self:
        """For the side that accepted; `secret` as `of_client` has it."""
        to_server, to_client = _directions(secret)
        return cls(FrameSealer(to_client), FrameOpener(to_server))


def _directions(secret: bytes) -> tuple[bytes, bytes]:
    return _expand(secret, b"prfaas to server", SECRET_BYTES), _expand(
        secret, b"prfaas to client", SECRET_BYTES
    )


def _expand(secret: bytes, purpose: bytes, nbytes: int) -> bytes:
    # HKDF-Expand of RFC 5869; the secrets are uniform already, so there is nothing to extract.
    return HKDFExpand(algorithm=SHA256(), length=nbytes, info=purpose).derive(secret)
