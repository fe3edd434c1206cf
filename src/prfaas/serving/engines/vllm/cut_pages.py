"""Wire pages in an engine's memory: parts of its own pages, or its pages with heads and tokens in another order.

Where wire pages are plain rows of memory, they are pages as any others, and nothing is copied more. Else each one is
gathered from runs of equal length at equal distances, and spread over them.
"""

from collections.abc import Iterator, Sequence
from math import gcd, prod

import numpy as np
import torch

from prfaas.core.kv.page_layout import PageLayout, PagePart, WirePage
from prfaas.serving.engines.page_digests import WORD_BYTES, KnownSums, PendingSums, Sums, page_sums
from prfaas.serving.engines.vllm.arena_pages import Bytes2D
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

# For their sums, pages are gathered in the processor's cache.
_STEP_BYTES = 256 << 10


class _Runs:
    """Where the bytes of one part of each wire page lie."""

    def __init__(self, part: PagePart, layout: PageLayout, form: WirePage, page_stride_bytes: int) -> None:
        """`page_stride_bytes`: from one dense page to the next."""
        rows = [(part.heads, part.head_stride_bytes), (part.rows, part.row_stride_bytes)]
        tokens = [(form.tokens, part.token_stride_bytes)]
        inner = [*tokens, *rows] if form.tokens_outside else [*rows, *tokens]
        self.nbytes = part.heads * part.rows * form.tokens * part.width_bytes
        self.offset = part.offset_bytes
        self.outer = (
            (layout.page_tokens // form.tokens, form.tokens * part.token_stride_bytes),
            page_stride_bytes,
        )
        self.inner = _joined([*inner, (part.width_bytes, 1)])
        """(number, distance in bytes), the last of them of bytes that lie together."""

    @property
    def grain_bytes(self) -> int:
        """Divides all lengths and distances."""
        (_, cut_stride), page_stride = self.outer
        run_bytes = self.inner[-1][0]
        return gcd(
            run_bytes, self.offset, cut_stride, page_stride, *(stride for _, stride in self.inner[:-1])
        )

    def shape(self, pages: int, item_bytes: int) -> tuple[int, ...]:
        """(pages, wire pages in one, …) in items."""
        (cuts, _), _ = self.outer
        *numbers, run_bytes = (number for number, _ in self.inner)
        return (pages, cuts, *numbers, run_bytes // item_bytes)

    def strides(self, item_bytes: int) -> tuple[int, ...]:
        """Of that shape, in items."""
        (_, cut_stride), page_stride = self.outer
        strides = (page_stride, cut_stride, *(stride for _, stride in self.inner[:-1]))
        return (*(stride // item_bytes for stride in strides), 1)


def _joined(dimensions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in fewer dimensions: (number, distance), from outside in."""
    joined: list[tuple[int, int]] = [dimensions[-1]]
    for number, stride in reversed(dimensions[:-1]):
        inside, inside_stride = joined[0]
        if number == 1:
            continue
        if stride == inside * inside_stride:
            joined[0] = (number * inside, inside_stride)
        else:
            joined.insert(0, (number, stride))
    return joined


def cut_pages(pages: LayerPages, layout: PageLayout, form: WirePage) -> WirePages:
    """The wire pages of a layer: those of block b have the numbers b·m to b·m + m − 1, m to a block.

    Args:
        pages: of the engine's blocks.
        layout: theirs; its parts are known.
        form: of the wire pages, which divide `layout.page_tokens`.
    """
    raw = pages.raw
    per_block = layout.block_tokens // layout.page_tokens
    page_stride = raw.stride(0) // per_block
    runs = [_Runs(part, layout, form, page_stride) for part in layout.parts]
    count = raw.shape[0] * per_block
    (cuts, cut_stride), _ = runs[0].outer
    if len(runs) == 1 and len(runs[0].inner) == 1 and (cuts == 1 or page_stride == cuts * cut_stride):
        size = (count * cuts, runs[0].nbytes)
        stride = page_stride if cuts == 1 else cut_stride
        rows = raw.as_strided(size, (stride, 1), raw.storage_offset() + runs[0].offset)
        return HostPages(rows) if isinstance(pages, HostPages) else DevicePages(rows)
    return (
        CutHostPages(raw, runs, count) if isinstance(pages, HostPages) else CutDevicePages(raw, runs, count)
    )


class _Parts:
    """The parts of all wire pages, as shapes over the engine's memory."""

    def __init__(self, raw: torch.Tensor, runs: Sequence[_Runs], pages: int) -> None:
        grain = gcd(WORD_BYTES, raw.storage_offset(), raw.data_ptr(), *(each.grain_bytes for each in runs))
        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[grain]
        # Words are copied faster than bytes.
        memory = torch.empty(0, dtype=dtype, device=raw.device).set_(
            raw.untyped_storage(), 0, (raw.untyped_storage().nbytes() // grain,), (1,)
        )
        self.item_bytes = grain
        self.cuts = runs[0].outer[0][0]
        """Wire pages in one dense page."""
        self.page_bytes = sum(each.nbytes for each in runs)
        self.views = [
            memory.as_strided(
                each.shape(pages, grain),
                each.strides(grain),
                (raw.storage_offset() + each.offset) // grain,
            )
            for each in runs
        ]

    def places(self, shapes: Sequence[tuple[int, ...]]) -> Iterator[slice]:
        """Where each part of these shapes lies in a wire page, in items."""
        begin = 0
        for shape in shapes:
            items = prod(shape[2:])
            yield slice(begin, begin + items)
            begin += items


class CutHostPages:
    """Wire pages in host memory. Satisfies `WirePages`."""

    def __init__(self, raw: torch.Tensor, runs: Sequence[_Runs], pages: int) -> None:
        parts = _Parts(raw, runs, pages)
        self.page_bytes = parts.page_bytes
        self._cuts = parts.cuts
        views = [view.numpy() for view in parts.views]
        self._dtype = views[0].dtype
        self._parts = list(zip(views, parts.places([view.shape for view in views]), strict=True))

    def mark_written(self) -> None:
        """Nothing to remember: host kernels have finished when the hook runs."""

    def views(self, blocks: BlockIds, start: int, nbytes: int) -> list[memoryview] | None:
        """None: they lie in many small pieces."""

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
                self._spread(np.array(blocks[index : index + len(pages)]), pages)
                continue
            # A page whose bytes come in several pieces, one after the other.
            torn[0, start : start + nbytes] = pages[0]
            if start + nbytes == self.page_bytes:
                self._spread(np.array(blocks[index : index + 1]), torn)

    def flush(self) -> None:
        """Host writes are done when they return."""

    def sums(self, blocks: Sequence[int], *, loaded: bool) -> PendingSums:
        del loaded  # host kernels and host copies have finished alike
        sums: list[Sums] = []
        for ids in self._steps(np.array(blocks, dtype=np.int64)):
            pages = self._gathered(ids)
            if missing := -self.page_bytes % WORD_BYTES:
                pages = np.pad(pages, ((0, 0), (0, missing)))
            sums.append(page_sums(pages.view(np.int64), overwrite=True))
        return KnownSums(np.concatenate(sums) if sums else np.empty(0, dtype=np.uint64))

    def copied(self, block: int) -> PageCopy:
        return HostPageCopy(self._gathered(np.array([block]))[0])

    def _steps(self, blocks: BlockIds) -> Iterator[BlockIds]:
        step = max(1, _STEP_BYTES // self.page_bytes)
        for first in range(0, len(blocks), step):
            yield blocks[first : first + step]

    def _stretches(self, ids: BlockIds) -> list[tuple[slice, int, slice]]:
        """Neighbours in one dense page: which of `ids`, the page, and which of its wire pages."""
        pages, cuts = np.divmod(ids, self._cuts)
        apart = np.flatnonzero((np.diff(pages) != 0) | (np.diff(cuts) != 1)) + 1
        begins = [0, *apart.tolist()]
        ends = [*apart.tolist(), len(ids)]
        return [
            (slice(begin, end), int(pages[begin]), slice(int(cuts[begin]), int(cuts[begin]) + end - begin))
            for begin, end in zip(begins, ends, strict=True)
        ]

    def _gathered(self, ids: BlockIds) -> Bytes2D:
        """A copy of wire pages, one behind the other."""
        pages = np.empty((len(ids), self.page_bytes), dtype=np.uint8)
        self._gather(ids, pages)
        return pages

    def _gather(self, ids: BlockIds, out: Bytes2D) -> None:
        # Page by page, without a copy on the way.
        words, stretches = out.view(self._dtype), self._stretches(ids)
        for view, place in self._parts:
            inner = words[:, place].reshape(len(ids), *view.shape[2:])
            for which, page, cuts in stretches:
                inner[which] = view[page, cuts]

    def _spread(self, ids: BlockIds, pages: Bytes2D) -> None:
        words, stretches = np.ascontiguousarray(pages).view(self._dtype), self._stretches(ids)
        for view, place in self._parts:
            inner = words[:, place].reshape(len(ids), *view.shape[2:])
            for which, page, cuts in stretches:
                view[page, cuts] = inner[which]


class CutDevicePages(DevicePages):
    """Wire pages in accelerator memory: as `DevicePages`, but for how pages are gathered and spread."""

    def __init__(self, raw: torch.Tensor, runs: Sequence[_Runs], pages: int) -> None:
        parts = _Parts(raw, runs, pages)
        super().__init__(raw, parts.page_bytes)
        self._cuts = parts.cuts
        self._parts = list(zip(parts.views, parts.places([view.shape for view in parts.views]), strict=True))

    def _run(self, blocks: BlockIds) -> torch.Tensor:
        return self._gather(self._lane.ids(blocks)).view(torch.uint8).view(-1)

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        page, cut = blocks // self._cuts, blocks % self._cuts
        found = [view[page, cut].reshape(len(blocks), -1) for view, _ in self._parts]
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return whole.view(torch.uint8 if self.page_bytes % WORD_BYTES else torch.int64)

    def _put(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        page, cut = blocks // self._cuts, blocks % self._cuts
        for view, place in self._parts:
            items = pages.view(view.dtype).view(len(blocks), -1)[:, place]
            view[page, cut] = items.reshape(len(blocks), *view.shape[2:])

    def _page(self, block: int) -> torch.Tensor:
        return self._run(np.array([block], dtype=np.int64))
