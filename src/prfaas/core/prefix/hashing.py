"""Hashes of blocks: the chain of a prompt's blocks, and the map from an engine's own hashes to these."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from struct import Struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

DEFAULT_BLOCK_TOKENS = 256

TokenIds = Sequence[int] | bytes | bytearray | memoryview
"""Token ids: integers, or their little-endian uint32 bytes. An `array("I")` or bytes spare a copy."""

# Python's own integers take 32 bytes up to 60 bits, and a third more beyond.
_HASH_MASK = (1 << 60) - 1
_ID_BYTES = 4
# Where a C long has 64 bits, its array is filled three times as fast as "Q".
WORDS = "L" if array("L").itemsize == 8 else "Q"
"""Type code of arrays of unsigned 64-bit integers."""
_RAW = (bytes, bytearray, memoryview)


def chain_root(seed: int, salt: str = "", adapter: str = "") -> int:
    """The parent of a chain's first block: 60 bits.

    Chains of other tenants (`salt`) and of other LoRA adapters share nothing, whatever their tokens.
    """
    # xxh3 mixes the seed into a text of few bytes too simply: (1, "b") and (2, "c") would be the same.
    return xxh3_64_intdigest(f"root of a chain {len(salt)}:{salt}{adapter}".encode(), seed) & _HASH_MASK


def seed_of(key: bytes) -> int:
    """The seed of a deployment's block hashes, by its key: nobody else can make equal ones."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"prfaas-prefix").digest(), "little")


def id_bytes(token_ids: TokenIds) -> memoryview:
    """The ids as uint32 bytes (little-endian on every platform that prfaas runs on).

    Raises:
        OverflowError, TypeError: an id is not an unsigned 32-bit integer.
    """
    if isinstance(token_ids, _RAW):
        return memoryview(token_ids).cast("B")
    if not (isinstance(token_ids, array) and token_ids.typecode == "I"):
        token_ids = array("I", token_ids)
    return memoryview(token_ids).cast("B")


class MediaItem(NamedTuple):
    """An image, a video or a recording within a prompt: its tokens are the same whatever it shows."""

    digest: str
    """What an engine knows it by."""
    offset: int
    """Index of its first token."""
    tokens: int


