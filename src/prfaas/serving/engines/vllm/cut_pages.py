"""Wire pages in an engine's memory: parts of its own pages, or its pages with heads and tokens in another order.

Where wire pages are plain rows of memory, they are pages as any others, and nothing is copied more. Else each one is
gathered from runs that lie apart, and spread over them.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from prfaas.core.kv.page_layout import PageLayout, WirePage
from prfaas.serving.engines.page_digests import WORD_BYTES, KnownSums, PendingSums, byte_sums
from prfaas.serving.engines.vllm.arena_pages import Bytes2D
from prfaas.serving.engines.vllm.dense_sums import DenseSums
from prfaas.serving.engines.vllm.device_pages import DevicePages
from prfaas.serving.engines.vllm.pages import (
    BlockIds,
    HostPageCopy,
    HostPages,
    LayerPages,
    PageCopy,
    WirePages,
    whole_pages,
)
from prfaas.serving.engines.vllm.part_runs import PartRuns

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def cut_pages(pages: LayerPages, layout: PageLayout, form: WirePage) -> WirePages:
    """The wire pages of a layer: those of block b have the numbers b·m to b·m + m − 1, m to a block.

    Args:
        pages: of the engine's blocks.
        layout: theirs; its parts are known.
        form: of the wire pages, which divide `layout.page_tokens`.
    """
    if form.element and form.element != layout.element:
        wide = _cut(DevicePages(pages.raw), layout, form.in_elements(layout.element))
        assert isinstance(wide, DevicePages)
        return ConvertedPages(wide, layout.element, form.element)
    return _cut(pages, layout, form)


def _cut(pages: LayerPages, layout: PageLayout, form: WirePage) -> WirePages:
    raw = pages.raw
    per_block = layout.block_tokens // layout.page_tokens
    page_stride = raw.stride(0) // per_block
    runs = [
        PartRuns.of(part, wire, layout, form.tokens, page_stride)
        for part, wire in zip(layout.parts, form.parts, strict=True)
    ]
    count, page_bytes = raw.shape[0] * per_block, sum(each.nbytes for each in runs)
    cuts, cut_stride = runs[0].cuts, runs[0].cut_stride_bytes
    one_behind_other = cuts == 1 or (len(runs) == 1 and page_stride == cuts * cut_stride)
    if one_behind_other and _are_rows(runs):
        size = (count * cuts, page_bytes)
        stride = page_stride if cuts == 1 else cut_stride
        begin = raw.storage_offset() + runs[0].offset_bytes - runs[0].wire_offset_bytes
        rows = raw.as_strided(size, (stride, 1), begin)
        return HostPages(rows) if isinstance(pages, HostPages) else DevicePages(rows)
    return (
        CutHostPages(raw, runs, count) if isinstance(pages, HostPages) else CutDevicePages(raw, runs, count)
    )


def _are_rows(runs: Sequence[PartRuns]) -> bool:
    """Wire pages lie in memory as they travel."""
    distances = {each.offset_bytes - each.wire_offset_bytes for each in runs}
    return len(distances) == 1 and all(each.is_as_travels for each in runs)


def _grain_bytes(raw: torch.Tensor, runs: Sequence[PartRuns]) -> int:
    """The longest words that all runs consist of: words are copied faster than bytes."""
    page_bytes = sum(each.nbytes for each in runs)
    return gcd(
        WORD_BYTES, page_bytes, raw.storage_offset(), raw.data_ptr(), *(each.grain_bytes for each in runs)
    )


def _long_runs(runs: Sequence[PartRuns], offset_bytes: int) -> list[tuple[int, int, int, tuple[int, int]]]:
    """Where runs lie that are sent one by one, from the first to the last of a wire page; none if one is too short.

    Returns:
        (Place in the wire page, bytes, place in memory of those of the first wire page, distances from one dense page
        and from one wire page in it to the next).
    """
    if min(each.run_bytes for each in runs) < HostPages.MIN_PIECE_BYTES:
        return []
    found: list[tuple[int, int, int, tuple[int, int]]] = []
    for each in runs:
        strides = (each.page_stride_bytes, each.cut_stride_bytes)
        found += [(wire, each.run_bytes, offset_bytes + own, strides) for own, wire in each.places()]
    return sorted(found)


class CutHostPages:
    """Wire pages in host memory, gathered from runs that lie apart in dense pages. Satisfies `WirePages`."""

    def __init__(self, raw: torch.Tensor, runs: Sequence[PartRuns], pages: int) -> None:
        """
        Args:
            raw: the engine's pages.
            runs: of all parts of wire pages.
            pages: how many dense pages there are.
        """
        from prfaas.serving.engines.vllm.host_loops import item_type, run_copying

        self.page_bytes = sum(each.nbytes for each in runs)
        self._cuts = runs[0].cuts
        memory = torch.empty(0, dtype=torch.uint8).set_(
            raw.untyped_storage(), 0, (raw.untyped_storage().nbytes(),), (1,)
        )
        self._memory = memory.numpy().data
        offset_bytes = int(raw.storage_offset())
        table = [
            (place, each.cut_stride_bytes, wire_place, self.page_bytes, each.run_bytes)
            for each in runs
            for place, wire_place in each.places()
        ]
        # In the order in which runs lie in a dense page.
        own = np.array(sorted(table), dtype=np.int64)
        page_stride = runs[0].page_stride_bytes
        item_bytes = gcd(offset_bytes, page_stride, *np.unique(own).tolist())
        self._item = item_type(item_bytes)
        self._items: npt.NDArray[np.void] = np.frombuffer(
            self._memory[: len(self._memory) // item_bytes * item_bytes], self._item
        )
        begin = offset_bytes // item_bytes
        self._places = np.array([begin, page_stride // item_bytes, pages, self._cuts], dtype=np.int64)
        self._out = own // item_bytes
        self._in = np.ascontiguousarray(self._out[:, [2, 3, 0, 1, 4]])
        self._copy = run_copying(item_bytes)
        self._long_runs = _long_runs(runs, offset_bytes)
        is_in_words = _grain_bytes(raw, runs) == WORD_BYTES
        self._dense = DenseSums(self._memory, offset_bytes, pages, runs) if is_in_words else None
        """None: the sums of wire pages are computed of copies."""

    def mark_written(self) -> None:
        """Nothing to remember: host kernels have finished when the hook runs."""

    def views(self, blocks: BlockIds, start: int, nbytes: int) -> list[memoryview] | None:
        if not self._long_runs:
            return None
        end, page_bytes = start + nbytes, self.page_bytes
        pieces: list[memoryview] = []
        for index in range(start // page_bytes, -(-end // page_bytes)):
            page, cut = divmod(int(blocks[index]), self._cuts)
            for place, run_bytes, offset, (page_stride, cut_stride) in self._long_runs:
                begins = index * page_bytes + place
                first, last = max(start - begins, 0), min(end - begins, run_bytes)
                if first < last:
                    at = offset + page * page_stride + cut * cut_stride
                    pieces.append(self._memory[at + first : at + last])
        return pieces

    def read(self, blocks: BlockIds, start: int, out: memoryview) -> None:
        page_bytes = self.page_bytes
        first, last = -(-start // page_bytes), (start + len(out)) // page_bytes
        if first > last:
            # Inside one page.
            begin = start - last * page_bytes
            out[:] = self._gathered(blocks[last : last + 1])[0, begin : begin + len(out)].data
            return
        head = first * page_bytes - start
        tail = head + (last - first) * page_bytes
        if head:
            out[:head] = self._gathered(blocks[first - 1 : first])[0, page_bytes - head :].data
        if tail > head:
            whole = np.frombuffer(out[head:tail], dtype=np.uint8).reshape(-1, page_bytes)
            self._gather(blocks[first:last], whole)
        if tail < len(out):
            out[tail:] = self._gathered(blocks[last : last + 1])[0, : len(out) - tail].data

    def write_run(self, blocks: Sequence[int], pieces: Sequence[memoryview]) -> None:
        torn = np.empty((1, self.page_bytes), dtype=np.uint8)
        for index, start, pages in whole_pages(self.page_bytes, pieces):
            nbytes = pages.shape[1]
            if nbytes == self.page_bytes:
                ids = np.array(blocks[index : index + len(pages)], dtype=np.int64)
                self._spread(ids, pages)
                continue
            # A page whose bytes come in several pieces, one after the other.
            torn[0, start : start + nbytes] = pages[0]
            if start + nbytes == self.page_bytes:
                self._spread(np.array(blocks[index : index + 1], dtype=np.int64), torn)

    def flush(self) -> None:
        """Host writes are done when they return."""

    def write_summed(self, blocks: Sequence[int], pieces: Sequence[memoryview]) -> PendingSums:
        self.write_run(blocks, pieces)
        return self.sums(blocks)

    def sums(self, blocks: Sequence[int]) -> PendingSums:
        ids = np.array(blocks, dtype=np.int64)
        return KnownSums(byte_sums(self._gathered(ids)) if self._dense is None else self._dense.of(ids))

    def copied(self, block: int) -> PageCopy:
        return HostPageCopy(self._gathered(np.array([block]))[0])

    def _gathered(self, ids: BlockIds) -> Bytes2D:
        """A copy of wire pages, one behind the other."""
        pages = np.empty((len(ids), self.page_bytes), dtype=np.uint8)
        self._gather(ids, pages)
        return pages

    def _gather(self, ids: BlockIds, out: Bytes2D) -> None:
        """Copy wire pages by their numbers, one behind the other; raises IndexError: a page is not there."""
        self._copy(self._items, out.reshape(-1).view(self._item), self._places, ids, self._out, True)

    def _spread(self, ids: BlockIds, pages: Bytes2D) -> None:
        """The reverse."""
        self._copy(pages.reshape(-1).view(self._item), self._items, self._places, ids, self._in, False)


class ConvertedPages(DevicePages):
    """Wire pages of 8 bits an element, of an engine that keeps 16: rounded and widened on the way.

    Rounding goes to the nearest element, and to the largest one beyond it, as the kernels of GPUs do. What was widened
    rounds to what it was, so digests are those of the narrow pages at both sides. The copies are those of pages on a
    device, which do the same in host memory.
    """

    def __init__(self, wide: DevicePages, kept: str, travels: str) -> None:
        """
        Args:
            wide: the engine's wire pages.
            kept: its elements; one of `dtypes.ELEMENT_BYTES`, with two bytes.
            travels: those of the wire, with one byte.
        """
        super().__init__(wide.raw, wide.page_bytes // 2)
        self._wide = wide
        self._kept, self._travels = _DTYPES[kept], _DTYPES[travels]
        self._largest = torch.finfo(self._travels).max

    def _run(self, blocks: BlockIds) -> torch.Tensor:
        return self._narrow(self._wide._run(blocks))

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        pages = self._narrow(self._wide._gather(blocks)).view(len(blocks), -1)
        return pages if self.page_bytes % WORD_BYTES else pages.view(torch.int64)

    def _put(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        self._wide._put(blocks, pages.view(self._travels).to(self._kept).view(torch.uint8))

    def _page(self, block: int) -> torch.Tensor:
        return self._narrow(self._wide._page(block))

    def _narrow(self, pages: torch.Tensor) -> torch.Tensor:
        """Bytes one behind the other."""
        elements = pages.view(torch.uint8).view(self._kept).flatten()
        return elements.clamp(-self._largest, self._largest).to(self._travels).view(torch.uint8)


class CutDevicePages(DevicePages):
    """Wire pages in accelerator memory: as `DevicePages`, but for how pages are gathered and spread."""

    def __init__(self, raw: torch.Tensor, runs: Sequence[PartRuns], pages: int) -> None:
        super().__init__(raw, sum(each.nbytes for each in runs))
        self._cuts = runs[0].cuts
        grain = _grain_bytes(raw, runs)
        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[grain]
        memory = torch.empty(0, dtype=dtype, device=raw.device).set_(
            raw.untyped_storage(), 0, (raw.untyped_storage().nbytes() // grain,), (1,)
        )
        self._parts = [
            (
                memory.as_strided(
                    (pages, self._cuts, *each.shape(grain)),
                    (*(stride // grain for stride in each.strides()), 1),
                    (raw.storage_offset() + each.offset_bytes) // grain,
                ),
                each,
            )
            for each in runs
        ]

    def _run(self, blocks: BlockIds) -> torch.Tensor:
        return self._gather(self._lane.ids(blocks)).view(torch.uint8).view(-1)

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        page, cut = blocks // self._cuts, blocks % self._cuts
        ((view, _), *others) = self._parts
        if others:
            whole = torch.empty(
                (len(blocks), self.page_bytes // view.itemsize), dtype=view.dtype, device=view.device
            )
            for view, run in self._parts:
                self._within(whole, view, run).copy_(view[page, cut])
        else:
            # A single part has no gaps.
            whole = view[page, cut].reshape(len(blocks), -1)
        return whole.view(torch.uint8 if self.page_bytes % WORD_BYTES else torch.int64)

    def _put(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        page, cut = blocks // self._cuts, blocks % self._cuts
        for view, run in self._parts:
            view[page, cut] = self._within(pages.view(view.dtype).view(len(blocks), -1), view, run)

    def _within(self, pages: torch.Tensor, view: torch.Tensor, run: PartRuns) -> torch.Tensor:
        """A part of wire pages that lie one behind the other."""
        item_bytes = view.itemsize
        strides = (self.page_bytes, *run.wire_strides(), item_bytes)
        return pages.as_strided(
            (len(pages), *view.shape[2:]),
            tuple(stride // item_bytes for stride in strides),
            pages.storage_offset() + run.wire_offset_bytes // item_bytes,
        )

    def _page(self, block: int) -> torch.Tensor:
        return self._run(np.array([block], dtype=np.int64))
