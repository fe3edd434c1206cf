"""The consumer's bounded host memory for transfers: one buffer cut into equal transfer blocks, and who holds them.

A transfer holds a lease of blocks; a complete one is handed to the engine as a `StagedTransfer`. Nothing here is
thread-safe: whoever shares a transfer table shares its staging with it.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.serving.transport.protocol.ticket import Ticket


@dataclass(frozen=True, slots=True)
class _Extent:
    """Neighbouring blocks of one lease."""

    start: int
    """Offset in the lease, in bytes."""
    physical: int
    """Offset in the buffer, in bytes."""
    nbytes: int


class Staging:
    """Transfer blocks of `block_bytes`, handed out as leases."""

    def __init__(self, buffer: memoryview, block_bytes: int) -> None:
        """`buffer`: writable, of whole blocks."""
        self.buffer = buffer
        self.block_bytes = block_bytes
        self.total_blocks = buffer.nbytes // block_bytes
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
        if wanted > len(self._free):
            return None
        blocks = [heapq.heappop(self._free) for _ in range(wanted)]
        self.peak_used_blocks = max(self.peak_used_blocks, self.used_blocks)
        return StagingLease(self, nbytes, blocks)

    def give_back(self, blocks: list[int]) -> None:
        """Take the blocks of a lease that nobody holds any more."""
        for block in blocks:
            heapq.heappush(self._free, block)


class MappedArena:
    """The staging of another process: its leases are read here, and handed out and freed there."""

    def __init__(self, buffer: memoryview, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.buffer = buffer

    def lease(self, nbytes: int, blocks: Sequence[int]) -> "StagingLease":
        """A lease that was handed out there."""
        return StagingLease(self, nbytes, list(blocks))

    def give_back(self, blocks: list[int]) -> None:
        """Nothing to do: the lender learns it by a `GaveBack` frame."""


class StagingLease:
    """`nbytes` of staging, addressed logically from 0; freed exactly once by each holder, mostly a single one."""

    def __init__(self, lender: "Staging | MappedArena", nbytes: int, blocks: list[int]) -> None:
        self.nbytes = nbytes
        self._lender = lender
        self._blocks: list[int] | None = blocks
        self._holders = 1
        self._extents = _extents_of(blocks, lender.block_bytes)
        self._starts = [extent.start for extent in self._extents]

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks that it lies in, in order; none once it was freed."""
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
            pieces.append(self._lender.buffer[extent.physical + inside : extent.physical + inside + take])
            offset, nbytes, index = offset + take, nbytes - take, index + 1
        return pieces

    def share(self) -> None:
        """One more holder: the blocks are given back once each has called `free`."""
        self._holders += 1

    def free(self) -> None:
        """Give the blocks back, if nobody else holds them.

        Raises:
            RuntimeError: they were given back already.
        """
        if self._blocks is None:
            raise RuntimeError("staging lease was freed already")
        self._holders -= 1
        if not self._holders:
            blocks, self._blocks = self._blocks, None
            self._lender.give_back(blocks)


def _extents_of(blocks: list[int], block_bytes: int) -> list[_Extent]:
    extents: list[_Extent] = []
    for index, block in enumerate(blocks):
        last = extents[-1] if extents else None
        if last is not None and last.physical + last.nbytes == block * block_bytes:
            extents[-1] = _Extent(last.start, last.physical, last.nbytes + block_bytes)
        else:
            extents.append(_Extent(index * block_bytes, block * block_bytes, block_bytes))
    return extents


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
        on_free: Callable[["StagedTransfer"], None],
        checkpoint: "StagedTransfer | None" = None,
    ) -> None:
        """`on_free`: carries `free` out, by `release`, where all that share the staging agree on who is next."""
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
        self._on_free(self)

    def release(self) -> None:
        """Give the leases back. Raises as `free`."""
        self._lease.free()
        if self.checkpoint is not None:
            self.checkpoint.release()
