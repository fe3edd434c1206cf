"""A pool's arena: one file of shared memory with a header, the page table and the slabs of pages.

It outlives the daemon, so that the next one finds the pages again. Its size never changes, so every mapping of it
stays readable. Another geometry gets a new file.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from prfaas.core.pool.geometry import PoolGeometry, slot_sizes
from prfaas.core.pool.slabs import slab_size
from prfaas.core.units import format_bytes
from prfaas.serving.pool.page_table import MOST_RANKS, PageTable, row_bytes

logger = logging.getLogger(__name__)

_MAGIC = b"PRFAASP1"
_VERSION = 1
_PAGE_BYTES = 4096
_LIBC = ctypes.CDLL(None)
# MADV_POPULATE_WRITE of Linux.
_POPULATE_WRITE = 23
# Magic, version, length of the geometry, epoch, slabs provided, pool.memory, digest of the geometry, which follows.
_HEADER = struct.Struct("<8sIIQQQ16s")
_NUMBER = struct.Struct("<Q")
_EPOCH_AT = 16
_PROVIDED_AT = 24
_GEOMETRY_AT = _HEADER.size
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class ArenaError(Exception):
    """An arena of this size cannot be here; the message says why, in one sentence."""


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Offsets and sizes in an arena, which follow from geometry and size."""

    geometry: PoolGeometry
    memory_bytes: int
    """Limit of the arena."""
    arena_bytes: int
    """Size of the arena."""
    slab_bytes: int
    slabs: int
    most_slots: int
    """Rows of the page table for each slab."""
    slot_bytes: dict[int, int]
    """Size of the slots that a group's pages go into, by the group's index."""
    table_at: int
    slabs_at: int

    @property
    def pages_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.slabs * self.slab_bytes

    @classmethod
    def of(cls, geometry: PoolGeometry, memory_bytes: int) -> "ArenaLayout":
        """Lay out as many slabs as fit into `memory_bytes`, with header and page table.

        Raises:
            ArenaError: the memory is too little, or the geometry has too many ranks.
        """
        if geometry.ranks > MOST_RANKS:
            raise ArenaError(f"a pool takes at most {MOST_RANKS} ranks, and this engine has {geometry.ranks}")
        page_bytes = {group.index: geometry.page_bytes(group.index) for group in geometry.groups}
        sizes = slot_sizes(list(page_bytes.values()))
        slot_bytes = {index: sizes[size] for index, size in page_bytes.items()}
        table_at = _whole_pages(_GEOMETRY_AT + len(geometry.encode()))
        a_row = row_bytes(geometry.ranks)
        # With a row for each of the smallest slots, wherever they are.
        room = memory_bytes - table_at - _PAGE_BYTES
        room = int(room / (1 + a_row / min(slot_bytes.values())))
        try:
            slab_bytes = slab_size(set(slot_bytes.values()), room)
        except ValueError as error:
            raise ArenaError(f"pool.memory is too small for this model: {error}") from None
        most_slots = slab_bytes // min(slot_bytes.values())
        slabs = room // slab_bytes
        slabs_at = _whole_pages(table_at + slabs * most_slots * a_row)
        return cls(
            geometry=geometry,
            memory_bytes=memory_bytes,
            arena_bytes=slabs_at + slabs * slab_bytes,
            slab_bytes=slab_bytes,
            slabs=slabs,
            most_slots=most_slots,
            slot_bytes=slot_bytes,
            table_at=table_at,
            slabs_at=slabs_at,
        )


class Arena:
    """A mapped arena: the daemon's, which owns all of it, or an engine's, which writes only pages."""

    def __init__(self, file: BinaryIO, layout: ArenaLayout) -> None:
        """Map `file`, which is as long as the layout says, and is closed with this object."""
        self.layout = layout
        self._file = file
        self._map = mmap.mmap(file.fileno(), layout.arena_bytes)
        self.view = memoryview(self._map)
        """All bytes of the arena."""
        rows = layout.slabs * layout.most_slots * row_bytes(layout.geometry.ranks)
        self.table = PageTable(self.view[layout.table_at : layout.table_at + rows], layout.geometry.ranks)

    @property
    def fileno(self) -> int:
        """The file descriptor, to be passed to engines."""
        return self._file.fileno()

    @property
    def epoch(self) -> int:
        """Number of the daemon's start, read from shared memory."""
        return int(_NUMBER.unpack_from(self._map, _EPOCH_AT)[0])

    def begin_epoch(self, epoch: int) -> None:
        """Start a new epoch: copies that began in an earlier one must not be trusted."""
        _NUMBER.pack_into(self._map, _PROVIDED_AT, 0)
        _NUMBER.pack_into(self._map, _EPOCH_AT, epoch)

    def provide(self, slab: int) -> None:
        """Allocate the memory of a slab, which takes a while, and tell engines of it; its content stays.

        Raises:
            OSError: it has none. Without this, the first to touch the memory would be killed.
        """
        offset = self.layout.slabs_at + slab * self.layout.slab_bytes
        os.posix_fallocate(self._file.fileno(), offset, self.layout.slab_bytes)
        self.populate(slab)
        _NUMBER.pack_into(self._map, _PROVIDED_AT, slab + 1)

    @property
    def provided_slabs(self) -> int:
        """Number of slabs, from the first on, whose memory was provided."""
        return int(_NUMBER.unpack_from(self._map, _PROVIDED_AT)[0])

    def populate(self, slab: int) -> None:
        """Map a provided slab into this process at once, which is cheaper than page by page during copies."""
        begin = self.layout.slabs_at + slab * self.layout.slab_bytes
        start = begin - begin % _PAGE_BYTES
        size = begin + self.layout.slab_bytes - start
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map, start))
        # mmap.madvise would hold the interpreter's lock for all of it. Kernels before 5.14 refuse; copies do it then.
        _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)

    def close(self) -> None:
        """Close the file. The memory stays mapped as long as a view of it exists."""
        self._file.close()


