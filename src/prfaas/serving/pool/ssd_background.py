"""Threads that write a pool's pages to SSD and read them back.

The pool survives a failing disk: pages that can't be written stay in memory only, the log says so once, and the
writer tries again until the disk takes pages.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from prfaas.serving.pool.journal import Journal, JournalDrop, JournalPage
from prfaas.serving.pool.ssd_file import RUN_BYTES, PageFile, PageRead, PageWrite, PieceBuffer, stored_bytes

_LOG = logging.getLogger(__name__)
_MOST_BATCH_PAGES = 64
_MOST_BATCH_BYTES = 64 << 20
_CLOSING_S = 5.0


class SsdFiles(NamedTuple):
    """Both files, and the pages found in them."""

    pages: PageFile
    journal: Journal
    found: list[JournalPage]


def open_files(
    folder: Path, digest: bytes, page_bytes: Mapping[int, int], *, pages_bytes: int, journal_bytes: int
) -> SsdFiles:
    """Open both files, and remove those of other models in the folder.

    Args:
        folder: Where they are; it is made.
        digest: Of the geometry.
        page_bytes: Of a page, by the number of its group.
        pages_bytes: Size of the file of pages.
        journal_bytes: What the journal may take.

    Raises:
        OSError: the files can't be used, or there is no room for them.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = digest.hex()
    for other in folder.iterdir():
        if other.stem != name and other.suffix in (".pages", ".journal", ".new"):
            other.unlink()
    pages = PageFile(folder / f"{name}.pages", pages_bytes)
    journal = Journal(folder / f"{name}.journal", digest, journal_bytes)
    found = []
    for page in journal.open():
        size = page_bytes.get(page.page_id[-1])
        if size is not None and 0 <= page.offset <= pages.bytes_before - stored_bytes(size):
            found.append(page)
    return SsdFiles(pages, journal, found)


InLoop: TypeAlias = Callable[[Callable[[], None]], None]
"""Calls a function in the store's loop, from any thread."""


@dataclass(frozen=True, slots=True)
class SsdWrite:
    """A page on its way from the arena to the file."""

    page: PageWrite
    record: JournalPage
    finished: Callable[[JournalPage | None], None]
    """Called in the loop with the page's record in the journal; None: it is not on the disk."""


@dataclass(frozen=True, slots=True)
class SsdRead:
    """A page on its way back, or one to be verified."""

    page: PageRead
    finished: Callable[[bool], None]
    """Called in the loop with True if the page is right."""


Moved = TypeVar("Moved", SsdWrite, SsdRead)


def _next_run(orders: deque[Moved]) -> list[Moved]:
    """Take the next page, and those behind it that are its neighbours in the file, as many as go at once."""
    run = [orders.popleft()]
    start = run[0].page.offset
    while orders and orders[0].page.offset == run[-1].page.end and orders[0].page.end - start <= RUN_BYTES:
        run.append(orders.popleft())
    return run


class _Clear:
    """Order to drop all pages written before it."""


_Order: TypeAlias = SsdWrite | JournalDrop | _Clear


