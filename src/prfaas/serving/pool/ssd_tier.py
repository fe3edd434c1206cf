"""Tier of pages on SSD: an index of the pages in the file, and their eviction when it is full.

It runs in the store's loop; the threads of `ssd_background` read and write.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from prfaas.core.pool.eviction import EvictionPolicy
from prfaas.core.pool.geometry import PageIdentity, PoolGeometry, whole_sectors
from prfaas.core.pool.keys import page_id as page_id_of
from prfaas.core.pool.quota import TenantEviction
from prfaas.serving.pool.journal import JournalPage, most_record_bytes
from prfaas.serving.pool.ssd_background import InLoop, SsdRead, SsdReaders, SsdWrite, SsdWriter, open_files
from prfaas.serving.pool.ssd_file import Bytes, FileSlots, PageRead, PageWrite, stored_bytes

_READERS = 8
_HEADERS_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SsdOptions:
    """Where a pool's files on SSD are, and their limits."""

    folder: Path
    """On the disk; it is made."""
    most_bytes: int
    """What both files may take together."""
    tenant_share: float = 1.0
    """See `TenantEviction`."""
    most_queued_bytes: int = 256 << 20
    """Pages on their way to the disk, which keep their room in the arena."""
    retry_s: float = 10.0
    """How long after a failure of the disk it is tried again."""


@dataclass(frozen=True, slots=True)
class SsdEntry:
    """A page in the SSD tier."""

    page_id: bytes
    identity: PageIdentity | None
    checksums: tuple[int, ...]
    """xxh3_64 of each rank's share."""
    tenant: bytes

    @property
    def group(self) -> int:
        """The number of its KV group."""
        return self.page_id[-1]


class _FilePage:
    """A page in the file."""

    __slots__ = ("checksums", "offset", "reads", "slots", "tenant")

    def __init__(self, offset: int, checksums: tuple[int, ...], tenant: bytes, slots: FileSlots) -> None:
        self.offset = offset
        self.checksums = checksums
        """Of the ranks' shares, and of the bytes behind them if there are any."""
        self.tenant = tenant
        self.slots = slots
        self.reads = 0


