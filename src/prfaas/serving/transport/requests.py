"""Requests to a prefix-cache pool over its KV port, and their answers: COPY of the gateway, PULL of another pool."""

import base64
import binascii
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from prfaas.serving.transport.wire import (
    MAX_COPY_BYTES,
    MAX_TRANSFER_BYTES,
    FrameType,
    WireError,
    count_field,
    pack_control,
    text_field,
)

PAGE_ID_BYTES = 17
"""A key, and the number of the KV group."""

MAX_PULLED_PAGES = 1024
"""Most pages of one PULL."""

MAX_COPIED_TOKENS = 700_000
"""A longer prefix does not fit into a COPY frame."""

_REASONS = frozenset(
    {"refused", "short", "staging", "gone", "source", "transfer", "damaged", "full", "abandoned", "deadline"}
    | {"target", "long"}
)
_CHECKSUM_BYTES = 8
_MAX_RANKS = 64
_MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Get the pages of a prefix from another pool. The ticket names that pool as producer, this one as consumer."""

    kind: ClassVar[FrameType] = FrameType.COPY

    ticket: str
    """Sealed."""
    token_ids: Sequence[int]
    """The prefix; the ticket has its digest."""
    salt: str
    adapter: str

    def to_body(self) -> dict[str, Any]:
        """The fields of a COPY frame."""
        ids = array("I", self.token_ids)
        if sys.byteorder == "big":
            ids.byteswap()
        return {
            "ticket": self.ticket,
            "tokens": _encoded(ids.tobytes()),
            "salt": self.salt,
            "adapter": self.adapter,
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a COPY frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        raw = _bytes_field(body, "tokens", 4 * MAX_COPIED_TOKENS)
        if len(raw) % 4:
            raise WireError("field 'tokens' must have 4 bytes for each token")
        ids = array("I", raw)
        if sys.byteorder == "big":
            ids.byteswap()
        return cls(
            text_field(body, "ticket"),
            ids,
            text_field(body, "salt", _MAX_NAME_CHARS),
            text_field(body, "adapter", _MAX_NAME_CHARS),
        )


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Result of a COPY."""

    copied_bytes: int
    """Bytes that crossed to this pool."""
    usable_tokens: int
    """Tokens of the prefix that a prefill can reuse from this pool now."""
    reason: str
    """Why the copy is incomplete, else empty: one word, a colon, and details."""

    @property
    def word(self) -> str:
        """The reason's first word."""
        return self.reason.partition(":")[0]

    @property
    def outcome(self) -> str:
        """A word of a bounded set, for metrics: "done", or the reason's word."""
        if not self.reason:
            return "done"
        return self.word if self.word in _REASONS else "failed"

    def to_body(self) -> dict[str, Any]:
        """The fields of a COPIED frame."""
        return {"bytes": self.copied_bytes, "tokens": self.usable_tokens, "reason": self.reason[:4096]}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a COPIED frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        return cls(
            count_field(body, "bytes", MAX_TRANSFER_BYTES),
            count_field(body, "tokens", 1 << 30),
            text_field(body, "reason"),
        )


