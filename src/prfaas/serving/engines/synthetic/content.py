"""Token digests, and KV pages made of them: expanded when they are sent, reduced to digests when they are loaded."""

from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from prfaas.serving.engines.page_digests import KnownSums, page_sums

MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_CHAIN_SPREAD = 0xD6E8FEB86659FD93


class TokenChain:
    """Token ids that grow, cut into blocks of `block_tokens`.

    The digest of n tokens is a chain over whole blocks (xxh3_64 of the ids, seeded with the digest before) and a
    rolling product over the rest. It is the same in every process: the KV of a prefix must be.
    """

    __slots__ = ("_root", "_tip", "block_tokens", "blocks", "ids")

    def __init__(self, token_ids: Sequence[int], block_tokens: int, adapter: str = "") -> None:
        """Raises OverflowError or TypeError for an id that is not an unsigned 32-bit integer."""
        self.ids = array("I", token_ids)
        self.block_tokens = block_tokens
        self._root = xxh3_64_intdigest(adapter.encode()) if adapter else 0
        self.blocks: list[int] = []
        """Digests of the prefixes that end with each whole block."""
        digest = self._root
        with memoryview(self.ids) as ids:
            for start in range(0, len(ids) - block_tokens + 1, block_tokens):
                digest = xxh3_64_intdigest(ids[start : start + block_tokens], digest)
                self.blocks.append(digest)
        self._tip = self._rolled(len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def digest(self, num_tokens: int) -> int:
        """Digest of the first `num_tokens` tokens."""
        return self._tip if num_tokens == len(self.ids) else self._rolled(num_tokens)

    def extend(self, count: int, taint: int, vocabulary: Sequence[int]) -> None:
        """Append `count` tokens, each chosen from `vocabulary` by all tokens before it and by `taint`."""
        ids, block_tokens, size = self.ids, self.block_tokens, len(vocabulary)
        tip, room = self._tip, self.block_tokens - len(self.ids) % self.block_tokens
        for _ in range(count):
            # The high half of the product chooses: its low bits hardly depend on the digest's high ones.
            token = vocabulary[((((tip ^ taint) * _CHAIN_SPREAD) & MASK) >> 32) * size >> 32]
            ids.append(token)
            room -= 1
            if room:
                tip = (tip * _STEP + token + 1) & MASK
            else:
                tip = self._close_block()
                room = block_tokens
        self._tip = tip

    def _close_block(self) -> int:
        parent = self.blocks[-1] if self.blocks else self._root
        digest = xxh3_64_intdigest(self.ids[-self.block_tokens :], parent)
        self.blocks.append(digest)
        return digest

    def _rolled(self, num_tokens: int) -> int:
        whole = num_tokens // self.block_tokens
        digest = self.blocks[whole - 1] if whole else self._root
        for token in self.ids[whole * self.block_tokens : num_tokens]:
            digest = (digest * _STEP + token + 1) & MASK
        return digest


_WORD_BYTES = 8
_LAYER = 0x9E3779B97F4A7C15
_SPREAD = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(29)

Words = NDArray[np.uint64]


@lru_cache(maxsize=16)
def _ramp(words: int) -> Words:
    # An odd step: no two of the first 2^64 words are equal.
    return np.arange(words, dtype=np.uint64) * np.uint64(0x2545F4914F6CDD1D)


def page_digests(prefix_digests: Sequence[int], layer: int) -> Words:
    """The digest of one layer's page for each prefix that the page ends."""
    words = np.array(prefix_digests, dtype=np.uint64) + np.uint64((_LAYER * (layer + 1)) & MASK)
    words = (words ^ (words >> _SHIFT)) * _SPREAD
    return words ^ (words >> _SHIFT)


def expand(digest: int, page_bytes: int) -> bytes:
    """The page of a digest: 64-bit words digest, digest + step, digest + 2 step, …"""
    out = bytearray(page_bytes)
    PageSource(np.array([digest], dtype=np.uint64), page_bytes).read_into(0, memoryview(out))
    return bytes(out)


def reduce_page(page: bytes | bytearray | memoryview) -> int:
    """A page's digest, a function of every byte: the inverse of `expand`; a hash for what `expand` never makes."""
    words = np.frombuffer(page, dtype="<u8", count=len(page) // _WORD_BYTES)
    if len(words):
        made = _ramp(len(words)) + words[0]
        tail = len(page) % _WORD_BYTES
        if np.array_equal(made, words) and (
            not tail or expand(int(words[0]), len(page))[-tail:] == page[-tail:]
        ):
            return int(words[0])
    return xxh3_64_intdigest(page)


def held_sums(digests: Words) -> KnownSums:
    """The sums of pages as a stand-in holds them: as the one word that the page is made of."""
    return KnownSums(page_sums(digests.view(np.int64).reshape(-1, 1)))


def join(pieces: Sequence[memoryview]) -> bytes | memoryview:
    """Pieces of staging as one buffer, copied only if they are several."""
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class PageSource:
    """Consecutive pages, made when they are read: nothing is stored, and nothing has to be kept for the sender."""

    def __init__(self, digests: Words, page_bytes: int) -> None:
        self._digests = digests
        self._page_bytes = page_bytes

    @property
    def nbytes(self) -> int:
        return len(self._digests) * self._page_bytes

    def views(self, start: int, nbytes: int) -> None:
        """There is no memory to show: pages are made as they are read."""

    def read_into(self, start: int, out: memoryview) -> None:
        done = 0
        while done < out.nbytes:
            page, inside = divmod(start + done, self._page_bytes)
            nbytes = min(out.nbytes - done, self._page_bytes - inside)
            self._fill(self._digests[page], inside, out[done : done + nbytes])
            done += nbytes

    def _fill(self, digest: np.uint64, inside: int, out: memoryview) -> None:
        first, last = inside // _WORD_BYTES, -(-(inside + out.nbytes) // _WORD_BYTES)
        ramp = _ramp(-(-self._page_bytes // _WORD_BYTES))[first:last]
        if inside % _WORD_BYTES == 0 and out.nbytes % _WORD_BYTES == 0:
            np.add(ramp, digest, out=np.frombuffer(out, dtype="<u8"))
        else:
            skip = inside % _WORD_BYTES
            out[:] = (ramp + digest).astype("<u8").tobytes()[skip : skip + out.nbytes]
