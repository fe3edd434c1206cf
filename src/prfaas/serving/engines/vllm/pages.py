"""Engine KV memory seen as opaque pages, and the copies between it and host buffers."""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from prfaas.serving.engines.page_digests import (
    LINE_BYTES,
    WORD_BYTES,
    KnownSums,
    PendingSums,
    byte_sums,
    word_weights,
)
from prfaas.serving.engines.vllm.arena_pages import ArenaPages, Bytes2D

BlockIds = npt.NDArray[np.int64]


class LayoutError(ValueError):
    """A KV tensor whose blocks are not plain pages of memory."""


class PageCopy(Protocol):
    """One page as it was when it was copied."""

    def view(self, start: int, nbytes: int) -> memoryview | None:
        """Bytes [start, start + nbytes) where they lie, None if that is not in host memory."""
        ...

    def read(self, start: int, out: memoryview) -> None:
        """Copy bytes [start, start + len(out)) to host memory; returns when they are there."""
        ...


class WirePages(Protocol):
    """KV of one layer as it travels: equal pages, in whatever memory the engine keeps them."""

    page_bytes: int

    def mark_written(self) -> None:
        """Remember that what the compute stream has queued so far must be done before a read."""
        ...

    def views(self, blocks: BlockIds, start: int, nbytes: int) -> list[memoryview] | None:
        """Bytes [start, start + nbytes) of the pages of `blocks`, one page behind the other, where they lie.

        Returns:
            None: they are not in host memory, or in so many small pieces that a copy costs less.
        """
        ...

    def read(self, blocks: BlockIds, start: int, out: memoryview) -> None:
        """Copy the same bytes to host memory; returns when they are there."""
        ...

    def write_run(self, blocks: Sequence[int], pieces: Sequence[memoryview]) -> None:
        """Fill pages one after the other from consecutive host pieces; done for sure only after `flush`."""
        ...

    def write_summed(self, blocks: Sequence[int], pieces: Sequence[memoryview]) -> PendingSums:
        """As `write_run`; gives the sums of what was written to the pages, and doesn't wait for a device."""
        ...

    def flush(self) -> None:
        """Wait until every write so far is in place."""
        ...

    def sums(self, blocks: Sequence[int]) -> PendingSums:
        """Have the sums of pages computed (see `page_digests`) where they are; doesn't wait for a device.

        They are of what the compute stream has queued to write until now.
        """
        ...

    def copied(self, block: int) -> PageCopy:
        """A copy of one page as it is now, on the same device; doesn't wait for it."""
        ...


class LayerPages(WirePages, Protocol):
    """The pages of an engine's own blocks, one a block; a pool takes and gives them too."""

    raw: torch.Tensor
    """uint8, shape (blocks, bytes of a page), in the engine's memory."""

    def load_from(self, places: ArenaPages, start: int) -> None:
        """Fill pages from host memory, where each begins `start` bytes behind a place; sure only after `flush`."""
        ...

    def store_to(self, places: ArenaPages, start: int) -> None:
        """Copy whole pages to the same places in host memory; returns when they are there."""
        ...


def raw_pages(tensor: torch.Tensor, num_blocks: int, content_bytes: int | None = None) -> torch.Tensor:
    """View a layer's KV tensor as pages that share its memory.

    Works for any dense inner order (NHD, HND) with block as first dimension and for kernel blocks that
    are a whole fraction of a manager's block.

    Args:
        tensor: the layer's KV, blocks in the first dimension.
        num_blocks: blocks of the engine's block manager.
        content_bytes: cuts padding off the end of a page (the row of a linear state is padded to the page of
            the attention layers that it shares memory with).

    Returns:
        uint8, shape (num_blocks, page_bytes).

    Raises:
        LayoutError: the memory of one block is not one dense run of bytes.
    """
    if tensor.dim() < 2 or tensor.shape[0] % num_blocks:
        raise LayoutError(
            f"KV tensor of shape {tuple(tensor.shape)} has no leading dimension of {num_blocks} blocks"
        )
    rows_per_block = tensor.shape[0] // num_blocks
    item_bytes = tensor.element_size()
    row_bytes = tensor[0].numel() * item_bytes
    if _dense_extent(tensor[0]) * item_bytes != row_bytes:
        raise LayoutError(
            f"a block of KV tensor {tuple(tensor.shape)} with strides {tensor.stride()} is not dense"
        )
    stride_bytes = tensor.stride(0) * item_bytes
    if rows_per_block > 1 and stride_bytes != row_bytes:
        raise LayoutError(
            f"{rows_per_block} kernel blocks of one block are not adjacent: strides {tensor.stride()}"
        )
    page_bytes = row_bytes * rows_per_block
    if content_bytes is not None:
        page_bytes = min(page_bytes, content_bytes)
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item_bytes,
        (num_blocks, page_bytes),
        (stride_bytes * rows_per_block, 1),
    )


