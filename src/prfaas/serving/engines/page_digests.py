"""Digests of KV pages: computed where a page is, sent with the transfer, compared when a decode engine loads it.

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, groupby
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prfaas.core.kv.groups import GroupKind, KvGroup, Region, region_bytes, usable_tokens
from prfaas.serving.transport.protocol.staging import StagedRegions

DIGEST_FORMAT = "v2"
"""Names the function above, and the digests' order, in the layout fingerprint."""
DIGEST_BYTES = 8
WORD_BYTES = 8
LINE_BYTES = 64
"""Of a processor's cache: pages that begin and end with one are summed up while they are written."""

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


def page_sums(words: NDArray[np.int64]) -> Sums:
    """The sums of pages in host memory, in several passes.

    Args:
        words: shape (pages, words).

    Returns:
        Shape (pages,).
    """
    low, high = word_weights(words.shape[1])
    sums: NDArray[np.int64] = np.einsum("ij,j->i", words, low)
    sums += np.einsum("ij,j->i", words >> 32, high)
    return sums.view(np.uint64)


def byte_sums(pages: NDArray[np.uint8]) -> Sums:
    """The same of pages that may end inside a word; shape (pages, bytes)."""
    return page_sums(np.pad(pages, ((0, 0), (0, -pages.shape[1] % WORD_BYTES))).view(np.int64))


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
    """Places of pages' digests in transfers: in one more region, by groups, then by blocks, then by layers.

    So what a chunk of a prefill completes lies together, and can leave with the chunk. A plan that is not `digested` is
    of transfers whose pages travel without: it has the same regions, and no more.
    """

    def __init__(
        self, regions: Sequence[Region], layers: Sequence[str], rank: int, *, digested: bool = True
    ) -> None:
        """
        Args:
            regions: of a transfer, in its order.
            layers: the name of each region's layer (with the number of the tensor, if a layer has several).
            rank: the tensor-parallel rank of this engine process.
            digested: pages travel with digests.
        """
        self.regions = tuple(regions)
        self.layers = tuple(layers)
        self.rank = rank
        self.digested = digested

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """Sizes of all regions of a transfer, the digests' at the end.

        Raises:
            ValueError: there can be no such transfer.
        """
        pages = region_bytes(self.regions, num_tokens, skip_tokens)
        if not self.digested:
            return pages
        return [*pages, DIGEST_BYTES * _places(self.regions, num_tokens, skip_tokens)[1]]

    def usable_tokens(
        self,
        num_tokens: int,
        skip_tokens: int,
        covered_end: Callable[[int, int], int],
        checkpoints: Collection[int] = (),
    ) -> int:
        """See `kv.groups.usable_tokens`; pages count only with their digests."""
        digested_end = self.digested_end(num_tokens, skip_tokens, covered_end)
        return usable_tokens(self.regions, num_tokens, skip_tokens, digested_end, checkpoints)

    def digested_end(
        self, num_tokens: int, skip_tokens: int, covered_end: Callable[[int, int], int]
    ) -> Callable[[int, int], int]:
        """(region, start) → where the bytes of pages end that have come from there on, and their digests too."""
        if not self.digested:
            return covered_end
        places, _ = _places(self.regions, num_tokens, skip_tokens)

        def end(index: int, start: int) -> int:
            place, page_bytes = places[index], self.regions[index].page_bytes
            first = DIGEST_BYTES * place.start
            rows = (covered_end(len(self.regions), first) - first) // (DIGEST_BYTES * place.layers)
            return min(covered_end(index, start), rows * page_bytes)

        return end

    def checkpoint(self) -> "DigestPlan":
        """The plan of a checkpoint: of layers with a state or a window alone.

        Raises:
            ValueError: there are none.
        """
        kinds = [region.group.kind is not GroupKind.FULL for region in self.regions]
        if not any(kinds):
            raise ValueError("these layers have no checkpoints")
        regions, layers = compress(self.regions, kinds), compress(self.layers, kinds)
        return DigestPlan(tuple(regions), tuple(layers), self.rank, digested=self.digested)

    def checkpoint_bytes(self, num_tokens: int) -> list[int]:
        """Sizes of all regions of a checkpoint after so many tokens; raises as `checkpoint`."""
        return self.checkpoint().region_bytes(num_tokens, 0)

    def of_transfer(self, transfer_id: bytes, num_tokens: int, skip_tokens: int) -> "TransferDigests":
        """The plan of one transfer."""
        return TransferDigests(self, transfer_id, num_tokens, skip_tokens)