class BusyClock:
    """Counts the seconds in which at least one piece of work was open, and its bytes: together, a bandwidth.

    Not thread-safe.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.done_bytes = 0
        self.busy_s = 0.0
        """Without the present busy time."""
        self._now_s = now_s
        self._open = 0
        self._since_s = 0.0

    def begin(self) -> None:
        """Open a piece of work."""
        if not self._open:
            self._since_s = self._now_s()
        self._open += 1

    def end(self, done_bytes: int) -> None:
        """Close a piece of work, of which `done_bytes` were done."""
        self.done_bytes += done_bytes
        self._open -= 1
        if not self._open:
            self.busy_s += self._now_s() - self._since_s


class FileTier:
    """Pages on SSD: a file of pages and a journal, in a folder of the pool's own.

    It is made for one geometry and arena. `done` and `dropped` are called in the store's loop.

    1. At the start the writer opens both files, and the pages of the journal are held again.
    2. `write` takes room, evicting pages if need be, and queues the page for the writer; `_written` holds it.
    3. `read` queues a page for the readers; `_was_read` drops it if it was wrong.
    4. After a failure of the disk, `_found_later` starts again from the files that are there then.

    Args:
        geometry: The pages' geometry.
        arena: Memory that pages are written from and read into.
        options: Where the files are, and what they may take.
        make_policy: Makes an empty eviction policy.
        in_loop: Calls a function in the store's loop.

    Raises:
        ValueError: `options.most_bytes` has no room for a page of each group.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        arena: memoryview,
        options: SsdOptions,
        make_policy: Callable[[], EvictionPolicy[bytes]],
        in_loop: InLoop,
    ) -> None:
        most_bytes = options.most_bytes
        started = time.monotonic()
        self._geometry = geometry
        self._lead = geometry.lead.index
        self._arena = np.frombuffer(arena, dtype=np.uint8)
        self._page_bytes = {group.index: geometry.page_bytes(group.index) for group in geometry.groups}
        self._parts = {group.index: _parts(geometry, group.index) for group in geometry.groups}
        self._tenant_share = options.tenant_share
        self._make_policy = make_policy
        # Pages on their way can't make room for others.
        self._most_queued_bytes = min(options.most_queued_bytes, len(arena) // 4)
        self._dropped: Callable[[bytes], None] = lambda _page_id: None
        record_share = max(
            most_record_bytes(geometry.ranks, geometry.identity_bytes(group)) / stored_bytes(size)
            for group, size in self._page_bytes.items()
        )
        # The journal may be twice what live pages need; while it is rewritten there is a third copy.
        self._slots_bytes = int((most_bytes - 2 * _HEADERS_BYTES) / (1 + 3 * record_share))
        self._slots = FileSlots(self._slots_bytes, self._page_bytes)
        if self._slots.segments < len(geometry.groups):
            raise ValueError(
                f"{most_bytes} bytes on SSD hold no page of each KV group of this model "
                f"(the largest takes {max(self._page_bytes.values())}); give the pool more, or none"
            )
        self._pages: dict[bytes, _FilePage] = {}
        self._writing: dict[bytes, _FilePage] = {}
        self._queued_bytes = 0
        self._queued_of: Counter[bytes] = Counter()
        self._eviction = self._no_eviction()
        self._counts = dict.fromkeys(("written_bytes", "read_bytes", "not_written", "evicted", "wrong"), 0)
        self._promoting = BusyClock()
        files = partial(
            open_files,
            options.folder,
            geometry.digest(),
            self._page_bytes,
            pages_bytes=self._slots.file_bytes,
            journal_bytes=int(2 * record_share * self._slots.file_bytes) + _HEADERS_BYTES,
        )
        self._writer = SsdWriter(files, in_loop, self._found_later, options.retry_s)
        self._recovered = self._held_again(self._writer.start())
        self._readers = SsdReaders(self._writer.pages_file, in_loop, _READERS)
        self._recovery_s = time.monotonic() - started

    def attach(self, dropped: Callable[[bytes], None]) -> None:
        """Set the callback for pages that the tier drops by itself (no room, damage). The first call."""
        self._dropped = dropped

    def entries(self) -> Iterator[SsdEntry]:
        """The pages recovered at the start; call it once."""
        recovered, self._recovered = self._recovered, []
        for record in recovered:
            if record.page_id in self._pages:
                yield self._entry(record.page_id, record.identity)

    def entry(self, page_id: bytes) -> SsdEntry | None:
        """One page that is held."""
        files = self._writer.files
        if page_id not in self._pages or files is None:
            return None
        return self._entry(page_id, files.journal.identity(page_id))

    @property
    def takes_more(self) -> bool:
        """True if a page could be written now: the queue has room, and the disk does not fail."""
        return self._writer.failure is None and self._queued_bytes < self._most_queued_bytes

    def write(self, entry: SsdEntry, offset: int, done: Callable[[bool], None]) -> None:
        """Write the page at that offset of the arena in the background; the store keeps it there until `done`.

        `done(False)`: it was not written (no room, an error). It may be called at once.
        """
        if entry.page_id in self._pages or entry.page_id in self._writing:
            done(entry.page_id in self._pages)
            return
        place = self._room(entry.group, entry.tenant) if self.takes_more else None
        if place is None or not self._queue(entry, offset, place, done):
            self._counts["not_written"] += 1
            done(False)

    def _queue(self, entry: SsdEntry, offset: int, place: int, done: Callable[[bool], None]) -> bool:
        """Have the writer put a page at that place of the file. False: it takes nothing at the moment."""
        size = self._page_bytes[entry.group]
        page = _FilePage(place, entry.checksums, entry.tenant, self._slots)
        identity = b"" if entry.identity is None else entry.identity.encode()
        record = JournalPage(
            page_id=entry.page_id,
            offset=place,
            checksums=entry.checksums,
            rest_checksum=0,
            tenant=entry.tenant,
            identity=identity,
        )
        rest_from = self._geometry.rank_offset(entry.group, self._geometry.ranks)
        write = PageWrite(place, self._room_in_arena(offset, size), size, rest_from)
        order = SsdWrite(write, record, partial(self._written, entry, page, done))
        if not self._writer.write(order):
            self._slots.give_back(place)
            return False
        self._writing[entry.page_id] = page
        self._queued_bytes += size
        self._queued_of[entry.tenant] += self._slots.stored_bytes(entry.group)
        return True

    def read(self, page_id: bytes, into_offset: int, done: Callable[[bool], None]) -> None:
        """Read a page into the arena and verify it. `done(False)`: the slot's bytes are not the page's."""
        size = self._page_bytes[page_id[-1]]
        self._promoting.begin()

        def finished(is_right: bool) -> None:
            self._promoting.end(size if is_right else 0)
            done(is_right)

        self._read(page_id, self._room_in_arena(into_offset, size), finished)

    def touched(self, page_id: bytes) -> None:
        """Note the use of a page; one that is not held is ignored."""
        self._eviction.touched(page_id)

    def forget(self, page_id: bytes) -> None:
        """Drop a page. No `dropped` follows."""
        self._writing.pop(page_id, None)
        if page_id in self._pages:
            self._give_up(page_id)
            self._writer.drop(page_id)

    def clear(self) -> None:
        """Drop every page for good. No `dropped` follows."""
        self._writing.clear()
        for page_id in list(self._pages):
            self._give_up(page_id)
        self._writer.clear()

    def verify(self, done: Callable[[int, int], None]) -> None:
        """Read every page and compare it with its checksums; wrong ones are dropped.

        One at a time, so that engines' reads need not wait. `done` is called with the numbers of right and of wrong
        pages.
        """
        left, counts = list(self._pages), Counter[bool]()

        def go_on() -> None:
            while left:
                page_id = left.pop()
                # A page that has gone meanwhile is neither right nor wrong.
                if page_id in self._pages:
                    self._read(page_id, None, was_read)
                    return
            done(counts[True], counts[False])

        def was_read(is_right: bool) -> None:
            counts[is_right] += 1
            go_on()

        go_on()

    def figures(self) -> dict[str, int | float | str]:
        """Figures of the tier's content and work."""
        return {
            "state": self._writer.failure or "writable",
            "held_pages": len(self._pages),
            "used_bytes": self._eviction.used_bytes,
            "capacity_bytes": self._slots.file_bytes,
            "queued_pages": len(self._writing),
            "queued_bytes": self._queued_bytes,
            "recovery_s": self._recovery_s,
            "promoted_bytes": self._promoting.done_bytes,
            "promoting_s": self._promoting.busy_s,
            **self._counts,
        }

    def close(self) -> None:
        """End the background work, writing queued pages for a few seconds at most."""
        self._writer.close()
        self._readers.close()
        # The arena can't be unmapped as long as anybody refers to it.
        self._arena = np.empty(0, dtype=np.uint8)

    def _read(self, page_id: bytes, into: Bytes | None, done: Callable[[bool], None]) -> None:
        page = self._pages.get(page_id)
        if page is None:
            done(False)
            return
        page.reads += 1
        parts = self._parts[page_id[-1]]
        self._readers.read(
            SsdRead(
                PageRead(page.offset, parts, page.checksums, into),
                partial(self._was_read, page_id, page, done),
            )
        )

    def _was_read(
        self, page_id: bytes, page: _FilePage, done: Callable[[bool], None], is_right: bool
    ) -> None:
        page.reads -= 1
        self._counts["read_bytes"] += self._page_bytes[page_id[-1]]
        if self._pages.get(page_id) is page:
            if is_right:
                self._eviction.touched(page_id)
            else:
                self._counts["wrong"] += 1
                self._give_up(page_id)
                self._writer.drop(page_id)
                self._dropped(page_id)
        elif not page.reads:
            page.slots.give_back(page.offset)
        done(is_right)

    def _written(
        self, entry: SsdEntry, page: _FilePage, done: Callable[[bool], None], record: JournalPage | None
    ) -> None:
        size = self._page_bytes[entry.group]
        self._queued_bytes -= size
        self._queued_of[entry.tenant] -= self._slots.stored_bytes(entry.group)
        if not self._queued_of[entry.tenant]:
            del self._queued_of[entry.tenant]
        is_wanted = self._writing.get(entry.page_id) is page
        if is_wanted:
            del self._writing[entry.page_id]
        if record is None:
            self._counts["not_written"] += 1
            page.slots.give_back(page.offset)
            done(False)
        elif not is_wanted:
            if not (entry.page_id in self._pages or entry.page_id in self._writing):
                self._writer.drop(entry.page_id)
            page.slots.give_back(page.offset)
            done(False)
        else:
            self._counts["written_bytes"] += size
            self._hold(record, page)
            done(True)

    def _room_in_arena(self, offset: int, size: int) -> Bytes:
        """A page's memory. Slots of the arena are whole sectors, so all of the last one is the page's."""
        return self._arena[offset : offset + whole_sectors(size)]

    def _room(self, group: int, tenant: bytes) -> int | None:
        """Free room for a page, evicting others if need be."""
        while (place := self._slots.take(group)) is None:
            # The eviction does not know the tenant's queued pages yet.
            coming_bytes = self._queued_of[tenant] + self._slots.stored_bytes(group)
            victim = self._eviction.victim(
                tenant, coming_bytes, lambda page_id: not self._pages[page_id].reads
            )
            if victim is None:
                return None
            self._counts["evicted"] += 1
            self._give_up(victim)
            self._writer.drop(victim)
            self._dropped(victim)
        return place

    def _hold(self, record: JournalPage, page: _FilePage) -> None:
        group = record.page_id[-1]
        if len(self._parts[group]) > len(page.checksums):
            page.checksums = (*page.checksums, record.rest_checksum)
        self._pages[record.page_id] = page
        self._eviction.added(
            record.page_id, self._slots.stored_bytes(group), group, self._parent(record), page.tenant
        )

    def _give_up(self, page_id: bytes) -> None:
        page = self._pages.pop(page_id)
        self._eviction.removed(page_id)
        if not page.reads:
            page.slots.give_back(page.offset)

    def _parent(self, record: JournalPage) -> bytes | None:
        """The page that a page depends on."""
        if record.page_id[-1] != self._lead:
            return page_id_of(record.page_id[:-1], self._lead)
        parent = PageIdentity.decode(record.identity).parent
        return page_id_of(parent, self._lead) if parent else None

    def _found_later(self, found: list[JournalPage]) -> None:
        before = self._pages
        self._slots = FileSlots(self._slots_bytes, self._page_bytes)
        self._eviction = self._no_eviction()
        self._pages = {}
        self._held_again(found)
        for page_id in before.keys() - self._pages.keys():
            self._dropped(page_id)
        self._writer.resume()

    def _held_again(self, found: Sequence[JournalPage]) -> list[JournalPage]:
        """Hold the pages that were found. Returns those that could be."""
        # Of two records for one place, the page of the later one lies there.
        held = [record for record in reversed(found) if self._claims_place(record)]
        held.reverse()
        for record in held:
            self._hold(record, _FilePage(record.offset, record.checksums, record.tenant, self._slots))
        return held

    def _claims_place(self, record: JournalPage) -> bool:
        group = record.page_id[-1]
        if len(record.checksums) != self._geometry.ranks:
            return False
        if group == self._lead:
            try:
                PageIdentity.decode(record.identity)
            except ValueError:
                return False
        return self._slots.claim(group, record.offset)

    def _entry(self, page_id: bytes, identity: bytes) -> SsdEntry:
        page = self._pages[page_id]
        known = PageIdentity.decode(identity) if identity else None
        return SsdEntry(page_id, known, page.checksums[: self._geometry.ranks], page.tenant)

    def _no_eviction(self) -> TenantEviction:
        return TenantEviction(self._slots.file_bytes, self._make_policy, self._tenant_share)


SsdFactory: TypeAlias = Callable[[PoolGeometry, memoryview], FileTier]
"""Makes a tier for a geometry and an arena's bytes. Blocking, so the daemon calls it in a thread."""


def _parts(geometry: PoolGeometry, group: int) -> list[int]:
    """Bytes of the pieces of a page that have a checksum each: the ranks' shares, and the rest."""
    ranks = [geometry.group(group).rank_bytes] * geometry.ranks
    rest = geometry.identity_bytes(group)
    return [*ranks, rest] if rest else ranks