class SsdWriter:
    """One thread that does all writing, in order: pages are on the disk before the journal says so.

    `write`, `drop` and `clear` queue orders. The thread takes a batch (`_carry_out`): drops go into the journal first,
    then pages into the file, then their records. After an error it refuses orders (`_refuse`) and retries the files
    (`_try_again`); the loop calls `resume` once it knows their content.

    Args:
        open_files: Opens or makes the files.
        in_loop: Calls a function in the store's loop.
        found: Called in the loop when the files were opened later than at the start, with the pages in them.
        retry_s: Pause before a disk that failed is tried again.
    """

    def __init__(
        self,
        open_files: Callable[[], SsdFiles],
        in_loop: InLoop,
        found: Callable[[list[JournalPage]], None],
        retry_s: float,
    ) -> None:
        self._open_files = open_files
        self._in_loop = in_loop
        self._found = found
        self._retry_s = retry_s
        self._retry_at = 0.0
        self._orders: deque[_Order] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._gives_up = False
        self._said: str | None = None
        self.files: SsdFiles | None = None
        """None: they could not be opened yet."""
        self.failure: str | None = None
        """Why nothing can be written at the moment."""
        self._thread = threading.Thread(target=self._run, name="pool-ssd-writer", daemon=True)

    def pages_file(self) -> PageFile | None:
        """The present file of pages; None if there is none."""
        return None if self.files is None else self.files.pages

    def start(self) -> list[JournalPage]:
        """Open the files and begin. Returns the pages that are there."""
        found: list[JournalPage] = []
        try:
            self.files = self._open_files()
            found = self.files.found
        except OSError as error:
            self._failed(error)
        self._thread.start()
        return found

    def close(self) -> None:
        """Write queued pages for a few seconds at most, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSING_S)
        self._gives_up = True
        self._thread.join(_CLOSING_S)
        if self.files is not None and not self._thread.is_alive():
            self.files.journal.close()
            self.files.pages.close()

    def write(self, order: SsdWrite) -> bool:
        """Queue a page. False: nothing can be written at the moment."""
        with self._changed:
            if self.failure is not None or self._is_closing:
                return False
            self._orders.append(order)
            self._changed.notify()
        return True

    def drop(self, page_id: bytes) -> None:
        """Drop a page; pages queued after this may use its room."""
        self._order(JournalDrop(page_id))

    def clear(self) -> None:
        """Drop everything that was queued before this."""
        self._order(_Clear())

    def resume(self) -> None:
        """Take pages again: the loop knows the files' content now."""
        with self._changed:
            self.failure = None

    def _order(self, order: _Order) -> None:
        with self._changed:
            self._orders.append(order)
            self._changed.notify()

    def _run(self) -> None:
        buffer = PieceBuffer()
        while True:
            with self._changed:
                while not self._orders and not self._is_closing:
                    if not self._changed.wait(self._retry_s) and self.failure is not None:
                        break
                orders = self._batch()
                if self._gives_up or (self._is_closing and not orders):
                    return
            try:
                if self.failure is None and self.files is not None:
                    self._carry_out(orders, self.files, buffer)
                else:
                    self._refuse(orders)
                    self._try_again()
            except Exception as error:
                if not isinstance(error, OSError):
                    _LOG.exception("the pool's disk is not used at the moment")
                self._failed(error)
                self._refuse(orders)

    def _batch(self) -> list[_Order]:
        orders: list[_Order] = []
        size = 0
        while self._orders and len(orders) < _MOST_BATCH_PAGES and size < _MOST_BATCH_BYTES:
            order = self._orders.popleft()
            orders.append(order)
            if isinstance(order, SsdWrite):
                size += order.page.page_bytes
            elif isinstance(order, _Clear):
                break
        return orders

    def _carry_out(self, orders: Sequence[_Order], files: SsdFiles, buffer: PieceBuffer) -> None:
        if not files.pages.is_in_place() or not files.journal.is_in_place():
            raise FileNotFoundError("a file was moved or removed")
        drops = [order for order in orders if isinstance(order, JournalDrop)]
        if drops:
            # Before their room is used again: so the journal never names a page that was overwritten.
            files.journal.append(drops)
        writes = [order for order in orders if isinstance(order, SsdWrite)]
        records = []
        left = deque(writes)
        while left:
            run = _next_run(left)
            rests = files.pages.write([order.page for order in run], buffer)
            records += [
                msgspec.structs.replace(order.record, rest_checksum=rest)
                for order, rest in zip(run, rests, strict=True)
            ]
        if writes:
            files.pages.sync()
            files.journal.append(records)
        if isinstance(orders[-1], _Clear):
            files.journal.clear()
        if writes and self._said is not None:
            _LOG.info("the pool's disk takes pages again")
            self._said = None
        self._report(writes, records)

    def _refuse(self, orders: Sequence[_Order]) -> None:
        """Report orders that were not carried out; dropped pages must not come back with the journal."""
        if self.files is not None:
            for order in orders:
                if isinstance(order, JournalDrop):
                    self.files.journal.forget(order.page_id)
                elif isinstance(order, _Clear):
                    self.files.journal.forget_all()
        writes = [order for order in orders if isinstance(order, SsdWrite)]
        self._report(writes, [None] * len(writes))

    def _report(self, writes: Sequence[SsdWrite], records: Sequence[JournalPage | None]) -> None:
        def report() -> None:
            for order, record in zip(writes, records, strict=True):
                order.finished(record)

        if writes:
            self._in_loop(report)

    def _failed(self, error: Exception) -> None:
        text = str(getattr(error, "strerror", None) or error)
        with self._changed:
            self.failure = text
        self._retry_at = time.monotonic() + self._retry_s
        if text != self._said:
            _LOG.warning("the pool's disk can't be written (%s): new pages stay in memory only", text)
            self._said = text

    def _try_again(self) -> None:
        if time.monotonic() < self._retry_at or self._is_closing:
            return
        files = self.files
        if files is not None and files.pages.is_in_place():
            files.pages.take_room()
            files.journal.rewrite()
            self._in_loop(self.resume)
        else:
            if files is not None:
                files.journal.close()
            self.files = opened = self._open_files()
            self._in_loop(lambda: self._found(opened.found))
        # Not again before the loop knows.
        self._retry_at = time.monotonic() + self._retry_s


class SsdReaders:
    """Threads that read and verify pages. Several, since a disk is faster with several requests.

    Args:
        pages: Gives the present file; None if there is none.
        in_loop: Calls a function in the store's loop.
        count: Number of threads.
    """

    def __init__(self, pages: Callable[[], PageFile | None], in_loop: InLoop, count: int) -> None:
        self._pages = pages
        self._in_loop = in_loop
        self._reads: deque[SsdRead] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"pool-ssd-reader-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, order: SsdRead) -> None:
        """Queue a page."""
        with self._changed:
            self._reads.append(order)
            self._changed.notify()

    def close(self) -> None:
        """End after the queued reads."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSING_S)

    def _run(self) -> None:
        buffer = PieceBuffer()
        while True:
            with self._changed:
                while not self._reads:
                    if self._is_closing:
                        return
                    self._changed.wait()
                run = _next_run(self._reads)
            self._read(run, buffer)
            # Nothing of the arena is kept while there is nothing to do.
            del run

    def _read(self, run: Sequence[SsdRead], buffer: PieceBuffer) -> None:
        pages, rights = self._pages(), [False] * len(run)
        try:
            if pages is not None:
                rights = pages.read([order.page for order in run], buffer)
        except Exception as error:
            _LOG.warning("the pool's disk can't be read: %s", getattr(error, "strerror", None) or error)

        def report() -> None:
            for order, is_right in zip(run, rights, strict=True):
                order.finished(is_right)

        self._in_loop(report)
