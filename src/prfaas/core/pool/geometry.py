"""The sizes of a pool's pages, which follow from an engine's KV groups.

A page is one block of one KV group: all layers of the group, of all tensor-parallel ranks. The ranks' parts lie one
after the other. The pages of the lead group end with an identity: what tokens they stand for.
"""

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.pool.keys import KEY_BYTES, KeyChain

ALIGNMENT_BYTES = 64
"""Pages and the ranks' parts begin at multiples of this: a cache line, as copies like it."""
SECTOR_BYTES = 512
"""Slots of pages are multiples of this: most disks take and fill such memory without a copy."""

# Room of an identity besides its token ids: parent, salt, adapter and what msgpack adds.
_IDENTITY_BASE_BYTES = 768
_LENGTH_BYTES = 4
# Of an identity besides token ids, salt and adapter: parent, names of the fields, lengths. It has fewer.
_OTHER_IDENTITY_BYTES = 128
_SIMILAR = 15 / 16


def aligned_bytes(size_bytes: int) -> int:
    """`size_bytes`, rounded up to the next multiple of 64."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def whole_sectors(size_bytes: int) -> int:
    """`size_bytes`, rounded up to the next multiple of 512."""
    return -(-size_bytes // SECTOR_BYTES) * SECTOR_BYTES


class PoolGeometryError(ValueError):
    """These KV groups cannot have a pool; the message says why."""


@dataclass(frozen=True, slots=True)
class PageGroup(KvGroup):
    """A KV group, and what a block of it takes."""

    rank_bytes: int
    """One block of all its layers on one rank, padding to a multiple of 64 bytes included."""


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """The tokens of a page of the lead group; enough to publish it, and to find it elsewhere."""

    parent: bytes
    """Key of the block before this one, empty for a chain's first."""
    token_ids: bytes
    """Of the block, as little-endian unsigned 32-bit integers."""
    salt: str
    adapter: str

    @classmethod
    def of(
        cls, chain: KeyChain, token_ids: Sequence[int], block: range, salt: str, adapter: str
    ) -> "PageIdentity":
        """The identity of a block of a prompt: its tokens, by their places, under the prompt's keys."""
        parent = chain.key_at(block.start) if block.start else b""
        # Little-endian, as every machine here.
        ids = array("I", token_ids[block.start : block.stop]).tobytes()
        return cls(parent, ids, salt, adapter)

    def encode(self) -> bytes:
        """The page's trailer: the length in 4 bytes, little-endian, then msgpack."""
        body = msgspec.msgpack.encode(self)
        return len(body).to_bytes(_LENGTH_BYTES, "little") + body

    @staticmethod
    def decode(trailer: bytes | memoryview) -> "PageIdentity":
        """The identity that `encode` wrote; bytes behind it are passed over.

        Raises:
            ValueError: the trailer holds no identity.
        """
        length = int.from_bytes(trailer[:_LENGTH_BYTES], "little")
        if length > len(trailer) - _LENGTH_BYTES:
            raise ValueError(f"an identity of {length} bytes does not fit into {len(trailer)}")
        return msgspec.msgpack.decode(trailer[_LENGTH_BYTES : _LENGTH_BYTES + length], type=PageIdentity)

    def describes(self, lead: PageGroup) -> bool:
        """True if it can be the identity of a page of that group."""
        return len(self.token_ids) == 4 * lead.block_tokens and len(self.parent) in (0, KEY_BYTES)

    def fits(self, room_bytes: int) -> bool:
        """True if the trailer has at most that many bytes; salt and adapter may be too long for it."""
        # Nobody has long ones, and encoding costs more than looking.
        longest = 4 * (len(self.salt) + len(self.adapter)) + len(self.token_ids) + _OTHER_IDENTITY_BYTES
        return longest <= room_bytes or len(self.encode()) <= room_bytes


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The page layout of one model on so many ranks. Two engines share a pool if theirs are equal."""

    fingerprint: str
    """Of the model, its weights and the layout of its KVCache."""
    ranks: int
    """Tensor-parallel ranks."""
    groups: tuple[PageGroup, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise PoolGeometryError(f"a pool needs at least one rank, not {self.ranks}")
        indices = [group.index for group in self.groups]
        if len(set(indices)) < len(indices) or not all(0 <= index < 256 for index in indices):
            raise PoolGeometryError(f"KV groups need different numbers from 0 to 255, not {indices}")
        for group in self.groups:
            if group.rank_bytes < 1 or group.rank_bytes % ALIGNMENT_BYTES:
                raise PoolGeometryError(
                    f"a block of KV group {group.index} takes {group.rank_bytes} bytes on a rank, "
                    f"which must be a positive multiple of {ALIGNMENT_BYTES}"
                )
            if group.block_tokens < 1:
                raise PoolGeometryError(f"KV group {group.index} has blocks of {group.block_tokens} tokens")
        if not any(group.kind is GroupKind.FULL for group in self.groups):
            raise PoolGeometryError("a model without full attention gets no pool")
        if any(group.is_ring for group in self.groups):
            raise PoolGeometryError(
                "a model with rings gets no pool: no prefix of a prompt is kept with them"
            )

    @property
    def lead(self) -> PageGroup:
        """The first full-attention group: its pages say what tokens they stand for."""
        return min(
            (group for group in self.groups if group.kind is GroupKind.FULL), key=lambda each: each.index
        )

    @property
    def step_tokens(self) -> int:
        """Tokens from one key of a chain to the next: the largest step that every group's blocks end on."""
        return math.gcd(*(group.block_tokens for group in self.groups))

    def group(self, index: int) -> PageGroup:
        """The group of that number.

        Raises:
            KeyError: there is none.
        """
        for group in self.groups:
            if group.index == index:
                return group
        raise KeyError(index)

    def identity_bytes(self, group_index: int) -> int:
        """Room for the identity at the end of a page: 0 unless the group leads."""
        lead = self.lead
        if group_index != lead.index:
            return 0
        return aligned_bytes(4 * lead.block_tokens + _IDENTITY_BASE_BYTES)

    def page_bytes(self, group_index: int) -> int:
        """Bytes of a page of that group: all ranks' parts and the identity."""
        return self.group(group_index).rank_bytes * self.ranks + self.identity_bytes(group_index)

    def rank_offset(self, group_index: int, rank: int) -> int:
        """Where the part of a rank begins in a page."""
        return self.group(group_index).rank_bytes * rank

    def identity_offset(self, group_index: int) -> int:
        """Where the identity begins in a page of the lead group: behind all ranks' parts."""
        return self.rank_offset(group_index, self.ranks)

    def encode(self) -> bytes:
        """For the wire and the arena's header."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(encoded: bytes | memoryview) -> "PoolGeometry":
        """The geometry that `encode` wrote.

        Raises:
            ValueError: the bytes are none, or no pool can have this geometry.
        """
        return msgspec.msgpack.decode(encoded, type=PoolGeometry)

    def digest(self) -> bytes:
        """16 bytes that differ for different geometries."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


def slot_sizes(page_bytes: Sequence[int]) -> dict[int, int]:
    """The slot size that a page of each size goes into.

    Pages that are nearly as large as the next larger ones (15/16) share their slots. So groups whose pages differ by
    little more than the identity use the same memory, and none has to be moved between them. Every slot is a multiple
    of 512 bytes, all of which are the page's.
    """
    sizes: dict[int, int] = {}
    slot = 0
    for size in sorted(set(page_bytes), reverse=True):
        if not sizes or size < slot * _SIMILAR:
            slot = whole_sectors(size)
        sizes[size] = slot
    return sizes
