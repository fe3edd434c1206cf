"""Copies between an engine's pages in host memory and wire pages, whose bytes lie apart in these."""

from collections.abc import Sequence
from math import gcd

import numpy as np
import numpy.typing as npt

from prfaas.serving.engines.vllm.arena_pages import Bytes2D
from prfaas.serving.engines.vllm.pages import BlockIds
from prfaas.serving.engines.vllm.part_runs import PartRuns


class HostRuns:
    """All runs of wire pages, in the order in which they lie in a dense page."""

    def __init__(self, memory: memoryview, offset_bytes: int, pages: int, runs: Sequence[PartRuns]) -> None:
        """
        Args:
            memory: the engine's.
            offset_bytes: of the first dense page in it.
            pages: how many dense pages there are.
            runs: of all parts of wire pages.
        """
        from prfaas.serving.engines.vllm.host_loops import item_type, run_copying

        page_bytes = sum(each.nbytes for each in runs)
        table = [
            (place, each.cut_stride_bytes, wire_place, page_bytes, each.run_bytes)
            for each in runs
            for place, wire_place in each.places()
        ]
        own = np.array(sorted(table), dtype=np.int64)
        item_bytes = gcd(offset_bytes, runs[0].page_stride_bytes, *np.unique(own).tolist())
        self._item = item_type(item_bytes)
        self._memory: npt.NDArray[np.void] = np.frombuffer(
            memory[: len(memory) // item_bytes * item_bytes], self._item
        )
        begin, stride = offset_bytes // item_bytes, runs[0].page_stride_bytes // item_bytes
        self._dense = np.array([begin, stride, pages, runs[0].cuts], dtype=np.int64)
        self._out = own // item_bytes
        self._in = np.ascontiguousarray(self._out[:, [2, 3, 0, 1, 4]])
        self._copy = run_copying(item_bytes)

    def gather(self, ids: BlockIds, out: Bytes2D) -> None:
        """Copy wire pages by their numbers, one behind the other.

        Raises:
            IndexError: a page is not there.
        """
        self._copy(self._memory, out.reshape(-1).view(self._item), self._dense, ids, self._out, True)

    def spread(self, ids: BlockIds, pages: Bytes2D) -> None:
        """The reverse."""
        self._copy(pages.reshape(-1).view(self._item), self._memory, self._dense, ids, self._in, False)
