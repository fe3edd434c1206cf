"""Journal of a pool's file on SSD: an append-only record of its pages' places, which outlives the daemon.

A record is a magic word, the length of its body, the body's xxh3_64, and the body. A damaged record costs only its
page: reading goes on at the next magic word. If a page's drop was damaged, the page comes back; since pages are
verified when they are read, that costs a read and never serves wrong bytes.
"""

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from prfaas.serving.pool.ssd_file import leads_to, write_all

_FILE_MAGIC = b"PRFJRNL1"
_DIGEST_BYTES = 16
_HEADER_BYTES = len(_FILE_MAGIC) + _DIGEST_BYTES
_MAGIC = b"\xc5jR1"
_RECORD = struct.Struct("<4sIQ")
_MOST_BODY_BYTES = 64 << 20
_WRITE_BYTES = 8 << 20
# A file that holds little besides records of what is gone is rewritten when it is larger.
_FEW_BYTES = 4 << 20


class JournalPage(msgspec.Struct, tag="page", array_like=True, frozen=True):
    """Record of a page that was written."""

    page_id: bytes
    offset: int
    """Its offset in the file of pages."""
    checksums: tuple[int, ...]
    """xxh3_64 of each rank's share."""
    rest_checksum: int
    """xxh3_64 of the bytes behind the ranks' shares."""
    tenant: bytes
    identity: bytes
    """`PageIdentity.encode`, empty for pages that have none."""


class JournalDrop(msgspec.Struct, tag="drop", array_like=True, frozen=True):
    """Record of a page that is gone."""

    page_id: bytes


_Record: TypeAlias = JournalPage | JournalDrop
_DECODER = msgspec.msgpack.Decoder(_Record)
_ENCODER = msgspec.msgpack.Encoder()


