"""Places of pages in shared host memory, cut into runs that one copy can move."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes1D = npt.NDArray[np.uint8]
Bytes2D = npt.NDArray[np.uint8]

# A shorter run takes longer to describe than to copy page by page.
_SHORTEST_RUN = 4


class PageRun(NamedTuple):
    """Blocks at equal distances whose pages lie at equal distances, too."""

    blocks: range
    offset: int
    """Of the first page."""
    stride_bytes: int
    """From one page to the next; can be negative."""


class ArenaPages:
    """Pages in an arena, one for each of some blocks of a KV group.

    An engine's blocks and an arena's slots are handed out in order, upwards or downwards, as long as they are new.
    Small pages are copied several times as fast in runs as one by one.
    """

    def __init__(self, arena: Bytes1D, blocks: Sequence[int], offsets: Sequence[int]) -> None:
        """
        Args:
            arena: all of it.
            blocks: numbers of the engine's blocks.
            offsets: where the page of each block begins in the arena.
        """
        self.arena = arena
        self.blocks = blocks
        self.offsets = offsets
        self.runs: list[PageRun] = []
        self.singles: list[tuple[int, int]] = []
        """Blocks outside runs, and the offsets of their pages."""
        self._find_runs()

    def rows(self, run: PageRun, start: int, nbytes: int) -> Bytes2D:
        """Bytes [start, start + nbytes) of each page of a run; shares the arena's memory.

        Raises:
            ValueError: they lie outside the arena.
        """
        shape = (len(run.blocks), nbytes)
        return np.ndarray(shape, np.uint8, self.arena.data, run.offset + start, (run.stride_bytes, 1))

    def _find_runs(self) -> None:
        blocks, offsets = self.blocks, self.offsets
        start, count = 0, len(blocks)
        while start < count:
            end = start + 1
            if count - start >= _SHORTEST_RUN:
                step, stride = blocks[end] - blocks[start], offsets[end] - offsets[start]
                end += 1
                while (
                    end < count
                    and blocks[end] - blocks[end - 1] == step
                    and offsets[end] - offsets[end - 1] == stride
                ):
                    end += 1
                if end - start >= _SHORTEST_RUN and step:
                    first = blocks[start]
                    run = range(first, first + step * (end - start), step)
                    self.runs.append(PageRun(run, offsets[start], stride))
                    start = end
                    continue
                # The last of a broken run may begin another one.
                end = max(start + 1, end - 1)
            self.singles.extend(zip(blocks[start:end], offsets[start:end], strict=True))
            start = end
