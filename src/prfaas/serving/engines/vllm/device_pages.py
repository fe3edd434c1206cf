"""Engine KV in an accelerator's memory: whole runs of pages are gathered there and cross to host memory in one copy.

Also runs on CPU tensors (streams, events and pinning fall away), which is how its logic is tested.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np
import torch

from prfaas.serving.engines.page_digests import WORD_BYTES, PendingSums, Sums, word_weights
from prfaas.serving.engines.vllm.arena_pages import ArenaPages
from prfaas.serving.engines.vllm.pages import BlockIds, HostPages, LayerPages, PageCopy

_GATHER_BYTES = 16 * 1024 * 1024


class _Lane(threading.local):
    """What one thread copies with: a stream beside the compute stream, pinned host memory, memory on the device.

    Threads don't wait for each other's copies. Layers share a lane, since a thread copies one run at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.on_device else None
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._page_host = torch.empty(0, dtype=torch.uint8)
        self._gathered = torch.empty(0, dtype=torch.uint8, device=device)

    def running(self) -> "AbstractContextManager[object]":
        """Run what is queued inside on this thread's stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def wait(self) -> None:
        """Until everything that was queued here is done; the thread sleeps meanwhile."""
        if self.stream is not None:
            event = torch.cuda.Event(blocking=True)
            event.record(self.stream)
            event.synchronize()

    def host(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory for a run; the same at every call."""
        if len(self._host) < nbytes:
            self._host = self._pinned(nbytes)
        return self._host[:nbytes]

    def page_host(self, nbytes: int) -> torch.Tensor:
        """Host memory for a single page, beside a run."""
        if len(self._page_host) < nbytes:
            self._page_host = self._pinned(nbytes)
        return self._page_host[:nbytes]

    def gathered(self, nbytes: int) -> torch.Tensor:
        """Memory on the device for pages one behind the other; the same at every call."""
        if len(self._gathered) < nbytes:
            self._gathered = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._gathered[:nbytes]

    def ids(self, blocks: BlockIds) -> torch.Tensor:
        """Numbers of blocks on the device; from pinned memory, since a copy from other memory would wait."""
        ids = torch.tensor(blocks, dtype=torch.int64, pin_memory=self.on_device)
        return ids.to(self._device, non_blocking=True)

    def _pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.on_device)


@cache
def _lane_of(device: torch.device) -> _Lane:
    return _Lane(device)


class _DeviceSums:
    """Sums on their way from a device to pinned host memory."""

    def __init__(self, sums: torch.Tensor) -> None:
        """Queues the copy behind what computes the sums, on the current stream."""
        on_device = sums.device.type == "cuda"
        self._host = torch.empty(sums.shape, dtype=torch.int64, pin_memory=on_device)
        self._host.copy_(sums, non_blocking=True)
        self._copied = torch.cuda.Event() if on_device else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(sums.device))

    def wait(self) -> Sums:
        if self._copied is not None:
            self._copied.synchronize()
        sums: Sums = self._host.numpy().view(np.uint64)
        return sums