class TransferDigests:
    """The digests of one transfer: their places, and what they must be. Of one without them, nothing is checked."""

    def __init__(self, plan: DigestPlan, transfer_id: bytes, num_tokens: int, skip_tokens: int) -> None:
        self.region = len(plan.regions)
        """Number of the region in which they travel."""
        self._plan = plan
        self._transfer_id = transfer_id
        self.is_empty = not plan.digested
        """Pages travel without."""
        self.places, pages = _places(plan.regions, num_tokens, skip_tokens)
        self.nbytes = 0 if self.is_empty else DIGEST_BYTES * pages
        """Size of the region."""
        self._sent: Sums | None = None

    def index(self, region: int, block: int) -> int:
        """Index of the digest of a block of a region, among all of the transfer."""
        place = self.places[region]
        return place.start + (block - place.first_block) * place.layers + place.position

    def indices(self, region: int, first_block: int, blocks: int) -> slice:
        """Those of consecutive blocks."""
        first, step = self.index(region, first_block), self.places[region].layers
        return slice(first, first + blocks * step, step)

    def bind(self, region: int, first_block: int, sums: Sums) -> Sums:
        """The digests of consecutive blocks of a region with these sums."""
        place = [DIGEST_FORMAT, self._transfer_id.hex(), self._plan.rank, self._plan.layers[region]]
        key = hashlib.blake2b(json.dumps(place).encode(), digest_size=DIGEST_BYTES).digest()
        blocks = np.arange(first_block, first_block + len(sums), dtype=np.uint64)
        return _mix(sums ^ _mix(blocks + np.frombuffer(key, dtype="<u8")))

    def check(self, staged: StagedRegions, region: int, first_block: int, sums: Sums) -> None:
        """Compare loaded pages with the digests that came with them, in the same staging at every call.

        Raises:
            PageDigestError: one differs.
        """
        if self.is_empty:
            return
        if self._sent is None:
            self._sent = np.frombuffer(
                b"".join(staged.region_views(self.region, 0, self.nbytes)), dtype="<u8"
            )
        sent = self._sent[self.indices(region, first_block, len(sums))]
        differ = np.flatnonzero(self.bind(region, first_block, sums) != sent)
        if len(differ):
            raise PageDigestError(
                f"block {first_block + int(differ[0])} of layer {self._plan.layers[region]} is not what the prefill "
                f"engine computed ({len(differ)} of the {len(sums)} loaded blocks of this layer differ)"
            )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the digests of one region lie among those of a transfer."""

    start: int
    """Of the first one of its group."""
    first_block: int
    """The block that it is of."""
    layers: int
    """Digests of one block: one for each region of the group."""
    position: int
    """Of this region among them."""


def _places(regions: Sequence[Region], num_tokens: int, skip_tokens: int) -> tuple[list[_Place], int]:
    """Where the digests of each region lie, and how many there are."""
    places: list[_Place] = []
    start = 0
    for _, members in groupby(regions, key=lambda region: _extent(region.group)):
        alike = list(members)
        moving, layers = alike[0].group.moving_blocks(num_tokens, skip_tokens), len(alike)
        places += (_Place(start, moving.start, layers, position) for position in range(layers))
        start += layers * len(moving)
    return places, start


def _extent(group: KvGroup) -> tuple[object, ...]:
    """What a group's moving blocks follow from. How an engine groups layers that are alike is its own affair."""
    return group.kind, group.block_tokens, group.window_tokens


class DigestRun:
    """Neighbouring digests of a transfer, as a source: read once the pages' sums are there. Thread-safe."""

    def __init__(
        self, digests: TransferDigests, first: int, count: int, parts: Sequence[tuple[int, int, PendingSums]]
    ) -> None:
        """`parts`: (region, first block, sums) of the pages that [first, first + count) are the digests of."""
        self.offset = DIGEST_BYTES * first
        """In their region, in bytes."""
        self.nbytes = DIGEST_BYTES * count
        self._digests = digests
        self._parts = list(parts)
        self._gathered: memoryview | None = None
        self._lock = Lock()

    def views(self, start: int, nbytes: int) -> list[memoryview]:
        """Bytes [start, start + nbytes) of the run; waits for the sums."""
        with self._lock:
            if self._gathered is None:
                self._gathered = memoryview(self._gather())
                self._parts.clear()
        return [self._gathered[start : start + nbytes]]

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy bytes [start, start + len(out)) of the run; waits for the sums."""
        out[:] = self.views(start, len(out))[0]

    def _gather(self) -> bytes:
        gathered = np.zeros(self.nbytes // DIGEST_BYTES, dtype="<u8")
        first = self.offset // DIGEST_BYTES
        for region, first_block, pending in self._parts:
            bound = self._digests.bind(region, first_block, pending.wait())
            where = self._digests.indices(region, first_block, len(bound))
            gathered[where.start - first : where.stop - first : where.step] = bound
        return gathered.tobytes()


class DigestSource:
    """The digests of one transfer: noted as pages are computed, given out in runs."""

    def __init__(self, digests: TransferDigests) -> None:
        self.region = digests.region
        self.nbytes = digests.nbytes
        self.is_empty = digests.is_empty
        """Pages travel without: nothing is noted, and nothing given out."""
        self._digests = digests
        self._parts: list[tuple[int, int, PendingSums, int]] = []
        # Up to where digests were given out, by the start of their group; a group of nothing has none.
        self._given = {place.start: place.start for place in digests.places}

    def add(self, region: int, first_block: int, sums: PendingSums, blocks: int) -> None:
        """Note the sums of so many consecutive blocks, the next ones of their region."""
        if blocks and not self.is_empty:
            self._parts.append((region, first_block, sums, blocks))

    def take(self, *, final: bool) -> list[DigestRun]:
        """What was noted since the last call. Before the `final` one only blocks of which every layer is there."""
        runs: list[DigestRun] = []
        if self.is_empty:
            return runs
        starts = sorted(self._given)
        for start, last in zip(starts, [*starts[1:], self.nbytes // DIGEST_BYTES], strict=True):
            begun, end = self._given[start], last if final else self._complete_end(start)
            if end > begun:
                mine = [part for part in self._parts if self._start_of(part[0]) == start]
                self._parts = [part for part in self._parts if self._start_of(part[0]) != start]
                self._given[start] = end
                runs.append(DigestRun(self._digests, begun, end - begun, [part[:3] for part in mine]))
        return runs

    def _start_of(self, region: int) -> int:
        return self._digests.places[region].start

    def _complete_end(self, start: int) -> int:
        """Up to where the digests of a group can be given out: all of what was noted, if all layers have as much."""
        places = self._digests.places
        ends = {region: self._given[start] for region, place in enumerate(places) if place.start == start}
        for region, first_block, _, blocks in self._parts:
            if region in ends:
                ends[region] = self._digests.index(region, first_block + blocks) - places[region].position
        return ends.popitem()[1] if len(set(ends.values())) == 1 else self._given[start]