def whole_pages(page_bytes: int, pieces: Sequence[memoryview]) -> Iterator[tuple[int, int, Bytes2D]]:
    """Cut a run of pages that lies in pieces into (index of a page, offset in it, whole pages or a part of one)."""
    done = 0
    for piece in pieces:
        data = np.frombuffer(piece, dtype=np.uint8)
        while len(data):
            index, start = divmod(done, page_bytes)
            whole = 0 if start else len(data) // page_bytes
            nbytes = whole * page_bytes or min(page_bytes - start, len(data))
            yield index, start, data[:nbytes].reshape(max(whole, 1), -1)
            done, data = done + nbytes, data[nbytes:]


def _dense_extent(block: torch.Tensor) -> int:
    """Elements from the first to the last of a block in memory, whatever the order of its dimensions."""
    return 1 + sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))


class HostPageCopy:
    """A page that was copied in host memory. Satisfies `PageCopy`."""

    def __init__(self, page: Bytes2D) -> None:
        self._page = page

    def view(self, start: int, nbytes: int) -> memoryview:
        return self._page[start : start + nbytes].data

    def read(self, start: int, out: memoryview) -> None:
        np.copyto(np.frombuffer(out, dtype=np.uint8), self._page[start : start + len(out)])


class HostPages:
    """Pages in host memory (vLLM's CPU backend)."""

    # To sum up and send smaller pieces one by one takes longer than to copy them first (measured: from 16 KiB on it
    # does not; without checksums, from 8 KiB on).
    MIN_PIECE_BYTES = 16 << 10

    def __init__(self, raw: torch.Tensor) -> None:
        from prfaas.serving.engines.vllm.host_loops import page_filling, page_summing

        self.raw = raw
        self.page_bytes = raw.shape[1]
        self._pages: Bytes2D = raw.numpy()
        self._stride_bytes = raw.stride(0)
        extent_bytes = (raw.shape[0] - 1) * self._stride_bytes + self.page_bytes
        memory = np.lib.stride_tricks.as_strided(self._pages, (extent_bytes,), (1,))
        self._memory = memory.data
        grain_bytes = gcd(LINE_BYTES, raw.data_ptr(), self.page_bytes, self._stride_bytes)
        is_in_words = grain_bytes % WORD_BYTES == 0
        self._words: npt.NDArray[np.int64] | None = memory.view(np.int64) if is_in_words else None
        """None: the sums of pages are computed of copies."""
        self._sum_pages = page_summing()
        self._fill_pages = page_filling() if grain_bytes == LINE_BYTES else None
        # Each page is one wire page of one run.
        self._dense = np.array([0, self._stride_bytes // WORD_BYTES, raw.shape[0], 1])
        self._run_table = np.array([(0, 0, self.page_bytes // WORD_BYTES)])

    def mark_written(self) -> None:
        """Nothing to remember: host kernels have finished when the hook runs."""

    def views(self, blocks: BlockIds, start: int, nbytes: int) -> list[memoryview] | None:
        pieces = self._pieces(blocks, start, nbytes)
        return None if nbytes < len(pieces) * self.MIN_PIECE_BYTES else pieces

    def _pieces(self, blocks: BlockIds, start: int, nbytes: int) -> list[memoryview]:
        first, end = start // self.page_bytes, start + nbytes
        last = (end - 1) // self.page_bytes
        ids = blocks[first : last + 1]
        # A piece ends where the next page is no neighbour in memory.
        apart = (np.diff(ids) != 1) | (self._stride_bytes != self.page_bytes)
        cuts = np.flatnonzero(apart)
        starts = ids[np.concatenate(([0], cuts + 1))] * self._stride_bytes
        ends = ids[np.concatenate((cuts, [-1]))] * self._stride_bytes + self.page_bytes
        starts[0] += start - first * self.page_bytes
        ends[-1] -= (last + 1) * self.page_bytes - end
        return [self._memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def read(self, blocks: BlockIds, start: int, out: memoryview) -> None:
        # Whole pages in one call, which gives Python's lock away; what is before and behind them by itself.
        page_bytes = self.page_bytes
        first, last = -(-start // page_bytes), (start + len(out)) // page_bytes
        if self._stride_bytes != page_bytes or first >= last:
            self._read_pieces(blocks, start, out)
            return
        head = first * page_bytes - start
        tail = head + (last - first) * page_bytes
        whole = np.frombuffer(out[head:tail], dtype=np.uint8).reshape(-1, page_bytes)
        # Blocks are known to be there: the mode only spares numpy a copy of its own.
        np.take(self._pages, blocks[first:last], axis=0, out=whole, mode="clip")
        self._read_pieces(blocks, start, out[:head])
        self._read_pieces(blocks, start + tail, out[tail:])

    def _read_pieces(self, blocks: BlockIds, start: int, out: memoryview) -> None:
        done = 0
        for piece in self._pieces(blocks, start, len(out)) if out else ():
            out[done : done + len(piece)] = piece
            done += len(piece)

    def write_run(self, blocks: Sequence[int], pieces: Sequence[memoryview]) -> None:
        for index, start, pages in whole_pages(self.page_bytes, pieces):
            if start or pages.shape[1] < self.page_bytes:
                self._pages[blocks[index], start : start + pages.shape[1]] = pages[0]
            else:
                self._pages[list(blocks[index : index + len(pages)])] = pages

    def write_summed(self, blocks: Sequence[int], pieces: Sequence[memoryview]) -> PendingSums:
        if self._fill_pages is None or any(len(piece) % LINE_BYTES for piece in pieces):
            self.write_run(blocks, pieces)
            return self.sums(blocks)
        assert self._words is not None
        ids, sums = np.array(blocks, dtype=np.int64), np.zeros(len(blocks), dtype=np.int64)
        weights, done = word_weights(self.page_bytes // WORD_BYTES), 0
        for piece in pieces:
            words = np.frombuffer(piece, dtype=np.int64)
            self._fill_pages(words, self._words, self._dense, ids, done, *weights, sums)
            done += len(words)
        return KnownSums(sums.view(np.uint64))

    def load_from(self, places: ArenaPages, start: int) -> None:
        pages, arena, nbytes = self._pages, places.arena, self.page_bytes
        for run in places.runs:
            np.copyto(self._run(run.blocks), places.rows(run, start, nbytes))
        for block, offset in places.singles:
            begin = offset + start
            pages[block] = arena[begin : begin + nbytes]

    def store_to(self, places: ArenaPages, start: int) -> None:
        pages, arena, nbytes = self._pages, places.arena, self.page_bytes
        for run in places.runs:
            np.copyto(places.rows(run, start, nbytes), self._run(run.blocks))
        for block, offset in places.singles:
            begin = offset + start
            arena[begin : begin + nbytes] = pages[block]

    def _run(self, blocks: range) -> Bytes2D:
        stop = blocks.stop if blocks.stop >= 0 else None
        return self._pages[blocks.start : stop : blocks.step]

    def flush(self) -> None:
        """Host writes are done when they return."""

    def sums(self, blocks: Sequence[int]) -> PendingSums:
        ids = np.array(blocks, dtype=np.int64)
        if self._words is None:
            return KnownSums(byte_sums(self._pages[ids]))
        sums = np.zeros(len(ids), dtype=np.int64)
        weights = word_weights(self.page_bytes // WORD_BYTES)
        self._sum_pages(self._words, self._dense, ids, self._run_table, 0, *weights, sums)
        return KnownSums(sums.view(np.uint64))

    def copied(self, block: int) -> PageCopy:
        return HostPageCopy(self._pages[block].copy())


class PagedSource:
    """A run of pages of one layer, sent or copied by the transport's writer threads when their turn comes.

    The engine's blocks are the send buffer. Before the engine reuses them (preemption), `detach` copies what is
    left to private memory.
    """

    def __init__(self, pages: WirePages, blocks: Sequence[int], last_page: PageCopy | None = None) -> None:
        """`last_page`: a copy of the last page to read in its place, from `LayerPages.copied`."""
        self.nbytes = len(blocks) * pages.page_bytes
        self._pages = pages
        self._blocks: BlockIds = np.array(blocks, dtype=np.int64)
        self._last_page = last_page
        self._bytes_in_blocks = self.nbytes - (0 if last_page is None else pages.page_bytes)
        self._private: memoryview | None = None

    def views(self, start: int, nbytes: int) -> list[memoryview] | None:
        """Bytes [start, start + nbytes) of the run where they lie; None where they must be copied."""
        if self._private is not None:
            return [self._private[start : start + nbytes]]
        in_blocks = self._count_in_blocks(start, nbytes)
        pieces = self._pages.views(self._blocks, start, in_blocks) if in_blocks else []
        if self._last_page is not None and in_blocks < nbytes:
            copied = self._last_page.view(start + in_blocks - self._bytes_in_blocks, nbytes - in_blocks)
            return None if pieces is None or copied is None else [*pieces, copied]
        return pieces

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy bytes [start, start + len(out)) of the run to `out`."""
        if self._private is not None:
            out[:] = self._private[start : start + len(out)]
        else:
            self._copy(start, out)

    def detach(self) -> None:
        """Show and copy private memory from now on.

        The engine's blocks may be overwritten once nobody uses what was shown before, and no copy of before is
        under way (`SentTransfer.recall`).
        """
        if self._private is None:
            private = memoryview(bytearray(self.nbytes))
            self._copy(0, private)
            self._private = private

    def _copy(self, start: int, out: memoryview) -> None:
        in_blocks = self._count_in_blocks(start, len(out))
        if in_blocks:
            self._pages.read(self._blocks, start, out[:in_blocks])
        if self._last_page is not None and in_blocks < len(out):
            self._last_page.read(start + in_blocks - self._bytes_in_blocks, out[in_blocks:])

    def _count_in_blocks(self, start: int, nbytes: int) -> int:
        return max(0, min(nbytes, self._bytes_in_blocks - start))
