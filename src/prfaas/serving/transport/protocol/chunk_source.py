"""Sources of a transfer's bytes, which stay in their maker's memory until they are sent."""

from typing import Protocol


class SourceGone(Exception):
    """The bytes are gone (blocks were freed, the request was preempted); fails the transfer."""


class ChunkSource(Protocol):
    """`nbytes` of KV that do not change until they are acknowledged, or the transfer is over and quiescent."""

    @property
    def nbytes(self) -> int: ...

    def views(self, start: int, nbytes: int) -> list[memoryview] | None:
        """Views of the memory that holds bytes [start, start + nbytes), in order, for sending without a copy.

        Called by several writer threads at once. The memory must not change until the writer has sent it, or
        `SentTransfer.recall` has returned.

        Returns:
            None: there is no such memory, or only in small pieces; use `read_into`.

        Raises:
            SourceGone: the bytes are no longer there.
        """

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy bytes [start, start + len(out)) into `out`. Called by several writer threads at once.

        May be called more than once for the same bytes (after a lost connection).

        Raises:
            SourceGone: the bytes are no longer there.
        """


class BytesSource:
    """Bytes in host memory, as a `ChunkSource`."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def views(self, start: int, nbytes: int) -> list[memoryview]:
        return [self._view[start : start + nbytes]]

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._view[start : start + out.nbytes]
