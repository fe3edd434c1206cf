"""Where the bytes of a transfer are until they are sent: with whoever made them."""

from typing import Protocol


class SourceGone(Exception):
    """The bytes are no longer there (blocks were freed, the request was preempted); fails the transfer."""


class ChunkSource(Protocol):
    """`nbytes` of KV that stay the same until they are acknowledged or the transfer is over and quiescent."""

    @property
    def nbytes(self) -> int: ...

    def views(self, start: int, nbytes: int) -> list[memoryview] | None:
        """The memory itself that holds bytes [start, start + nbytes), in order, to be sent without a copy.

        Called by writer threads, several at once. The memory stays as it is until the writer has sent it, or
        until `OutgoingTransfer.recall` has returned.

        Returns:
            None: the memory cannot be shown, or not well; the bytes must be copied by `read_into`.

        Raises:
            SourceGone: the bytes are no longer there.
        """

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy bytes [start, start + len(out)) into `out`. Called by writer threads, several at once.

        May be called more than once for the same bytes (after a lost connection).

        Raises:
            SourceGone: the bytes are no longer there.
        """


class BytesSource:
    """Bytes that lie in host memory already."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def views(self, start: int, nbytes: int) -> list[memoryview]:
        return [self._view[start : start + nbytes]]

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._view[start : start + out.nbytes]