def media_keys(media: Sequence[MediaItem], block_tokens: int, num_tokens: int) -> list[bytes] | None:
    """What the hash of each block covers besides its ids: the items in it and their beginnings. None: none has any.

    Args:
        media: in the order of their offsets.
        block_tokens: tokens of a block.
        num_tokens: of the prompt.
    """
    if not media:
        return None
    keys = [b""] * -(-num_tokens // block_tokens)
    for digest, offset, tokens in media:
        for block in range(offset // block_tokens, -(-(offset + tokens) // block_tokens)):
            keys[block] += block_key([(digest, offset - block * block_tokens)])
    return keys


def block_key(items: Iterable[tuple[str, int]]) -> bytes:
    """The same of one block: the digest of each item in it, and where it begins, counted from the block's start."""
    return "".join(f"{len(digest)}:{digest}{offset};" for digest, offset in items).encode()


class BlockHasher:
    """Chained 60-bit hashes of a prompt's whole blocks.

    Hash `i` covers tokens `[0, (i + 1) * block_tokens)`: the low 60 bits of xxh3_64 of the block's ids (uint32)
    with the previous hash as its seed, so equal hashes mean equal prefixes.
    The chain is not keyed: it serves routing only, where a collision costs time and never a wrong token.
    The seed differs per deployment so that a client cannot precompute colliding prompts for all of them.

    With `lookahead_tokens` a block's hash covers so many tokens behind it too, as engines with a draft model hash.
    A block with media is hashed once more, over its `block_key`.
    """

    __slots__ = ("_block", "_root", "block_tokens", "lookahead_tokens", "seed")

    def __init__(
        self, *, block_tokens: int = DEFAULT_BLOCK_TOKENS, seed: int = 0, lookahead_tokens: int = 0
    ) -> None:
        """Make a hasher.

        Args:
            block_tokens: tokens per block, above 0.
            seed: any unsigned 64-bit integer.
            lookahead_tokens: tokens behind a block that its hash covers, from 0.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}: it must be at least 1")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}: it must be an unsigned 64-bit integer")
        self.block_tokens = block_tokens
        self.lookahead_tokens = lookahead_tokens
        self.seed = seed
        self._root = chain_root(seed)
        self._block = Struct(f"{block_tokens * _ID_BYTES}s")

    def hashes(
        self,
        token_ids: TokenIds,
        root: int | None = None,
        *,
        max_blocks: int | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> tuple[int, ...]:
        """One hash per whole block of `token_ids`; a partial tail has none, nor a block without its whole lookahead.

        Args:
            token_ids: the ids to hash.
            root: what comes before the ids: a `chain_root`, or the hash of the block before them. None: the root
                without salt and adapter.
            max_blocks: hash so many blocks at most.
            keys: one of each block, empty where it has no media; None: none has.

        Raises:
            OverflowError, TypeError: an id is not an unsigned 32-bit integer.
        """
        ids = id_bytes(token_ids)
        if keys is not None:
            return self._keyed(ids, self._root if root is None else root, max_blocks, keys)
        parent = self._root if root is None else root
        if self.lookahead_tokens:
            size = self._block.size
            covered = size + self.lookahead_tokens * _ID_BYTES
            starts = islice(range(0, len(ids) - covered + 1, size), max_blocks)
            return tuple(
                [parent := xxh3_64_intdigest(ids[at : at + covered], parent) & _HASH_MASK for at in starts]
            )
        whole = ids[: len(ids) - len(ids) % self._block.size]
        blocks = islice(chain.from_iterable(self._block.iter_unpack(whole)), max_blocks)
        return tuple([parent := xxh3_64_intdigest(block, parent) & _HASH_MASK for block in blocks])

    def _keyed(
        self, ids: memoryview, root: int, max_blocks: int | None, keys: Sequence[bytes]
    ) -> tuple[int, ...]:
        parent, size = root, self._block.size
        covered = size + self.lookahead_tokens * _ID_BYTES
        hashes = []
        for at, key in zip(islice(range(0, len(ids) - covered + 1, size), max_blocks), keys, strict=False):
            parent = _with_key(xxh3_64_intdigest(ids[at : at + covered], parent) & _HASH_MASK, key)
            hashes.append(parent)
        return tuple(hashes)

    def stored_hashes(
        self,
        token_ids: Sequence[int],
        lookaheads: Sequence[Sequence[int]],
        root: int,
        *,
        max_blocks: int,
        keys: Sequence[bytes] | None = None,
    ) -> tuple[int, ...]:
        """`hashes` of stored blocks, whose lookahead stands apart: one list for each block.

        A block whose list has another length than `lookahead_tokens` ends them.

        Raises:
            OverflowError, TypeError: an id is not an unsigned 32-bit integer.
        """
        ids, size, parent = id_bytes(token_ids), self._block.size, root
        hashes = []
        for place, ahead in enumerate(lookaheads[: min(max_blocks, len(ids) // size)]):
            if len(ahead) != self.lookahead_tokens:
                break
            block = bytes(ids[place * size : (place + 1) * size]) + bytes(id_bytes(ahead))
            parent = xxh3_64_intdigest(block, parent) & _HASH_MASK
            if keys is not None:
                parent = _with_key(parent, keys[place])
            hashes.append(parent)
        return tuple(hashes)


def _with_key(block: int, key: bytes) -> int:
    return xxh3_64_intdigest(key, block) & _HASH_MASK if key else block


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt itself, for who has to name its beginning to others."""

    token_ids: Sequence[int]
    salt: str
    adapter: str


@dataclass(frozen=True, slots=True)
class PromptChains:
    """The hash chains of one prompt less its last token, which is always computed."""

    num_tokens: int
    """Tokens of the whole prompt."""
    by_block_tokens: Mapping[int, tuple[int, ...]]
    """Tokens per block → one hash per whole block, for every block size of the deployment's engines (usually one)."""
    with_lookahead: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(Tokens per block, tokens behind it) → the same for engines whose hashes look ahead."""
    prompt: PromptTokens | None = None
    """What was hashed; None where nobody asks."""

    def key_of(self, tokens: int) -> int | None:
        """The hash of the prefix of `tokens` tokens, None if it ends on no block's boundary."""
        for block_tokens, hashes in self.by_block_tokens.items():
            blocks, rest = divmod(tokens, block_tokens)
            if rest == 0 and 0 < blocks <= len(hashes):
                return hashes[blocks - 1]
        return None


class Hashers:
    """The hashers of one deployment: one per form of its engines' blocks, all with its seed."""

    def __init__(self, seed: int) -> None:
        """`seed`: any unsigned 64-bit integer."""
        self.seed = seed
        self._by_form: dict[tuple[int, int], BlockHasher] = {}

    def of(self, block_tokens: int, lookahead_tokens: int = 0) -> BlockHasher:
        """The hasher of blocks of so many tokens, whose hashes cover so many behind them."""
        form = (block_tokens, lookahead_tokens)
        hasher = self._by_form.get(form)
        if hasher is None:
            hasher = self._by_form[form] = BlockHasher(
                block_tokens=block_tokens, seed=self.seed, lookahead_tokens=lookahead_tokens
            )
        return hasher

    def chains(
        self,
        token_ids: TokenIds,
        salt: str,
        adapter: str,
        block_sizes: Iterable[int],
        lookahead_forms: Iterable[tuple[int, int]] = (),
        *,
        media: Sequence[MediaItem] = (),
    ) -> PromptChains:
        """The prompt's chains for blocks of `block_sizes` tokens, and for those of `lookahead_forms`.

        Raises:
            OverflowError, TypeError: an id is not an unsigned 32-bit integer.
        """
        root = chain_root(self.seed, salt, adapter)
        ids = id_bytes(token_ids)
        num_tokens = len(ids) // 4
        return PromptChains(
            num_tokens,
            {
                block_tokens: self.of(block_tokens).hashes(
                    ids,
                    root,
                    max_blocks=max(num_tokens - 1, 0) // block_tokens,
                    keys=media_keys(media, block_tokens, num_tokens),
                )
                for block_tokens in block_sizes
            },
            {
                (block_tokens, lookahead): self.of(block_tokens, lookahead).hashes(
                    ids,
                    root,
                    max_blocks=max(num_tokens - 1, 0) // block_tokens,
                    keys=media_keys(media, block_tokens, num_tokens),
                )
                for block_tokens, lookahead in lookahead_forms
            },
        )


_WORD_BYTES = 8
_KEY_BYTES = 6
_LINK = Struct("<QQ")
_RECORD_BYTES = _KEY_BYTES + _LINK.size
# Small enough that a search through a bucket costs less than the call, large enough that its own 80 bytes don't count.
_BUCKET_RECORDS = 96
_LEAST_FRESH, _MOST_FRESH = 512, 4096
_MIX = 0x9E3779B97F4A7C15
_WORD_MASK = (1 << 64) - 1
_RECORD = np.dtype([("key", f"V{_KEY_BYTES}"), ("parent", "<u8"), ("hash", "<u8")])
# The upper 48 bits of 64.
_PADDED_KEY = np.dtype([("zero", "V2"), ("key", f"V{_KEY_BYTES}")])


class PackedHashMap:
    """Engine hash → (parent, hash) of the index's chain, about 24 bytes a block instead of a dict's 140.

    New entries are appended to three flat columns. When these are full, all of them move, sorted by NumPy, into
    buckets of packed records, which are searched with `bytearray.find`.
    48 mixed bits of the engine's hash choose the bucket and are kept in the record. With a million blocks in one
    engine, two of them have equal bits once in 500 fillings. The cost is a wrong route.
    """

    __slots__ = (
        "_buckets", "_filed", "_fresh_engines", "_fresh_hashes", "_fresh_parents", "_fresh_tails", "_shift",
    )  # fmt: skip

    def __init__(self) -> None:
        self._fresh_engines = bytearray()
        self._fresh_parents = array(WORDS)
        self._fresh_hashes = array(WORDS)
        # Most of the next runs follow one of these, and need no search then.
        self._fresh_tails: dict[int, int] = {}
        self._buckets = [bytearray()]
        self._shift = 64
        self._filed = 0

    def __len__(self) -> int:
        return self._filed + len(self._fresh_hashes)

    def add(self, engine_hashes: "array[int]", parent: int, hashes: Sequence[int]) -> None:
        """Remember a run of blocks, each the parent of the next; none of them may be known.

        Args:
            engine_hashes: the engine's hashes, an array of type WORDS.
            parent: the index's hash of the block before the run.
            hashes: the index's hashes, as many.
        """
        column = array(WORDS, hashes)
        self._fresh_engines += engine_hashes
        self._fresh_parents.append(parent)
        self._fresh_parents += column[:-1]
        self._fresh_hashes += column
        self._fresh_tails[engine_hashes[-1]] = column[-1]
        fresh = len(self._fresh_hashes)
        if fresh >= _MOST_FRESH or (fresh >= _LEAST_FRESH and fresh * 4 >= self._filed):
            self._file()

    def get(self, engine_hash: int) -> int | None:
        """The index's hash of that block, None if it is not known."""
        tail = self._fresh_tails.get(engine_hash)
        if tail is not None:
            return tail
        bucket, at = self._locate(engine_hash)
        if at >= 0:
            found: int = _LINK.unpack_from(bucket, at + _KEY_BYTES)[1]
            return found
        row = self._fresh_row(engine_hash)
        return self._fresh_hashes[row] if row >= 0 else None

    def pop_each(self, engine_hashes: Iterable[int]) -> list[tuple[int, int]]:
        """Forget these blocks: (parent, hash) of each that is known."""
        links = []
        buckets, shift, unpack, filed = self._buckets, self._shift, _LINK.unpack_from, self._filed
        for engine_hash in engine_hashes:
            # As `_locate`, in line: this is the inner loop of evictions.
            mixed = engine_hash * _MIX & _WORD_MASK
            bucket = buckets[mixed >> shift]
            key = (mixed >> 16).to_bytes(_KEY_BYTES, "little")
            at = bucket.find(key)
            while at % _RECORD_BYTES and at >= 0:
                at = bucket.find(key, at + 1)
            if at >= 0:
                links.append(unpack(bucket, at + _KEY_BYTES))
                del bucket[at : at + _RECORD_BYTES]
                filed -= 1
            else:
                row = self._fresh_row(engine_hash)
                if row >= 0:
                    links.append(self._pop_fresh(row, engine_hash))
        self._filed = filed
        return links

    def hashes(self) -> list[int]:
        """The index's hashes of all blocks, in no order."""
        filed: list[int] = self._records()["hash"].tolist()
        return filed + self._fresh_hashes.tolist()

    def _locate(self, engine_hash: int) -> tuple[bytearray, int]:
        mixed = engine_hash * _MIX & _WORD_MASK
        bucket = self._buckets[mixed >> self._shift]
        key = (mixed >> 16).to_bytes(_KEY_BYTES, "little")
        at = bucket.find(key)
        while at % _RECORD_BYTES and at >= 0:
            at = bucket.find(key, at + 1)
        return bucket, at

    def _fresh_row(self, engine_hash: int) -> int:
        column, word = self._fresh_engines, engine_hash.to_bytes(_WORD_BYTES, "little")
        at = column.rfind(word)
        while at >= 0 and at % _WORD_BYTES:
            at = column.rfind(word, 0, at + _WORD_BYTES - 1)
        return at // _WORD_BYTES if at >= 0 else -1

    def _pop_fresh(self, row: int, engine_hash: int) -> tuple[int, int]:
        link = self._fresh_parents[row], self._fresh_hashes[row]
        start = row * _WORD_BYTES
        self._fresh_engines[start : start + _WORD_BYTES] = self._fresh_engines[-_WORD_BYTES:]
        self._fresh_parents[row] = self._fresh_parents[-1]
        self._fresh_hashes[row] = self._fresh_hashes[-1]
        del self._fresh_engines[-_WORD_BYTES:], self._fresh_parents[-1], self._fresh_hashes[-1]
        self._fresh_tails.pop(engine_hash, None)
        return link

    def _records(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        return np.frombuffer(b"".join(self._buckets), _RECORD)

    def _file(self) -> None:
        """Move the fresh entries into the buckets; make more buckets where they have become too full."""
        mixed = np.frombuffer(self._fresh_engines, "<u8") * np.uint64(_MIX)
        records = np.empty(len(mixed), _RECORD)
        records["key"] = mixed.view(_PADDED_KEY)["key"]
        records["parent"] = np.frombuffer(self._fresh_parents, "<u8")
        records["hash"] = np.frombuffer(self._fresh_hashes, "<u8")
        self._filed += len(records)
        if self._filed > 2 * _BUCKET_RECORDS * len(self._buckets):
            records = np.concatenate((self._records(), records))
            bits = (self._filed // _BUCKET_RECORDS).bit_length()
            self._buckets = [bytearray() for _ in range(1 << bits)]
            self._shift = 64 - bits
        self._distribute(records)
        self._fresh_engines = bytearray()
        self._fresh_parents = array(WORDS)
        self._fresh_hashes = array(WORDS)
        self._fresh_tails = {}

    def _distribute(self, records: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        """Append the records to the buckets of their keys."""
        padded = np.zeros(len(records), _PADDED_KEY)
        padded["key"] = records["key"]
        keys = padded.view("<u8")
        order = np.argsort(keys)
        data = records.take(order).tobytes()
        firsts = np.arange(1, len(self._buckets), dtype=np.uint64) << np.uint64(self._shift)
        ends = (np.searchsorted(keys.take(order), firsts) * _RECORD_BYTES).tolist()
        start = 0
        for bucket, end in zip(self._buckets, [*ends, len(data)], strict=True):
            if end > start:
                bucket += data[start:end]
                start = end
