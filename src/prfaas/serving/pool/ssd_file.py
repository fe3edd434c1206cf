"""File of a pool's pages on SSD: their places in it, and how they are written and read."""

import errno
import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from prfaas.core.pool.geometry import SECTOR_BYTES, whole_sectors
from prfaas.core.pool.slabs import SlabAllocator

BLOCK_BYTES = 4096
"""Pages begin at multiples of this in the file, as reads and writes past the page cache need it."""
RUN_BYTES = (1 << 20) + (64 << 10)
"""Most that is read or written at once: a mebibyte of KVCache, and what pages carry besides."""
_MOST_SEGMENT_BYTES = 32 << 20
_FEWEST_SEGMENTS = 64


Bytes: TypeAlias = npt.NDArray[np.uint8]


class SsdFileError(OSError):
    """The file can't be used; the message says why."""


def stored_bytes(page_bytes: int) -> int:
    """Bytes that a page takes in the file."""
    return -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES


class PageRead(NamedTuple):
    """A page on its way back from the file, or one to be verified."""

    offset: int
    """In the file."""
    parts: Sequence[int]
    """Bytes of each piece of the page that has a checksum, one after the other."""
    checksums: Sequence[int]
    """xxh3_64 of each piece."""
    into: Bytes | None
    """Where the bytes go, right or wrong; None: nowhere. It may be longer than the page, up to a multiple of 512. That
    saves a copy, and what is behind the page is overwritten."""

    @property
    def page_bytes(self) -> int:
        """Size of the page."""
        return sum(self.parts)

    @property
    def end(self) -> int:
        """The next page's offset in the file."""
        return self.offset + stored_bytes(self.page_bytes)


class PageWrite(NamedTuple):
    """A page on its way to the file."""

    offset: int
    """In the file."""
    page: Bytes
    """Its bytes, and more up to a multiple of 512 if they are at hand: that saves a copy."""
    page_bytes: int
    rest_from: int
    """End of the ranks' shares in the page."""

    @property
    def end(self) -> int:
        """The next page's offset in the file."""
        return self.offset + stored_bytes(self.page_bytes)