@dataclass(frozen=True, slots=True)
class PullOrder:
    """Send those of these pages that you have, in one transfer. The ticket is that transfer's."""

    kind: ClassVar[FrameType] = FrameType.PULL

    ticket: str
    """Sealed."""
    geometry: bytes
    """Digest of what the asking pool's pages look like."""
    page_ids: tuple[bytes, ...]

    def to_body(self) -> dict[str, Any]:
        """The fields of a PULL frame."""
        return {
            "ticket": self.ticket,
            "geometry": self.geometry.hex(),
            "pages": _encoded(b"".join(self.page_ids)),
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a PULL frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        packed = _bytes_field(body, "pages", PAGE_ID_BYTES * MAX_PULLED_PAGES)
        if not packed or len(packed) % PAGE_ID_BYTES:
            raise WireError(f"field 'pages' must have {PAGE_ID_BYTES} bytes for each of one page or more")
        try:
            geometry = bytes.fromhex(text_field(body, "geometry", 128))
        except ValueError:
            raise WireError("field 'geometry' is not hex") from None
        pages = tuple(packed[at : at + PAGE_ID_BYTES] for at in range(0, len(packed), PAGE_ID_BYTES))
        if len(set(pages)) < len(pages):
            raise WireError("field 'pages' names a page twice")
        return cls(text_field(body, "ticket"), geometry, pages)


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """Which of the pages will come, in the order in which they were asked for, one after the other."""

    checksums: tuple[tuple[int, ...] | None, ...]
    """For each page that was asked for: xxh3_64 of each rank's share; None: it will not come."""
    reason: str = ""
    """Why the whole request is refused, else empty."""

    def to_body(self) -> dict[str, Any]:
        """The fields of a PULLED frame."""
        packed = b"".join(
            checksum.to_bytes(_CHECKSUM_BYTES, "little") for each in self.checksums for checksum in each or ()
        )
        ranks = max((len(each) for each in self.checksums if each is not None), default=0)
        return {
            "reason": self.reason[:4096],
            "have": "".join("0" if each is None else "1" for each in self.checksums),
            "ranks": ranks,
            "checksums": _encoded(packed),
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a PULLED frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        reason, have = text_field(body, "reason"), text_field(body, "have", MAX_PULLED_PAGES)
        ranks = count_field(body, "ranks", _MAX_RANKS)
        if have.strip("01"):
            raise WireError("field 'have' must be of the digits 0 and 1")
        if "1" in have and not ranks:
            raise WireError("field 'ranks' must not be 0")
        packed = _bytes_field(body, "checksums", MAX_PULLED_PAGES * _MAX_RANKS * _CHECKSUM_BYTES)
        page_bytes = ranks * _CHECKSUM_BYTES
        if len(packed) != have.count("1") * page_bytes:
            raise WireError("field 'checksums' must have one for each rank of each page that comes")
        checksums: list[tuple[int, ...] | None] = []
        at = 0
        for digit in have:
            if digit == "0":
                checksums.append(None)
                continue
            checksums.append(
                tuple(
                    int.from_bytes(packed[start : start + _CHECKSUM_BYTES], "little")
                    for start in range(at, at + page_bytes, _CHECKSUM_BYTES)
                )
            )
            at += page_bytes
        return cls(tuple(checksums), reason)


REQUESTS = (FrameType.COPY, FrameType.PULL)


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A request that came over a KV port."""

    peer: str
    """Authenticated name of the sender."""
    transfer_id: bytes
    """Of the frame: the answer repeats it."""
    order: CopyOrder | PullOrder
    post: Callable[[bytes], None]

    @classmethod
    def from_body(
        cls,
        kind: FrameType,
        peer: str,
        transfer_id: bytes,
        body: Mapping[str, Any],
        post: Callable[[bytes], None],
    ) -> Self:
        """Read a frame of one of the kinds in `REQUESTS`.

        Raises:
            WireError: a field is missing or absurd.
        """
        order = CopyOrder.from_body(body) if kind is FrameType.COPY else PullOrder.from_body(body)
        return cls(peer, transfer_id, order, post)

    def answer(self, answer: CopyResult | PullAnswer) -> None:
        """Send the answer, without waiting; thread-safe."""
        kind = FrameType.COPIED if isinstance(answer, CopyResult) else FrameType.PULLED
        self.post(pack_control(kind, self.transfer_id, answer.to_body()))

    def refuse(self, reason: str) -> None:
        """Answer that nothing will be done; thread-safe."""
        if isinstance(self.order, CopyOrder):
            self.answer(CopyResult(0, 0, reason))
        else:
            self.answer(PullAnswer((), reason))


def refuse_request(request: PeerRequest) -> None:
    """Refuse a request, on a side that is no pool."""
    request.refuse("refused: there is no pool here")


def _encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes_field(body: Mapping[str, Any], name: str, max_bytes: int) -> bytes:
    text = text_field(body, name, MAX_COPY_BYTES)
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WireError(f"field {name!r} is not base64 text") from None
    if len(raw) > max_bytes:
        raise WireError(f"field {name!r} has {len(raw)} bytes, more than {max_bytes}")
    return raw
