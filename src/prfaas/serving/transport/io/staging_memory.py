"""Memory of staging: pre-faulted, and shared with the other ranks of an engine where it has some."""

import contextlib
import mmap
import os

from prfaas.serving.transport.protocol.staging import Staging

DEFAULT_BLOCK_BYTES = 1 << 20
_PAGE_BYTES = 4096
_TOUCH_BYTES = 64 << 20


class StagingArena(Staging):
    """Staging in memory of this process."""

    def __init__(
        self, total_bytes: int, block_bytes: int = DEFAULT_BLOCK_BYTES, buffer: memoryview | None = None
    ) -> None:
        """All memory is touched once here, since first touches run at about 1.4 GB/s.

        Args:
            total_bytes: rounded down to whole blocks.
            block_bytes: size of a transfer block.
            buffer: used in place of an anonymous mapping (pinned memory, for instance); writable, at least
                `total_bytes` long.

        Raises:
            ValueError: there is no room for one block, or the buffer is unfit.
        """
        if block_bytes <= 0 or total_bytes < block_bytes:
            raise ValueError(
                f"staging of {total_bytes} bytes has no room for one block of {block_bytes} bytes"
            )
        nbytes = total_bytes // block_bytes * block_bytes
        if buffer is None:
            buffer = _anonymous(nbytes)
        flat = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        if flat.readonly or flat.nbytes < nbytes:
            raise ValueError(f"staging buffer must be writable and hold {nbytes} bytes, it has {flat.nbytes}")
        super().__init__(flat[:nbytes], block_bytes)
        _touch(self.buffer)


def _anonymous(nbytes: int) -> memoryview:
    # Private, not Python's default shared mapping: shared anonymous memory is tmpfs and cannot use huge pages
    # here.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def shared_memory(nbytes: int) -> tuple[int, memoryview]:
    """Memory that other processes can map: a file descriptor, and the mapping of this process.

    Raises:
        OSError: the machine has none.
    """
    fd = os.memfd_create("prfaas-staging")
    os.ftruncate(fd, nbytes)
    return fd, mapped_memory(fd, nbytes)


def mapped_memory(fd: int, nbytes: int) -> memoryview:
    """Map memory that another process made with `shared_memory`. Raises OSError."""
    return memoryview(mmap.mmap(fd, nbytes))


def _touch(buffer: memoryview) -> None:
    for start in range(0, buffer.nbytes, _TOUCH_BYTES):
        part = buffer[start : start + _TOUCH_BYTES]
        part[::_PAGE_BYTES] = bytes(-(-part.nbytes // _PAGE_BYTES))
