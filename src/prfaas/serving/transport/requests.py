"""Requests over a KV port, and their answers: COPY and FOLLOW of the gateway, PULL of another pool."""

import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, Self

import msgspec

from prfaas.serving.transport.wire import (
    MAX_TRANSFER_BYTES,
    FrameType,
    TokenCount,
    WireError,
    body_of,
    pack_control,
    read_body,
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
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]


class CopyFields(msgspec.Struct):
    """The fields of a COPY frame."""

    ticket: _Text
    tokens: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COPIED_TOKENS)]
    """4 bytes for each, little-endian."""
    salt: _Name
    adapter: _Name


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
        return body_of(CopyFields(self.ticket, ids.tobytes(), self.salt, self.adapter))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a COPY frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        told = read_body(CopyFields, body)
        if len(told.tokens) % 4:
            raise WireError("field 'tokens' must have 4 bytes for each token")
        ids = array("I", told.tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        return cls(told.ticket, ids, told.salt, told.adapter)


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

    def to_body(self) -> dict[str, Any]:
        """The fields of a COPIED frame."""
        return body_of(msgspec.structs.replace(self, reason=self.reason[:4096]))


class PullFields(msgspec.Struct):
    """The fields of a PULL frame."""

    ticket: _Text
    geometry: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{2}){0,64}\Z")]
    pages: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PAGE_ID_BYTES * MAX_PULLED_PAGES)]
    """Their ids, one after the other."""


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
        return body_of(PullFields(self.ticket, self.geometry.hex(), b"".join(self.page_ids)))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a PULL frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        told = read_body(PullFields, body)
        if len(told.pages) % PAGE_ID_BYTES:
            raise WireError(f"field 'pages' must have {PAGE_ID_BYTES} bytes for each page")
        starts = range(0, len(told.pages), PAGE_ID_BYTES)
        pages = tuple(told.pages[at : at + PAGE_ID_BYTES] for at in starts)
        if len(set(pages)) < len(pages):
            raise WireError("field 'pages' names a page twice")
        return cls(told.ticket, bytes.fromhex(told.geometry), pages)


class PulledFields(msgspec.Struct):
    """The fields of a PULLED frame."""

    reason: _Text
    have: Annotated[str, msgspec.Meta(pattern=r"\A[01]*\Z", max_length=MAX_PULLED_PAGES)]
    """A digit for each page that was asked for: 1 if it will come."""
    ranks: Annotated[int, msgspec.Meta(ge=0, le=_MAX_RANKS)]
    checksums: Annotated[bytes, msgspec.Meta(max_length=MAX_PULLED_PAGES * _MAX_RANKS * _CHECKSUM_BYTES)]
    """Of each page that will come, one of each rank."""


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """Which of the pages will come, in the order in which they were asked for, one after the other."""

    checksums: tuple[tuple[int, ...] | None, ...]
    """For each page that was asked for: xxh3_64 of each rank's share; None: it will not come."""
    reason: str = ""
    """Why the whole request is refused, else empty."""

    def to_body(self) -> dict[str, Any]:
        """The fields of a PULLED frame."""
        coming = [each for each in self.checksums if each is not None]
        have = "".join("0" if each is None else "1" for each in self.checksums)
        packed = b"".join(sum_.to_bytes(_CHECKSUM_BYTES, "little") for each in coming for sum_ in each)
        ranks = max(map(len, coming), default=0)
        return body_of(PulledFields(self.reason[:4096], have, ranks, packed))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read the fields of a PULLED frame.

        Raises:
            WireError: a field is missing or absurd.
        """
        told = read_body(PulledFields, body)
        if "1" in told.have and not told.ranks:
            raise WireError("field 'ranks' must not be 0")
        page_bytes = told.ranks * _CHECKSUM_BYTES
        if len(told.checksums) != told.have.count("1") * page_bytes:
            raise WireError("field 'checksums' must have one for each rank of each page that comes")
        at = range(0, len(told.checksums), _CHECKSUM_BYTES)
        sums = iter([int.from_bytes(told.checksums[i : i + _CHECKSUM_BYTES], "little") for i in at])
        pages = (tuple(islice(sums, told.ranks)) if digit == "1" else None for digit in told.have)
        return cls(tuple(pages), told.reason)


_Session = Annotated[str, msgspec.Meta(max_length=64)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class FollowOrder(msgspec.Struct, frozen=True):
    """Order to tell what becomes of the KV held here, the fields of a FOLLOW frame. It waits until there is more."""

    kind: ClassVar[FrameType] = FrameType.FOLLOW

    session: _Session
    """Of the events so far; empty at first."""
    first: _Number
    """Number of the first batch that is asked for."""

    def to_body(self) -> dict[str, Any]:
        """The fields of a FOLLOW frame."""
        return body_of(self)


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

    def to_body(self) -> dict[str, Any]:
        """The fields of an EVENTS frame."""
        return body_of(self)


REQUESTS = (FrameType.COPY, FrameType.PULL, FrameType.FOLLOW)


_ANSWERS = {
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
    order: CopyOrder | PullOrder | FollowOrder
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
        order: CopyOrder | PullOrder | FollowOrder
        if kind is FrameType.COPY:
            order = CopyOrder.from_body(body)
        elif kind is FrameType.PULL:
            order = PullOrder.from_body(body)
        else:
            order = read_body(FollowOrder, body)
        return cls(peer, transfer_id, order, post)

    def answer(self, answer: CopyResult | PullAnswer | FollowedEvents) -> None:
        """Send the answer, without waiting; thread-safe."""
        kind = _ANSWERS[self.order.kind]
        self.post(pack_control(kind, self.transfer_id, answer.to_body()))

    def refuse(self, reason: str) -> None:
        """Answer that nothing will be done; thread-safe."""
        if isinstance(self.order, CopyOrder):
            self.answer(CopyResult(0, 0, reason))
        elif isinstance(self.order, FollowOrder):
            self.answer(FollowedEvents("", 0, reason=reason))
        else:
            self.answer(PullAnswer((), reason))


def refuse_request(request: PeerRequest) -> None:
    """Refuse a request, on a side that is no pool and publishes nothing."""
    request.refuse("refused: there is no pool here")