def most_record_bytes(ranks: int, identity_bytes: int) -> int:
    """Most bytes that the records of a page's coming and going take."""
    # Of msgpack: up to 9 bytes a number, 5 before a byte string, 5 before a list; of page ids and tenants, 256.
    return 2 * (_RECORD.size + 64 + 256) + 9 * (ranks + 2) + identity_bytes


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a record in the file."""

    offset: int
    size_bytes: int


class Journal:
    """The journal's file, and the places of live pages' records in it.

    `open` reads the pages that are there; `append` adds records durably, and rewrites the file when dropped pages take
    too much of it. After an error `forget` keeps what is gone out of the next `rewrite`. Only `identity` may be called
    from another thread.

    Args:
        path: The file; its folder is there.
        digest: 16 bytes of the geometry; a file with another digest is emptied.
        most_bytes: The file is rewritten before it is larger.
    """

    def __init__(self, path: Path, digest: bytes, most_bytes: int) -> None:
        self._path = path
        self._header = _FILE_MAGIC + digest
        self._most_bytes = most_bytes
        self._fd = -1
        self._end = 0
        self._live: dict[bytes, _Place] = {}
        self._live_bytes = 0
        # The file is replaced while another thread may read an identity.
        self._lock = threading.Lock()

    def is_in_place(self) -> bool:
        """True if the path still leads to this file."""
        return leads_to(self._path, self._fd)

    def open(self) -> list[JournalPage]:
        """Read the records, and cut off a torn tail.

        Returns:
            The pages that are there, in the order in which they were written.

        Raises:
            OSError: the file can't be read or written.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        data = self._path.read_bytes()
        pages: dict[bytes, JournalPage] = {}
        if data[:_HEADER_BYTES] != self._header:
            self.rewrite()
            return []
        self._end = _HEADER_BYTES
        for place, record in self._records(data):
            pages.pop(record.page_id, None)
            self.forget(record.page_id)
            if isinstance(record, JournalPage):
                pages[record.page_id] = record
                self._remember(record.page_id, place)
            self._end = place.offset + place.size_bytes
        if self._end < len(data):
            os.ftruncate(self._fd, self._end)
        return list(pages.values())

    def append(self, records: Sequence[JournalPage | JournalDrop]) -> None:
        """Write records and wait until they are on the disk.

        Raises:
            OSError: they may be there or not. `rewrite` mends the file.
        """
        data = bytearray()
        places: list[tuple[_Record, _Place]] = []
        for record in records:
            body = _ENCODER.encode(record)
            place = _Place(self._end + len(data), _RECORD.size + len(body))
            data += _RECORD.pack(_MAGIC, len(body), xxh3_64_intdigest(body)) + body
            places.append((record, place))
        for record in records:
            if isinstance(record, JournalDrop):
                self.forget(record.page_id)
        if self._end + len(data) > min(self._most_bytes, _FEW_BYTES + 3 * self._live_bytes):
            self.rewrite()
            places = [
                (record, _Place(place.offset - places[0][1].offset + self._end, place.size_bytes))
                for record, place in places
            ]
        write_all(self._fd, data, self._end)
        os.fdatasync(self._fd)
        self._end += len(data)
        for record, place in places:
            self.forget(record.page_id)
            if isinstance(record, JournalPage):
                self._remember(record.page_id, place)

    def forget(self, page_id: bytes) -> None:
        """Drop a page in memory, if it is there; the file follows when it is rewritten."""
        place = self._live.pop(page_id, None)
        if place is not None:
            self._live_bytes -= place.size_bytes

    def forget_all(self) -> None:
        """Drop every page in memory; the file follows when it is rewritten."""
        self._live.clear()
        self._live_bytes = 0

    def rewrite(self) -> None:
        """Keep only the records of pages that are there, in a new file that replaces this one at once.

        Raises:
            OSError: the old file is as it was.
        """
        beside = self._path.with_suffix(".new")
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        moved: dict[bytes, _Place] = {}
        try:
            data, written = bytearray(self._header), 0
            for page_id, place in self._live.items():
                record = os.pread(self._fd, place.size_bytes, place.offset)
                if _decoded(record, 0) is None:
                    continue
                moved[page_id] = _Place(written + len(data), place.size_bytes)
                data += record
                if len(data) >= _WRITE_BYTES:
                    write_all(fd, data, written)
                    written += len(data)
                    data.clear()
            write_all(fd, data, written)
            written += len(data)
            os.fsync(fd)
            beside.replace(self._path)
            _sync_folder(self._path.parent)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self._close()
            self._fd, self._end, self._live = fd, written, moved
        self._live_bytes = written - len(self._header)

    def clear(self) -> None:
        """Drop every page, durably.

        Raises:
            OSError: the old file is as it was.
        """
        self.forget_all()
        self.rewrite()

    def identity(self, page_id: bytes) -> bytes:
        """`JournalPage.identity` of a page; empty if it is not there or can't be read."""
        with self._lock:
            place = self._live.get(page_id)
            if place is None:
                return b""
            try:
                record = _decoded(os.pread(self._fd, place.size_bytes, place.offset), 0)
            except OSError:
                return b""
        return record[1].identity if record is not None and isinstance(record[1], JournalPage) else b""

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _records(self, data: bytes) -> Iterator[tuple[_Place, _Record]]:
        position = _HEADER_BYTES
        while position < len(data):
            found = _decoded(data, position)
            if found is not None:
                size, record = found
                yield _Place(position, size), record
                position += size
                continue
            position = data.find(_MAGIC, position + 1)
            if position < 0:
                return

    def _remember(self, page_id: bytes, place: _Place) -> None:
        self._live[page_id] = place
        self._live_bytes += place.size_bytes


def _decoded(data: bytes, position: int) -> tuple[int, _Record] | None:
    """The record there and its size; None if there is none."""
    if position + _RECORD.size > len(data):
        return None
    magic, length, checksum = _RECORD.unpack_from(data, position)
    start = position + _RECORD.size
    if magic != _MAGIC or length > min(_MOST_BODY_BYTES, len(data) - start):
        return None
    body = data[start : start + length]
    if xxh3_64_intdigest(body) != checksum:
        return None
    try:
        return _RECORD.size + length, _DECODER.decode(body)
    except ValueError:
        return None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
