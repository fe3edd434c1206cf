"""Digests of KV pages: computed where a page is, sent with the transfer, compared in the decode engine's block.

A page is cut into 64-bit little-endian words x, the last one filled up with zeros. Its sum is

    S = Σ a_i · x_i + Σ b_i · (x_i >> 32)   modulo 2^64, with signed x_i

with fixed odd pseudo-random a_i and b_i: a multilinear hash over the 32-bit halves (Lemire and Kaser, "Strongly
universal string hashing is fast", 2014). Any change within one half is seen for certain, since a_i and
b_i + 2^32 a_i are odd. Any other change is missed with probability at most 2^-32 over the choice of the weights.

The digest is the sum mixed with the place of the page: transfer, rank, layer and block of the prompt. So equal pages
at different places have different digests, and pages that change places with their digests are seen too.
Needs neither torch nor vLLM.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prfaas.core.kv.groups import Region, region_bytes
from prfaas.serving.transport.staging import StagedTransfer

DIGEST_FORMAT = "v1"
"""Names the function above in the layout fingerprint."""
DIGEST_BYTES = 8
WORD_BYTES = 8

Sums = NDArray[np.uint64]
Weights = NDArray[np.int64]

# splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit words that mixes every bit into every other.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


class PageDigestError(RuntimeError):
    """A loaded page is not the one that the prefill engine computed."""


def _mix(words: Sums) -> Sums:
    words = words + _STEP
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


@lru_cache(maxsize=64)
def word_weights(words: int) -> tuple[Weights, Weights]:
    """The weights of the words of a page, and those of their upper halves; both of shape (words,), odd."""
    odd = _mix(np.arange(2 * words, dtype=np.uint64) * _STEP) | np.uint64(1)
    low, high = odd[0::2].copy().view(np.int64), odd[1::2].copy().view(np.int64)
    low.flags.writeable = high.flags.writeable = False
    return low, high


def page_sums(words: NDArray[np.int64], *, overwrite: bool = False) -> Sums:
    """The sums of pages in host memory.

    Args:
        words: shape (pages, words); best not more than the processor's cache holds.
        overwrite: `words` is a copy that is needed for nothing else, which spares another one.

    Returns:
        Shape (pages,).
    """
    low, high = word_weights(words.shape[1])
    sums: NDArray[np.int64] = np.einsum("ij,j->i", words, low)
    upper_halves = np.right_shift(words, 32, out=words if overwrite else None)
    sums += np.einsum("ij,j->i", upper_halves, high)
    return sums.view(np.uint64)


class PendingSums(Protocol):
    """Sums of pages that a device may still be computing."""

    def wait(self) -> Sums:
        """The sums, one for each page; returns when they are there."""
        ...


@dataclass(frozen=True, slots=True)
class KnownSums:
    """Sums that were computed at once."""

    sums: Sums

    def wait(self) -> Sums:
        return self.sums


class DigestPlan:
    """Where the digests of pages lie in transfers: in one more region, by regions, then by blocks."""

    def __init__(self, regions: Sequence[Region], layers: Sequence[str], rank: int) -> None:
        """
        Args:
            regions: of a transfer, in its order.
            layers: the name of each region's layer (with the number of the tensor, if a layer has several).
            rank: the tensor-parallel rank of this engine process.
        """
        self.regions = tuple(regions)
        self.layers = tuple(layers)
        self.rank = rank

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """Sizes of all regions of a transfer, the digests' at the end.

        Raises:
            ValueError: there can be no such transfer.
        """
        pages = region_bytes(self.regions, num_tokens, skip_tokens)
        return [*pages, DIGEST_BYTES * _first_pages(self.regions, num_tokens, skip_tokens)[-1]]

    def of_transfer(self, transfer_id: bytes, num_tokens: int, skip_tokens: int) -> "TransferDigests":
        """The plan of one transfer."""
        return TransferDigests(self, transfer_id, num_tokens, skip_tokens)


class TransferDigests:
    """The digests of one transfer: their places, and what they must be."""

    def __init__(self, plan: DigestPlan, transfer_id: bytes, num_tokens: int, skip_tokens: int) -> None:
        self.region = len(plan.regions)
        """Number of the region in which they travel."""
        self._plan = plan
        self._transfer_id = transfer_id
        self._skipped_blocks = [r.group.first_block(num_tokens, skip_tokens) for r in plan.regions]
        self._first_pages = _first_pages(plan.regions, num_tokens, skip_tokens)

    @property
    def nbytes(self) -> int:
        """Size of the region."""
        return DIGEST_BYTES * self._first_pages[-1]

    def index(self, region: int, first_block: int) -> int:
        """Index of the digest of block `first_block` of a region, among all of the transfer."""
        return self._first_pages[region] + first_block - self._skipped_blocks[region]

    def bind(self, region: int, first_block: int, sums: Sums) -> Sums:
        """The digests of consecutive blocks of a region with these sums."""
        place = [DIGEST_FORMAT, self._transfer_id.hex(), self._plan.rank, self._plan.layers[region]]
        key = hashlib.blake2b(json.dumps(place).encode(), digest_size=DIGEST_BYTES).digest()
        blocks = np.arange(first_block, first_block + len(sums), dtype=np.uint64)
        return _mix(sums ^ _mix(blocks + np.frombuffer(key, dtype="<u8")))

    def check(self, staged: StagedTransfer, region: int, first_block: int, sums: Sums) -> None:
        """Compare loaded pages with the digests that came with them.

        Raises:
            PageDigestError: one differs.
        """
        offset = DIGEST_BYTES * self.index(region, first_block)
        sent = b"".join(staged.region_views(self.region, offset, DIGEST_BYTES * len(sums)))
        differ = np.flatnonzero(self.bind(region, first_block, sums) != np.frombuffer(sent, dtype="<u8"))
        if len(differ):
            raise PageDigestError(
                f"block {first_block + int(differ[0])} of layer {self._plan.layers[region]} is not what the prefill "
                f"engine computed ({len(differ)} of the {len(sums)} loaded blocks of this layer differ)"
            )


def _first_pages(regions: Sequence[Region], num_tokens: int, skip_tokens: int) -> list[int]:
    """Index of the first page of each region among all pages, and the number of pages."""
    counts = (len(region.group.moving_blocks(num_tokens, skip_tokens)) for region in regions)
    return list(accumulate(counts, initial=0))


class DigestSource:
    """The region of digests of one transfer: gathered as pages are computed, read when all of them are."""

    def __init__(self, digests: TransferDigests) -> None:
        self.region = digests.region
        self.nbytes = digests.nbytes
        self._digests = digests
        self._parts: list[tuple[int, int, PendingSums]] = []
        self._gathered: memoryview | None = None
        self._lock = Lock()

    def add(self, region: int, first_block: int, sums: PendingSums) -> None:
        """Note the sums of consecutive blocks; before the source is put."""
        self._parts.append((region, first_block, sums))

    def views(self, start: int, nbytes: int) -> list[memoryview]:
        """Bytes [start, start + nbytes) of the region; waits for the sums."""
        with self._lock:
            if self._gathered is None:
                self._gathered = memoryview(self._gather())
                self._parts.clear()
        return [self._gathered[start : start + nbytes]]

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy bytes [start, start + len(out)) of the region; waits for the sums."""
        out[:] = self.views(start, len(out))[0]

    def _gather(self) -> bytes:
        gathered = np.zeros(self.nbytes // DIGEST_BYTES, dtype="<u8")
        for region, first_block, pending in self._parts:
            digests = self._digests.bind(region, first_block, pending.wait())
            first = self._digests.index(region, first_block)
            gathered[first : first + len(digests)] = digests
        return gathered.tobytes()