class DevicePages:
    """Pages in accelerator memory: for each chunk one gather, one copy through pinned memory and one event."""

    # Pages whose sums are computed at once are gathered first, and so are pages that are written: bounds that memory.
    SUM_BYTES = _GATHER_BYTES
    WRITE_BYTES = _GATHER_BYTES

    def __init__(self, raw: torch.Tensor, page_bytes: int = 0) -> None:
        """`page_bytes`: of pages that are gathered otherwise than as rows of `raw`."""
        self.page_bytes = page_bytes or raw.shape[1]
        self.raw = raw
        self._on_device = raw.device.type == "cuda"
        self._lane = _lane_of(raw.device)
        self._weights = _weights(-(-self.page_bytes // WORD_BYTES), raw.device)
        in_words = not any(
            nbytes % WORD_BYTES for nbytes in (raw.storage_offset(), *raw.shape[1:], raw.stride(0))
        )
        # Gathering pages by words is faster than by bytes, where they lie on words.
        self._words = raw.view(torch.int64) if in_words else raw
        self._written: torch.cuda.Event | None = None

    def mark_written(self) -> None:
        if self._on_device:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.raw.device))
            self._written = event

    def views(self, blocks: BlockIds, start: int, nbytes: int) -> list[memoryview]:
        """A copy in pinned memory, which this thread's next call of `views` or `read` overwrites."""
        lane, page_bytes = self._lane, self.page_bytes
        first, last = start // page_bytes, -(-(start + nbytes) // page_bytes)
        host = lane.host(nbytes)
        with lane.running():
            self._after_writes()
            pages = self._run(blocks[first:last])
            begin = start - first * page_bytes
            host.copy_(pages[begin : begin + nbytes], non_blocking=True)
        lane.wait()
        return [host.numpy().data]

    def read(self, blocks: BlockIds, start: int, out: memoryview) -> None:
        (view,) = self.views(blocks, start, len(out))
        out[:] = view

    def write_run(self, blocks: Sequence[int], pieces: Sequence[memoryview]) -> None:
        most = max(1, self.WRITE_BYTES // self.page_bytes)
        waiting = list(pieces)
        lane = self._lane
        with lane.running():
            self._after_writes()
            for first in range(0, len(blocks), most):
                ids = lane.ids(np.array(blocks[first : first + most], dtype=np.int64))
                pages = lane.gathered(len(ids) * self.page_bytes)
                _fill(pages, waiting)
                self._put(ids, pages)

    def load_from(self, places: ArenaPages, start: int) -> None:
        pages = (places.arena[offset + start :][: self.page_bytes] for offset in places.offsets)
        self.write_run(places.blocks, [page.data for page in pages])

    def store_to(self, places: ArenaPages, start: int) -> None:
        blocks = np.array(places.blocks, dtype=np.int64)
        (view,) = self.views(blocks, 0, len(blocks) * self.page_bytes)
        pages = np.frombuffer(view, dtype=np.uint8).reshape(len(blocks), -1)
        for offset, page in zip(places.offsets, pages, strict=True):
            places.arena[offset + start :][: self.page_bytes] = page

    def flush(self) -> None:
        self._lane.wait()

    def write_summed(self, blocks: Sequence[int], pieces: Sequence[memoryview]) -> PendingSums:
        self.write_run(blocks, pieces)
        with self._lane.running():
            return self.sums(blocks)

    def sums(self, blocks: Sequence[int]) -> PendingSums:
        ids = self._lane.ids(np.array(blocks, dtype=np.int64))
        parts = [self._sum(part) for part in ids.split(max(1, self.SUM_BYTES // self.page_bytes))]
        return _DeviceSums(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _sum(self, blocks: torch.Tensor) -> torch.Tensor:
        words = self._gather(blocks)
        if words.dtype is torch.uint8:
            missing = -self.page_bytes % WORD_BYTES
            words = torch.nn.functional.pad(words, (0, missing)).view(torch.int64)
        low, high = self._weights
        sums: torch.Tensor = (words * low).sum(1) + ((words >> 32) * high).sum(1)
        return sums

    def copied(self, block: int) -> PageCopy:
        page = self._page(block)
        self.mark_written()
        return _DevicePageCopy(self, page)

    def page_view(self, page: torch.Tensor, start: int, nbytes: int) -> memoryview:
        """Bytes of a copied page in pinned memory, beside what `views` shows; this thread's next call overwrites it."""
        host = self._lane.page_host(nbytes)
        with self._lane.running():
            self._after_writes()
            host.copy_(page[start : start + nbytes], non_blocking=True)
        self._lane.wait()
        return host.numpy().data

    def _run(self, blocks: BlockIds) -> torch.Tensor:
        """The pages of `blocks`, one behind the other on the device; neighbours need not be gathered."""
        first, count = int(blocks[0]), len(blocks)
        if self.raw.is_contiguous() and (count == 1 or bool((np.diff(blocks) == 1).all())):
            return self.raw[first : first + count].view(-1)
        if count == 1:
            return self.raw[first]
        gathered = self._lane.gathered(count * self.page_bytes)
        rows = gathered.view(self._words.dtype).view(count, -1)
        torch.index_select(self._words, 0, self._lane.ids(blocks), out=rows)
        return gathered

    # How pages lie in the engine's memory.

    def _gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of pages: int64, or uint8 where they don't lie on words; one row each."""
        return self._words.index_select(0, blocks)

    def _put(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Fill pages from bytes one behind the other."""
        self._words.index_copy_(0, blocks, pages.view(self._words.dtype).view(len(blocks), -1))

    def _page(self, block: int) -> torch.Tensor:
        """A copy of one."""
        return self.raw[block].clone()

    def _after_writes(self) -> None:
        if self._lane.stream is not None and self._written is not None:
            self._lane.stream.wait_event(self._written)


class _DevicePageCopy:
    def __init__(self, pages: DevicePages, page: torch.Tensor) -> None:
        self._pages = pages
        self._page = page

    def view(self, start: int, nbytes: int) -> memoryview:
        return self._pages.page_view(self._page, start, nbytes)

    def read(self, start: int, out: memoryview) -> None:
        out[:] = self._pages.page_view(self._page, start, len(out))


def _fill(pages: torch.Tensor, waiting: list[memoryview]) -> None:
    """Take bytes off the front of `waiting`, which is pinned on a device engine, until `pages` is full."""
    done = 0
    while done < len(pages):
        piece = waiting.pop(0)
        count = min(len(piece), len(pages) - done)
        source = torch.from_numpy(np.frombuffer(piece[:count], dtype=np.uint8))
        pages[done : done + count].copy_(source, non_blocking=True)
        if count < len(piece):
            waiting.insert(0, piece[count:])
        done += count


@cache
def _weights(words: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # A copy that waits: every stream may use them when it returns.
    low, high = (torch.from_numpy(weights.copy()).to(device) for weights in word_weights(words))
    return low, high


def layer_pages(raw: torch.Tensor) -> LayerPages:
    """Choose the copies by where the KV lives."""
    return HostPages(raw) if raw.device.type == "cpu" else DevicePages(raw)
