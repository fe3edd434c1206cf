"""Where the bytes of a chunk come from at the producer."""

from typing import Protocol


class SourceGone(Exception):
    """The bytes are no longer there (blocks were freed, the request was preempted); fails the transfer."""


class ChunkSource(Protocol):
    """`nbytes` of KV that stay the same until they are acknowledged or the transfer is over and quiescent."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy bytes [start, start + len(out)) into `out`. Called by writer threads, several at once.

        May be called more than once for the same bytes (after a lost connection). Raises SourceGone.
        """


class BytesSource:
    """Bytes that lie in host memory already."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._view[start : start + out.nbytes]
