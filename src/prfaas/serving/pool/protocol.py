"""Messages between engines and the pool's daemon, over a Unix socket.

Every message is one of the structs below in msgpack, after its length in 4 bytes, little-endian. Each request gets
one answer. The answer to `OpenSession` carries the arena as a file descriptor. Many keys, slots or offsets are
packed into one byte string, since a list of thousands costs more than the look-up.
"""

from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from prfaas.core.pool.geometry import PageIdentity

PROTOCOL_VERSION = 1
LENGTH_BYTES = 4
MOST_MESSAGE_BYTES = 32 << 20
"""A longer message is garbage. A chain of a million tokens in steps of one takes half of it."""

SessionKind: TypeAlias = Literal["scheduler", "worker", "tool"]


class PageRef(NamedTuple):
    """A page in the arena, as one reservation or pin knows it."""

    slot: int
    """Row of the page table in the lower 32 bits, number of the row's use in the upper; never reused."""
    offset: int
    """The page's offset in the arena."""


class MatchedPages(NamedTuple):
    """Pages of one group that a load needs, block by block."""

    group: int
    first_block: int
    refs: tuple[PageRef, ...]


class PoolMatch(NamedTuple):
    """A pool's match for a prompt."""

    pin: int
    """To be given back with `unpin`; 0 if nothing was pinned."""
    usable_tokens: int
    """Most tokens that a request can reuse, by the hybrid rule. Not above the start: nothing to load."""
    attention_tokens: int
    """Leading tokens of which the pool has all full-attention groups."""
    memory_tokens: int
    """Leading usable tokens whose lead group is in memory; later pages may have to come from SSD."""
    pages: tuple[MatchedPages, ...]
    """The pages that a load of [start, usable_tokens) reads."""
    epoch: int
    """Number of the daemon's start."""


class OpenSession(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """The first message of a connection."""

    version: int
    kind: SessionKind
    rank: int
    engine: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    """Distinguishes engines of one process group."""
    geometry: bytes | None
    """`PoolGeometry.encode`; None: the pool's. A scheduler without one needs a worker of its engine first."""


class Opened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """The session is open. The arena's file descriptor comes with this message, if there is an arena."""

    epoch: int
    has_arena: bool
    """Not before the first engine has opened a session."""


class Goodbye(msgspec.Struct, tag="goodbye", array_like=True, frozen=True):
    """The process writes no more. After a connection that ends without it, copies may still go on."""


class Match(msgspec.Struct, tag="match", array_like=True, frozen=True):
    """Look up a prompt."""

    chain: bytes
    """The keys of all whole steps from token 0 on, packed."""
    start_tokens: int
    limit_tokens: int
    whole: bool
    tenant: bytes
    pin: bool


class Matched(msgspec.Struct, tag="matched", array_like=True, frozen=True):
    """The answer to `Match`: the fields of `PoolMatch`."""

    pin: int
    usable_tokens: int
    attention_tokens: int
    memory_tokens: int
    pages: list[tuple[int, int, bytes, bytes]]
    """Group, first block, slots and offsets (each packed as little-endian signed 64-bit integers)."""


class Unpin(msgspec.Struct, tag="unpin", array_like=True, frozen=True):
    """The pages of that pin are no longer needed."""

    pin: int


class Reserve(msgspec.Struct, tag="reserve", array_like=True, frozen=True):
    """Make room for these pages."""

    tenant: bytes
    page_ids: bytes
    """17 bytes each."""
    identities: list[PageIdentity | None]


class Reserved(msgspec.Struct, tag="reserved", array_like=True, frozen=True):
    """Slots and offsets, packed; a slot of -1 for a page that is there already or has no room."""

    slots: bytes
    offsets: bytes


class Commit(msgspec.Struct, tag="commit", array_like=True, frozen=True):
    """The session's rank has written its shares of these pages."""

    slots: bytes
    checksums: bytes
    """xxh3_64 of each share, packed as little-endian unsigned 64-bit integers."""


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """A worker will not write its shares of these pages. From a scheduler: no worker will."""

    slots: bytes


class Discard(msgspec.Struct, tag="discard", array_like=True, frozen=True):
    """Drop superseded pages, if they were never hit."""

    page_ids: bytes


class Stats(msgspec.Struct, tag="stats", array_like=True, frozen=True):
    """Ask for the pool's figures."""


class Clear(msgspec.Struct, tag="clear", array_like=True, frozen=True):
    """Drop every unused page."""


class Verify(msgspec.Struct, tag="verify", array_like=True, frozen=True):
    """Compare the bytes of every page with its checksums."""


class Figures(msgspec.Struct, tag="figures", array_like=True, frozen=True):
    """The answer to `Stats`, `Clear` and `Verify`."""

    figures: dict[str, int | float | str | dict[str, int]]


class Done(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """The answer to a request without a result."""


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The request is not possible; the daemon closes the connection."""

    reason: str


Request: TypeAlias = (
    OpenSession | Goodbye | Match | Unpin | Reserve | Commit | Abort | Discard | Stats | Clear | Verify
)
Answer: TypeAlias = Opened | Matched | Reserved | Figures | Done | Refused


def packed(numbers: Sequence[int], form: Literal["q", "Q"] = "q") -> bytes:
    """Pack numbers for a message: 64 bits each, signed ("q") or not, little-endian as every machine here."""
    return array(form, numbers).tobytes()


def unpacked(numbers: bytes, form: Literal["q", "Q"] = "q") -> list[int]:
    """Unpack numbers, the inverse of `packed`.

    Raises:
        ValueError: these are no whole numbers.
    """
    found = array(form)
    found.frombytes(numbers)
    return found.tolist()


def page_refs(slots: bytes, offsets: bytes) -> tuple[PageRef, ...]:
    """The pages of packed slots and offsets.

    Raises:
        ValueError: these are not equally many whole numbers.
    """
    pairs = zip(unpacked(slots), unpacked(offsets), strict=True)
    # A third of the time of calling PageRef: thousands of them are in one answer.
    return tuple(map(tuple.__new__, repeat(PageRef), pairs))