def create_arena(path: Path, layout: ArenaLayout, epoch: int) -> Arena:
    """Make a new, empty arena at `path`. Mappings of an old one there stay valid.

    Raises:
        OSError: the file cannot be made.
    """
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    file = os.fdopen(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "r+b", 0)
    try:
        os.ftruncate(file.fileno(), layout.arena_bytes)
        arena = Arena(file, layout)
        os.posix_fallocate(file.fileno(), 0, layout.slabs_at)
        encoded = layout.geometry.encode()
        arena.view[_GEOMETRY_AT : _GEOMETRY_AT + len(encoded)] = encoded
        _HEADER.pack_into(
            arena.view,
            0,
            _MAGIC,
            _VERSION,
            len(encoded),
            epoch,
            0,
            layout.memory_bytes,
            layout.geometry.digest(),
        )
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        file.close()
        raise
    return arena


def open_arena(path: Path, memory_bytes: int) -> Arena | None:
    """Open an earlier daemon's arena at `path`; None, and a line in the log, if it cannot be used."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b", 0)
    except FileNotFoundError:
        logger.info("the pool starts empty: there is no arena at %s", path)
        return None
    except OSError as error:
        logger.warning("the pool starts empty: the arena %s cannot be opened: %s", path, error.strerror)
        return None
    try:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError("it belongs to another user, or others may read it")
        layout = _layout_in(file)
        if layout.memory_bytes != memory_bytes:
            raise ValueError(
                f"it was made for {layout.memory_bytes} bytes, and pool.memory is {memory_bytes}"
            )
        return Arena(file, layout)
    except (ValueError, ArenaError) as error:
        file.close()
        logger.warning("the pool starts empty: the arena %s is of no use: %s", path, error)
        return None


def map_arena(descriptor: int) -> Arena:
    """An engine's view of the arena whose descriptor the daemon passed; the descriptor is closed with it.

    Raises:
        ValueError, ArenaError: it is not the arena of such a pool.
    """
    file = os.fdopen(descriptor, "r+b", 0)
    try:
        return Arena(file, _layout_in(file))
    except BaseException:
        file.close()
        raise


def _layout_in(file: BinaryIO) -> ArenaLayout:
    """Read the layout from a file's header.

    Raises:
        ValueError, ArenaError: the file is no such arena.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    head = os.pread(file.fileno(), _PAGE_BYTES, 0)
    if len(head) < _HEADER.size or head[:8] != _MAGIC:
        raise ValueError("it has no header")
    _, version, length, _, _, memory_bytes, digest = _HEADER.unpack_from(head)
    if version != _VERSION:
        raise ValueError(f"it is of version {version}, not {_VERSION}")
    geometry = PoolGeometry.decode(os.pread(file.fileno(), length, _GEOMETRY_AT))
    if geometry.digest() != digest:
        raise ValueError("its header is damaged")
    layout = ArenaLayout.of(geometry, memory_bytes)
    if layout.arena_bytes != size_bytes:
        raise ValueError(f"it has {size_bytes} bytes in place of {layout.arena_bytes}")
    return layout


def provide_slabs(arena: Arena, provided: Callable[[int], None], stopped: Callable[[], bool]) -> None:
    """Provide the memory of all slabs, one after the other, in a thread of its own.

    Logs its progress. Ends early when `stopped`, or when the machine has no more: the pool then goes on with less.
    """
    layout = arena.layout
    for slab in range(layout.slabs):
        if stopped():
            return
        try:
            arena.provide(slab)
        except OSError as error:
            logger.warning(
                "the pool goes on with %s of %s: no more shared memory (%s)",
                format_bytes(slab * layout.slab_bytes), format_bytes(layout.slabs * layout.slab_bytes), error.strerror,
            )  # fmt: skip
            return
        provided(slab)
        done, before = (slab + 1) * 10 // layout.slabs, slab * 10 // layout.slabs
        if done > before:
            logger.info("%d %% of the pool's memory is provided", done * 10)


def check_room(path: Path, memory_bytes: int) -> None:
    """Check that an arena of that size fits at `path`; the file that is there now counts as room.

    Raises:
        ArenaError: there is too little.
    """
    directory = path.parent
    try:
        system = os.statvfs(directory)
    except OSError as error:
        raise ArenaError(
            f"the directory {directory} for shared memory is of no use: {error.strerror}"
        ) from None
    with contextlib.suppress(OSError):
        memory_bytes -= path.stat().st_blocks * 512
    free_bytes = system.f_bavail * system.f_frsize
    if memory_bytes > free_bytes:
        raise ArenaError(
            f"pool.memory needs {format_bytes(memory_bytes)} more, and {directory} has "
            f"{format_bytes(free_bytes)} free: set it lower, or make {directory} larger"
        )
    for name, available_bytes in _memory_left():
        if memory_bytes > available_bytes:
            raise ArenaError(
                f"pool.memory needs {format_bytes(memory_bytes)} more, and {name} has "
                f"{format_bytes(available_bytes)} left: set it lower"
            )


def _memory_left() -> Iterator[tuple[str, int]]:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        yield (
            "the machine",
            next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024,
        )
    with contextlib.suppress(OSError, ValueError):
        most = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        yield "the container", most - int((_CGROUP / "memory.current").read_text(encoding="ascii"))
