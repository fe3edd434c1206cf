"""The consumer's bounded host memory for transfers: one pre-faulted buffer cut into equal transfer blocks.

A transfer holds a lease of blocks; a complete one is handed to the engine as a `StagedTransfer`.
"""

import contextlib
import heapq
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.serving.transport.ticket import Ticket

DEFAULT_BLOCK_BYTES = 1 << 20
_PAGE_BYTES = 4096
_TOUCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Extent:
    """Neighbouring blocks of one lease."""

    start: int
    """Offset in the lease, in bytes."""
    physical: int
    """Offset in the arena's buffer, in bytes."""
    nbytes: int


class StagingArena:
    """Transfer blocks of `block_bytes`, handed out as leases; thread-safe."""

    def __init__(
        self, total_bytes: int, block_bytes: int = DEFAULT_BLOCK_BYTES, buffer: memoryview | None = None
    ) -> None:
        """All memory is touched once here, since first touches run at about 1.4 GB/s.

        Args:
            total_bytes: rounded down to whole blocks.
            block_bytes: size of a transfer block.
            buffer: used in place of an anonymous mapping (pinned memory, for instance); writable, at least
                `total_bytes` long.

        Raises:
            ValueError: there is no room for one block, or the buffer is unfit.
        """
        if block_bytes <= 0 or total_bytes < block_bytes:
            raise ValueError(
                f"staging of {total_bytes} bytes has no room for one block of {block_bytes} bytes"
            )
        self.block_bytes = block_bytes
        self.total_blocks = total_bytes // block_bytes
        nbytes = self.total_blocks * block_bytes
        if buffer is None:
            buffer = _anonymous(nbytes)
        flat = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        if flat.readonly or flat.nbytes < nbytes:
            raise ValueError(f"staging buffer must be writable and hold {nbytes} bytes, it has {flat.nbytes}")
        self._buffer = flat[:nbytes]
        _touch(self._buffer)
        self._lock = threading.Lock()
        self._free = list(range(self.total_blocks))  # a heap: lowest first keeps leases contiguous
        self.peak_used_blocks = 0
        """The most blocks that were ever taken."""

    @property
    def total_bytes(self) -> int:
        return self.total_blocks * self.block_bytes

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - len(self._free)

    def gauges(self) -> dict[str, int]:
        """Sizes and use, as observers get them."""
        return {
            "staging_used_blocks": self.used_blocks,
            "staging_peak_blocks": self.peak_used_blocks,
            "staging_total_blocks": self.total_blocks,
            "staging_block_bytes": self.block_bytes,
        }

    def blocks_for(self, nbytes: int) -> int:
        """Blocks that a lease of `nbytes` takes (a lease of nothing takes none)."""
        return -(-nbytes // self.block_bytes)

    def allocate(self, nbytes: int) -> "StagingLease | None":
        """A lease of `nbytes`, or None while too few blocks are free.

        Raises:
            ValueError: it could never fit.
        """
        if nbytes < 0:
            raise ValueError(f"a staging lease of {nbytes} bytes makes no sense")
        wanted = self.blocks_for(nbytes)
        if wanted > self.total_blocks:
            raise ValueError(f"{nbytes} bytes can never fit into staging of {self.total_bytes} bytes")
        with self._lock:
            if wanted > len(self._free):
                return None
            blocks = [heapq.heappop(self._free) for _ in range(wanted)]
            self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks)
        return StagingLease(self, nbytes, blocks)

    def _give_back(self, blocks: list[int]) -> None:
        with self._lock:
            for block in blocks:
                heapq.heappush(self._free, block)


class StagingLease:
    """`nbytes` of staging, addressed logically from 0; freed exactly once by each holder, mostly a single one."""

    def __init__(self, arena: "StagingArena | MappedArena", nbytes: int, blocks: list[int]) -> None:
        self.nbytes = nbytes
        self._arena = arena
        self._blocks: list[int] | None = blocks
        self._holders = 1
        self._extents = _extents_of(blocks, arena.block_bytes)
        self._starts = [extent.start for extent in self._extents]
        self._lock = threading.Lock()

    @property
    def blocks(self) -> tuple[int, ...]:
        """The arena's blocks that it lies in, in order; none once it was freed."""
        return tuple(self._blocks or ())

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Writable pieces that together are bytes [offset, offset + nbytes) of the lease, in order.

        A piece must not be used after `free`.

        Raises:
            ValueError: outside the lease.
            RuntimeError: the lease was freed.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"range {offset}+{nbytes} lies outside a staging lease of {self.nbytes} bytes")
        if self._blocks is None:
            raise RuntimeError("staging lease was freed already")
        pieces: list[memoryview] = []
        index = bisect_right(self._starts, offset) - 1
        while nbytes > 0:
            extent = self._extents[index]
            inside = offset - extent.start
            take = min(nbytes, extent.nbytes - inside)
            pieces.append(self._arena._buffer[extent.physical + inside : extent.physical + inside + take])
            offset, nbytes, index = offset + take, nbytes - take, index + 1
        return pieces

    def share(self) -> None:
        """One more holder: the blocks are given back once each has called `free`."""
        with self._lock:
            self._holders += 1

    def free(self) -> None:
        """Give the blocks back, if nobody else holds them.

        Raises:
            RuntimeError: they were given back already.
        """
        with self._lock:
            if self._blocks is None:
                raise RuntimeError("staging lease was freed already")
            self._holders -= 1
            if self._holders:
                return
            blocks, self._blocks = self._blocks, None
        self._arena._give_back(blocks)


