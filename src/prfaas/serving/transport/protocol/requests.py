"""Requests over a KV port, and their answers: COPY and FOLLOW of the gateway, PULL of another pool."""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar, Self

import msgspec

from prfaas.serving.transport.protocol.wire import (
    MAX_TRANSFER_BYTES,
    FrameType,
    TokenCount,
    WireError,
    body_of,
    pack_control,
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
MAX_FOLLOWED_BATCHES = 4096
_MAX_RANKS = 64
_MOST_TEXT_CHARS = 4096
_Text = Annotated[str, msgspec.Meta(max_length=_MOST_TEXT_CHARS)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]


class CopyOrder(msgspec.Struct, frozen=True):
    """Order to get the pages of a prefix from another pool, the fields of a COPY frame.

    The ticket names that pool as producer, this one as consumer.
    """

    kind: ClassVar[FrameType] = FrameType.COPY

    ticket: _Text
    """Sealed."""
    tokens: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COPIED_TOKENS)]
    """The prefix, of which the ticket has the digest: 4 bytes for each token, little-endian."""
    salt: _Name
    adapter: _Name

    def __post_init__(self) -> None:
        if len(self.tokens) % 4:
            raise WireError("field 'tokens' must have 4 bytes for each token")

    @classmethod
    def of(cls, ticket: str, token_ids: Sequence[int], salt: str, adapter: str) -> Self:
        """The order for a prefix of these tokens."""
        return cls(ticket, _little_endian(array("I", token_ids)).tobytes(), salt, adapter)

    @property
    def token_ids(self) -> "array[int]":
        """The prefix."""
        return _little_endian(array("I", self.tokens))


def _little_endian(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


class CopyResult(msgspec.Struct, frozen=True, rename={"copied_bytes": "bytes", "usable_tokens": "tokens"}):
    """Result of a COPY: the fields of a COPIED frame."""

    copied_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_TRANSFER_BYTES)]
    """Bytes that crossed to this pool."""
    usable_tokens: TokenCount
    """Tokens of the prefix that a prefill can reuse from this pool now."""
    reason: _Text
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


class PullOrder(msgspec.Struct, frozen=True):
    """Order to send those of these pages that are there, in one transfer: the fields of a PULL frame."""

    kind: ClassVar[FrameType] = FrameType.PULL

    ticket: _Text
    """Of that transfer, sealed."""
    geometry: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{2}){0,64}\Z")]
    """Digest of what the asking pool's pages look like, in hex."""
    pages: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PAGE_ID_BYTES * MAX_PULLED_PAGES)]
    """Their ids, one after the other."""

    def __post_init__(self) -> None:
        if len(self.pages) % PAGE_ID_BYTES:
            raise WireError(f"field 'pages' must have {PAGE_ID_BYTES} bytes for each page")
        if len(set(self.page_ids)) < len(self.page_ids):
            raise WireError("field 'pages' names a page twice")

    @classmethod
    def of(cls, ticket: str, geometry: bytes, page_ids: Sequence[bytes]) -> Self:
        """The order for these pages."""
        return cls(ticket, geometry.hex(), b"".join(page_ids))

    @property
    def page_ids(self) -> tuple[bytes, ...]:
        """The pages' ids."""
        starts = range(0, len(self.pages), PAGE_ID_BYTES)
        return tuple(self.pages[at : at + PAGE_ID_BYTES] for at in starts)


