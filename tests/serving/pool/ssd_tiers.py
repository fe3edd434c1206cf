"""A tier on SSD over a small arena, and a loop that the test turns by hand."""

import mmap
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from xxhash import xxh3_64_intdigest

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.eviction import LruEviction
from prfaas.core.pool.geometry import PageGroup, PageIdentity, PoolGeometry, whole_sectors
from prfaas.core.pool.keys import page_id
from prfaas.serving.pool.ssd_tier import FileTier, SsdEntry, SsdOptions

GEOMETRY = PoolGeometry(
    "model",
    2,
    (
        PageGroup(0, GroupKind.FULL, 16, 0, 2048),
        PageGroup(1, GroupKind.STATE, 16, 0, 9 * 1024),
    ),
)
LEAD, STATE = 0, 1
MOST_BYTES = 1 << 20
SLOTS = 32


class HandTurnedLoop:
    """Keeps what it is to call until somebody waits for it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def in_loop(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def turn(self) -> None:
        """Call what is there now."""
        while True:
            try:
                self._calls.get_nowait()()
            except Empty:
                return

    def until(self, is_done: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Go on until something is so."""
        end = time.monotonic() + timeout_s
        while not is_done():
            assert time.monotonic() < end, "it took too long"
            try:
                self._calls.get(timeout=0.05)()
            except Empty:
                continue


class SsdPool:
    """A tier and an arena with room for a few pages."""

    def __init__(
        self,
        folder: Path,
        most_bytes: int = MOST_BYTES,
        geometry: PoolGeometry = GEOMETRY,
        tenant_share: float = 1.0,
        retry_s: float = 0.05,
        most_queued_bytes: int = 256 << 20,
        is_aligned: bool = True,
    ) -> None:
        self.geometry = geometry
        self.loop = HandTurnedLoop()
        largest = max(geometry.page_bytes(group.index) for group in geometry.groups)
        self.slot_bytes = whole_sectors(largest) if is_aligned else largest
        # Pages that begin anywhere can't go to the disk without a copy.
        self.arena = memoryview(mmap.mmap(-1, SLOTS * self.slot_bytes + 64))[0 if is_aligned else 64 :]
        self.dropped: list[bytes] = []
        self.tier = FileTier(
            geometry,
            self.arena,
            SsdOptions(folder, most_bytes, tenant_share, most_queued_bytes, retry_s),
            LruEviction,
            self.loop.in_loop,
        )
        self.tier.attach(self.dropped.append)

    def entry(self, number: int, group: int = LEAD, tenant: bytes = b"") -> SsdEntry:
        """The page of that number; its bytes follow from it."""
        key = number.to_bytes(16, "big")
        identity = PageIdentity(b"", bytes(4 * 16), f"salt {number}", "") if group == LEAD else None
        content, rank_bytes = self.content(number, group), self.geometry.group(group).rank_bytes
        checksums = tuple(
            xxh3_64_intdigest(content[rank * rank_bytes : (rank + 1) * rank_bytes])
            for rank in range(self.geometry.ranks)
        )
        return SsdEntry(page_id(key, group), identity, checksums, tenant)

    def content(self, number: int, group: int = LEAD) -> bytes:
        return random.Random(number * 2 + group).randbytes(self.geometry.page_bytes(group))

    def write(self, number: int, group: int = LEAD, tenant: bytes = b"") -> bool:
        """Write a page and wait for it."""
        return self.write_all([number], group, tenant)

    def write_all(self, numbers: Iterable[int], group: int = LEAD, tenant: bytes = b"") -> bool:
        """Write pages, as many at a time as the tier takes. Returns whether all were written."""
        left, results, given = list(numbers), list[bool](), 0
        while left:
            number, begin = left.pop(0), given % SLOTS * self.slot_bytes
            content = self.content(number, group)
            self.arena[begin : begin + len(content)] = content
            self.tier.write(self.entry(number, group, tenant), begin, results.append)
            given += 1
            if given % SLOTS == 0 or not left or not self.tier.takes_more:
                self.loop.until(lambda: len(results) == given)  # noqa: B023
        return all(results)

    def read(self, number: int, group: int = LEAD) -> bytes | None:
        """Read a page and wait for it; None: it is said to be wrong."""
        return self.read_all([number], group)[0]

    def read_all(self, numbers: Sequence[int], group: int = LEAD) -> list[bytes | None]:
        """Read pages, not more than there are slots, and wait for all of them."""
        size, rights = self.geometry.page_bytes(group), dict[int, bool]()
        for slot, number in enumerate(numbers):
            begin = slot * self.slot_bytes
            self.arena[begin : begin + size] = bytes(size)
            self.tier.read(self.entry(number, group).page_id, begin, partial(rights.__setitem__, slot))
        self.loop.until(lambda: len(rights) == len(numbers))
        return [
            bytes(self.arena[slot * self.slot_bytes :][:size]) if rights[slot] else None
            for slot in range(len(numbers))
        ]

    def holds(self, number: int, group: int = LEAD) -> bool:
        return self.tier.entry(self.entry(number, group).page_id) is not None

    def verify(self) -> tuple[int, int]:
        """Numbers of right and wrong pages."""
        results: list[tuple[int, int]] = []
        self.tier.verify(lambda right, wrong: results.append((right, wrong)))
        self.loop.until(lambda: bool(results))
        return results[0]

    def close(self) -> None:
        self.tier.close()
        self.loop.turn()


def folder_bytes(folder: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in folder.iterdir())