class FileSlots:
    """Allocator of the file's room: of segments of one size, each with pages of one size until it is empty.

    Args:
        file_bytes: Most that the file may take.
        page_bytes: Of a page, by the number of its group.
    """

    def __init__(self, file_bytes: int, page_bytes: Mapping[int, int]) -> None:
        self._stored_bytes = {group: stored_bytes(size) for group, size in page_bytes.items()}
        largest = max(self._stored_bytes.values())
        wanted = min(_MOST_SEGMENT_BYTES, file_bytes // _FEWEST_SEGMENTS)
        self.segment_bytes = largest * max(1, wanted // largest)
        self.segments = file_bytes // self.segment_bytes
        self._slots = SlabAllocator(self.segment_bytes, set(self._stored_bytes.values()))
        for segment in range(self.segments):
            self._slots.add(segment)

    @property
    def file_bytes(self) -> int:
        """Size of all segments."""
        return self.segments * self.segment_bytes

    def stored_bytes(self, group: int) -> int:
        """Bytes that a page of the group takes."""
        return self._stored_bytes[group]

    def take(self, group: int) -> int | None:
        """Take room for a page of the group: its offset in the file, None if there is none."""
        slot = self._slots.take(self._stored_bytes[group])
        return None if slot is None else self._slots.offset(slot)

    def claim(self, group: int, offset: int) -> bool:
        """Take the room at this offset; False if a page of the group can't lie there, or it isn't free."""
        size = self._stored_bytes.get(group, 0)
        if not size or offset % self.segment_bytes % size:
            return False
        segment, inside = divmod(offset, self.segment_bytes)
        return self._slots.claim(segment * self._slots.most_slots + inside // size, size)

    def give_back(self, offset: int) -> None:
        """Give back the room at this offset."""
        self._slots.give_back(self._slots.slot_at(offset))


_ZEROS = memoryview(mmap.mmap(-1, BLOCK_BYTES))


class PieceBuffer:
    """Memory of one thread, through which pages go between file and arena: the kernel wants it aligned."""

    def __init__(self) -> None:
        self._view = memoryview(mmap.mmap(-1, RUN_BYTES))

    def room(self, size_bytes: int) -> memoryview:
        """So much of it, or more. Other memory for a larger page, which seldom goes through any."""
        return self._view if size_bytes <= RUN_BYTES else memoryview(mmap.mmap(-1, size_bytes))


class PageFile:
    """The preallocated file. Its methods may be called from several threads, for different pages.

    Pages bypass the kernel's page cache where the file system allows it, since the arena is the cache. `take_room`
    preallocates; `write` and then `sync` put pages on the disk; `read` gets them back and compares checksums.

    Args:
        path: The file; its folder is there.
        size_bytes: Size of the file from now on.

    Raises:
        OSError: it can't be opened, or there is no room.
        SsdFileError: another process has it.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._fd = self._io_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # Through the page cache memory needs no alignment.
        self._takes_sectors = True
        fds = [self._fd]
        # A replaced file may still be read: it is closed with the last reference.
        self._close = weakref.finalize(self, _close_all, fds)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SsdFileError(errno.EBUSY, "another daemon uses it", str(path)) from None
            self.bytes_before = os.fstat(self._fd).st_size
            self.take_room()
            if (past_cache := self._past_cache()) is not None:
                fds.append(past_cache)
                self._io_fd = past_cache
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; the pages stay."""
        self._close()

    def is_in_place(self) -> bool:
        """True if the path still leads to this file."""
        return leads_to(self._path, self._fd)

    def take_room(self) -> bool:
        """Make the file as large as it is to be.

        Returns:
            Whether it was.

        Raises:
            OSError: there is no room for it.
        """
        before = os.fstat(self._fd).st_size
        if before == self._size_bytes:
            return True
        try:
            os.posix_fallocate(self._fd, 0, self._size_bytes)
        except OSError:
            # Give back the room that it got: others may need it.
            os.ftruncate(self._fd, min(before, self._size_bytes))
            raise
        os.ftruncate(self._fd, self._size_bytes)
        return False

    def write(self, writes: Sequence[PageWrite], buffer: PieceBuffer) -> list[int]:
        """Write a page, or a run of pages. They are on the disk after the next `sync`.

        Args:
            writes: As of `read`.
            buffer: This thread's.

        Returns:
            xxh3_64 of the bytes behind the ranks' shares, of each page.

        Raises:
            OSError: they aren't written, or not all.
        """
        start, size = writes[0].offset, writes[-1].end - writes[0].offset
        direct = [self._direct(write.page, write.page_bytes) for write in writes]
        spare = buffer.room(size if None in direct else 0)
        pieces: list[memoryview] = []
        for write, piece in zip(writes, direct, strict=True):
            if piece is None:
                piece = spare[write.offset - start : write.end - start]
                np.copyto(np.frombuffer(piece, np.uint8, write.page_bytes), write.page[: write.page_bytes])
            pieces += [piece, _ZEROS[: write.end - write.offset - len(piece)]]
        if os.pwritev(self._io_fd, pieces, start) < size:
            raise SsdFileError(errno.EIO, os.strerror(errno.EIO), str(self._path))
        return [xxh3_64_intdigest(write.page.data[write.rest_from : write.page_bytes]) for write in writes]

    def sync(self) -> None:
        """Wait until all that was written is on the disk.

        Raises:
            OSError: it may be there or not.
        """
        os.fdatasync(self._fd)
        if self._io_fd == self._fd:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, reads: Sequence[PageRead], buffer: PieceBuffer) -> list[bool]:
        """Read a page, or a run of pages, and compare their parts with the checksums.

        Args:
            reads: One page; or several that lie one after the other and take at most `RUN_BYTES` of the file.
            buffer: This thread's.

        Returns:
            Whether the bytes of each are those that were written.

        Raises:
            OSError: the disk fails.
        """
        start, size = reads[0].offset, reads[-1].end - reads[0].offset
        direct = [None if read.into is None else self._direct(read.into, read.page_bytes) for read in reads]
        spare = buffer.room(size if None in direct else 0)
        pieces: list[memoryview] = []
        for read, piece in zip(reads, direct, strict=True):
            begin, end = read.offset - start, read.end - start
            # The gap between two pages in the file goes into the buffer.
            pieces += [spare[begin:end]] if piece is None else [piece, spare[begin + len(piece) : end]]
        got = os.preadv(self._io_fd, pieces, start)
        if self._io_fd == self._fd:
            os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_DONTNEED)
        rights = []
        for read, piece in zip(reads, direct, strict=True):
            begin, page_bytes = read.offset - start, read.page_bytes
            if piece is None:
                piece = spare[begin : begin + page_bytes]
                if read.into is not None:
                    np.copyto(read.into[:page_bytes], np.frombuffer(piece, np.uint8))
            ends = itertools.accumulate(read.parts)
            digests = [
                xxh3_64_intdigest(piece[end - part : end]) for part, end in zip(read.parts, ends, strict=True)
            ]
            rights.append(begin + page_bytes <= got and digests == list(read.checksums))
        return rights

    def _direct(self, page: Bytes, page_bytes: int) -> memoryview | None:
        """Memory of a page that the disk can take or fill without a copy; None: it has to go through a buffer."""
        piece = page[: whole_sectors(page_bytes)]
        if not self._takes_sectors or len(piece) % SECTOR_BYTES or piece.ctypes.data % SECTOR_BYTES:
            return None
        return piece.data

    def _past_cache(self) -> int | None:
        """A descriptor that bypasses the page cache; None where the file system has none."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return None
        memory = PieceBuffer().room(BLOCK_BYTES)
        try:
            os.preadv(fd, [memory[:BLOCK_BYTES]], 0)
        except OSError:
            os.close(fd)
            return None
        try:
            os.preadv(fd, [memory[SECTOR_BYTES : 2 * SECTOR_BYTES]], 0)
        except OSError:
            self._takes_sectors = False
        return fd


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write from that offset of an open file on."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def leads_to(path: Path, fd: int) -> bool:
    """True if the path leads to an open file."""
    try:
        there, own = path.stat(), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