def _extents_of(blocks: list[int], block_bytes: int) -> list[_Extent]:
    extents: list[_Extent] = []
    for index, block in enumerate(blocks):
        last = extents[-1] if extents else None
        if last is not None and last.physical + last.nbytes == block * block_bytes:
            extents[-1] = _Extent(last.start, last.physical, last.nbytes + block_bytes)
        else:
            extents.append(_Extent(index * block_bytes, block * block_bytes, block_bytes))
    return extents


def _anonymous(nbytes: int) -> memoryview:
    # Private, not Python's default shared mapping: shared anonymous memory is tmpfs and cannot use huge pages
    # here.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def shared_memory(nbytes: int) -> tuple[int, memoryview]:
    """Memory that other processes can map: a file descriptor, and the mapping of this process.

    Raises:
        OSError: the machine has none.
    """
    fd = os.memfd_create("prfaas-staging")
    os.ftruncate(fd, nbytes)
    return fd, mapped_memory(fd, nbytes)


def mapped_memory(fd: int, nbytes: int) -> memoryview:
    """Map memory that another process made with `shared_memory`. Raises OSError."""
    return memoryview(mmap.mmap(fd, nbytes))


class MappedArena:
    """The staging of another process: its leases are read here, and handed out and freed there."""

    def __init__(self, buffer: memoryview, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._buffer = buffer

    def lease(self, nbytes: int, blocks: Sequence[int]) -> "StagingLease":
        """A lease that was handed out there."""
        return StagingLease(self, nbytes, list(blocks))

    def _give_back(self, blocks: list[int]) -> None:
        """Nothing to do: the lender learns it by a `GaveBack` frame."""


def _touch(buffer: memoryview) -> None:
    for start in range(0, buffer.nbytes, _TOUCH_BYTES):
        part = buffer[start : start + _TOUCH_BYTES]
        part[::_PAGE_BYTES] = bytes(-(-part.nbytes // _PAGE_BYTES))


class StagedRegions:
    """The regions of one transfer in its staging."""

    def __init__(
        self, lease: StagingLease, region_starts: Sequence[int], region_bytes: Sequence[int]
    ) -> None:
        self.region_bytes = tuple(region_bytes)
        self._region_starts = region_starts
        self._lease = lease

    def region_views(self, region: int, offset: int, nbytes: int) -> list[memoryview]:
        """Pieces that together are bytes [offset, offset + nbytes) of `region`, in order.

        Region starts are 64-byte aligned in staging, pieces end at transfer-block boundaries. No piece may be
        used after the staging was freed.

        Raises:
            ValueError: outside the region.
            RuntimeError: the staging was freed.
        """
        if not 0 <= region < len(self.region_bytes):
            raise ValueError(f"region {region} is not one of the {len(self.region_bytes)} of this transfer")
        size = self.region_bytes[region]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ValueError(f"range {offset}+{nbytes} lies outside region {region} of {size} bytes")
        return self._lease.views(self._region_starts[region] + offset, nbytes)


class StagedTransfer(StagedRegions):
    """The verified bytes of every region of one transfer; the engine owns it until it calls `free`."""

    def __init__(
        self,
        *,
        ticket: Ticket,
        region_starts: Sequence[int],
        region_bytes: Sequence[int],
        lease: StagingLease,
        on_free: Callable[[], None],
        checkpoint: "StagedTransfer | None" = None,
    ) -> None:
        super().__init__(lease, region_starts, region_bytes)
        self.checkpoint = checkpoint
        """Of a partial transfer: the states and windows after its usable tokens."""
        self.transfer_id = ticket.transfer_id
        self.num_tokens, self.skip_tokens = ticket.num_tokens, ticket.skip_tokens
        self.prompt_digest = ticket.prompt_digest
        self._on_free = on_free

    def free(self) -> None:
        """Give the staging back and let waiting transfers in.

        Raises:
            RuntimeError: it was given back already.
        """
        self._lease.free()
        if self.checkpoint is not None:
            self.checkpoint.free()
        self._on_free()