class PullAnswer(msgspec.Struct, frozen=True, rename={"packed": "checksums"}):
    """Which of the pages will come, in the order in which they were asked for: the fields of a PULLED frame."""

    reason: _Text
    """Why the whole request is refused, else empty."""
    have: Annotated[str, msgspec.Meta(pattern=r"\A[01]*\Z", max_length=MAX_PULLED_PAGES)]
    """A digit for each page that was asked for: 1 if it will come."""
    ranks: Annotated[int, msgspec.Meta(ge=0, le=_MAX_RANKS)]
    packed: Annotated[bytes, msgspec.Meta(max_length=MAX_PULLED_PAGES * _MAX_RANKS * _CHECKSUM_BYTES)]
    """Of each page that will come, one of each rank."""

    def __post_init__(self) -> None:
        if "1" in self.have and not self.ranks:
            raise WireError("field 'ranks' must not be 0")
        if len(self.packed) != self.have.count("1") * self.ranks * _CHECKSUM_BYTES:
            raise WireError("field 'checksums' must have one for each rank of each page that comes")

    @classmethod
    def of(cls, checksums: Sequence[tuple[int, ...] | None], reason: str = "") -> Self:
        """The answer with these `checksums`."""
        coming = [each for each in checksums if each is not None]
        have = "".join("0" if each is None else "1" for each in checksums)
        packed = b"".join(sum_.to_bytes(_CHECKSUM_BYTES, "little") for each in coming for sum_ in each)
        return cls(reason, have, max(map(len, coming), default=0), packed)

    @property
    def checksums(self) -> tuple[tuple[int, ...] | None, ...]:
        """For each page that was asked for: xxh3_64 of each rank's share; None: it will not come."""
        at = range(0, len(self.packed), _CHECKSUM_BYTES)
        sums = iter([int.from_bytes(self.packed[i : i + _CHECKSUM_BYTES], "little") for i in at])
        return tuple(tuple(islice(sums, self.ranks)) if digit == "1" else None for digit in self.have)


_Session = Annotated[str, msgspec.Meta(max_length=64)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class FollowOrder(msgspec.Struct, frozen=True):
    """Order to tell what becomes of the KV held here, the fields of a FOLLOW frame. It waits until there is more."""

    kind: ClassVar[FrameType] = FrameType.FOLLOW

    session: _Session
    """Of the events so far; empty at first."""
    first: _Number
    """Number of the first batch that is asked for."""


class FollowedEvents(msgspec.Struct, frozen=True):
    """The batches that come next, the fields of an EVENTS frame.

    If the session is another than the one that was asked for, or `first` another number, all that was known before is
    void.
    """

    session: _Session
    """Empty: nothing is told here."""
    first: _Number
    batches: Annotated[list[bytes], msgspec.Meta(max_length=MAX_FOLLOWED_BATCHES)] = []
    """Each as `core/prefix/digests.py` encodes it."""
    reason: _Text = ""
    """Why the session began."""


PoolOrder = CopyOrder | PullOrder | FollowOrder
ORDERS: dict[FrameType, type[PoolOrder]] = {each.kind: each for each in (CopyOrder, PullOrder, FollowOrder)}
"""What a frame of a kind orders."""

ANSWERS = {
    FrameType.COPY: FrameType.COPIED,
    FrameType.PULL: FrameType.PULLED,
    FrameType.FOLLOW: FrameType.EVENTS,
}


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A request that came over a KV port."""

    peer: str
    """Authenticated name of the sender."""
    transfer_id: bytes
    """Of the frame: the answer repeats it."""
    order: PoolOrder
    post: Callable[[bytes], None]

    def answer(self, answer: CopyResult | PullAnswer | FollowedEvents) -> None:
        """Send the answer, without waiting; thread-safe."""
        told = msgspec.structs.replace(answer, reason=answer.reason[:_MOST_TEXT_CHARS])
        self.post(pack_control(ANSWERS[self.order.kind], self.transfer_id, body_of(told)))

    def refuse(self, reason: str) -> None:
        """Answer that nothing will be done; thread-safe."""
        if isinstance(self.order, CopyOrder):
            self.answer(CopyResult(0, 0, reason))
        elif isinstance(self.order, FollowOrder):
            self.answer(FollowedEvents("", 0, reason=reason))
        else:
            self.answer(PullAnswer.of((), reason))


def refuse_request(request: PeerRequest) -> None:
    """Refuse a request, on a side that is no pool and publishes nothing."""
    request.refuse("refused: there is no pool here")
