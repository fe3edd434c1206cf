"""Tells what a pool holds, so that a gateway follows a pool as it follows an engine."""

import logging
import secrets
import threading
import time
from collections import deque
from functools import partial
from typing import TypeAlias

from prfaas.core.pool.announced import AnnouncedPages, Medium
from prfaas.core.pool.geometry import PageIdentity, PoolGeometry
from prfaas.serving.transport.protocol.event_log import EventLog
from prfaas.serving.transport.protocol.requests import FollowOrder, PeerRequest

logger = logging.getLogger(__name__)

MOST_WAITING = 1 << 21
"""Most changes that wait for the thread. Beyond it the pool reports that it is empty."""
_BATCH_PAGES = 128
_COALESCE_S = 0.01

_Change: TypeAlias = tuple[bytes, PageIdentity | None, Medium, bool]
"""Page, its identity, the tier, and whether it was stored there (or removed)."""


class PoolEventPublisher:
    """Takes changes of pages in the store's loop, and tells them from a thread.

    The loop calls `opened`, `stored` and `removed`, which only append to a queue. The thread (`_run`) puts it in
    batches into the `EventLog`, and has that answer those that follow. Who is behind is told all pages anew. If the
    thread can't keep up, the pool reports that it is empty, which costs some recomputing and nothing else.
    """

    def __init__(self, seed: int) -> None:
        """`seed`: of the deployment's block hashes. `start` begins to answer."""
        self._log = EventLog(seed, partial(secrets.token_hex, 8))
        self._pages: AnnouncedPages | None = None
        self._requests: deque[PeerRequest] = deque()
        self._changes: deque[_Change | PoolGeometry] = deque()
        self._geometry: PoolGeometry | None = None
        self._has_work = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="prfaas-pool-events", daemon=True)
        self.snapshots = self.overflows = 0

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def take(self, request: PeerRequest) -> None:
        """Answer a FOLLOW, now or when there is more; thread-safe."""
        self._requests.append(request)
        self._has_work.set()

    def opened(self, geometry: PoolGeometry, epoch: int) -> None:
        """Report an empty pool of this geometry."""
        logger.info("epoch %d of the pool: its pages are published from now on", epoch)
        self._geometry = geometry
        self._add(geometry)

    def stored(self, page_id: bytes, identity: PageIdentity | None, medium: Medium) -> None:
        """Report that a tier holds the page."""
        self._add((page_id, identity, medium, True))

    def removed(self, page_id: bytes, medium: Medium) -> None:
        """Report that a tier no longer holds the page."""
        self._add((page_id, None, medium, False))

    def state(self) -> dict[str, int]:
        """Counters of publishing."""
        return self._log.state() | {"snapshots": self.snapshots, "overflows": self.overflows}

    def close(self) -> None:
        """End the thread; unsent changes are lost."""
        self._is_closed = True
        self._has_work.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _add(self, change: _Change | PoolGeometry) -> None:
        if len(self._changes) >= MOST_WAITING and self._geometry is not None:
            self.overflows += 1
            logger.error(
                "%d changes of pages could not be published: the pool now reports that it is empty",
                MOST_WAITING,
            )
            self._changes.clear()
            self._changes.append(self._geometry)
        self._changes.append(change)
        if not self._has_work.is_set():
            self._has_work.set()

    def _run(self) -> None:
        while not self._is_closed:
            self._has_work.wait()
            self._has_work.clear()
            try:
                self._publish()
                while self._requests:
                    self._answer(self._requests.popleft())
            except Exception:
                # Without events the index would claim pages that are gone.
                logger.exception("the pool's pages can't be published; they are reported anew")
                if self._geometry is not None:
                    self._open(self._geometry)
                self._has_work.set()
            # Changes that come meanwhile are published together.
            time.sleep(_COALESCE_S)

    def _publish(self) -> None:
        """Publish waiting changes."""
        for _ in range(len(self._changes)):
            try:
                change = self._changes.popleft()
            except IndexError:
                break  # it overflowed meanwhile
            if isinstance(change, PoolGeometry):
                # Events before it no longer count.
                self._open(change)
                continue
            if self._pages is None:
                continue
            page_id, identity, medium, is_stored = change
            if is_stored:
                self._pages.stored(page_id, identity, medium)
            else:
                self._pages.removed(page_id, medium)
        if self._pages is not None:
            for events in self._pages.take_events(_BATCH_PAGES):
                self._log.add(events)

    def _open(self, geometry: PoolGeometry) -> None:
        """The pool is empty, of this geometry."""
        self._pages = AnnouncedPages(geometry)
        self._log.begin("cleared")
        self._log.add(self._pages.beginning())

    def _answer(self, request: PeerRequest) -> None:
        if isinstance(request.order, FollowOrder) and self._pages and self._log.is_behind(request.order):
            self.snapshots += 1
            self._log.replace([self._pages.beginning(), *self._pages.snapshot(_BATCH_PAGES)])
        self._log.answer(request)
