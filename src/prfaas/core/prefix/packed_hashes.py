"""One engine's own block hashes → the index's, packed."""

from array import array
from collections.abc import Iterable, Sequence
from struct import Struct

import numpy as np

from prfaas.core.prefix.hashing import WORDS

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


class Pairs:
    """Engine hash → (parent, hash) of the index's chain, about 24 bytes a block instead of a dict's 140.

    New pairs are appended to three flat columns. When these are full, they move at once, sorted by NumPy, into
    buckets of packed records, which are searched with `bytearray.find`.
    A bucket is chosen by, and a record keeps, 48 mixed bits of the engine's hash: of a million blocks
    in one engine, one pair with equal bits is to be expected in 500 fillings. It costs a wrong route.
    """

    __slots__ = (
        "_buckets", "_filed", "_fresh_engines", "_fresh_hashes", "_fresh_parents", "_fresh_tails", "_shift",
    )  # fmt: skip

    def __init__(self) -> None:
        self._fresh_engines = bytearray()
        self._fresh_parents = array(WORDS)
        self._fresh_hashes = array(WORDS)
        # What most of the next runs will follow: it spares them the search.
        self._fresh_tails: dict[int, int] = {}
        self._buckets = [bytearray()]
        self._shift = 64
        self._filed = 0

    def __len__(self) -> int:
        return self._filed + len(self._fresh_hashes)

    def add(self, engine_hashes: "array[int]", parent: int, hashes: Sequence[int]) -> None:
        """Remember a run of blocks, each the parent of the next; none of them may be known.

        `engine_hashes`: an array of type WORDS.
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
            # As _locate: this is the inner loop of evictions.
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
        """Move the fresh pairs into the buckets, after making more of these where they have become too full."""
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
