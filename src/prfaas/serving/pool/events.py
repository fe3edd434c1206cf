"""Publishes a pool's content, so that a gateway follows a pool as it follows an engine.

The wire format is vLLM's: batches over ZeroMQ, numbered from 0, and an endpoint that replays them.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

import msgspec
import zmq

from prfaas.core.deployment import EventsEndpoint
from prfaas.core.pool.announced import AnnouncedPages, Medium
from prfaas.core.pool.geometry import PageIdentity, PoolGeometry
from prfaas.core.prefix.events import Event, EventBatch

logger = logging.getLogger(__name__)

KEPT_BATCHES = 10_000
KEPT_BYTES = 32 << 20
MOST_WAITING = 1 << 21
"""Most changes that wait for the thread. Beyond it the pool reports that it is empty."""
_BATCH_PAGES = 128
_COALESCE_S = 0.01
_POLL_MS = 200
_SEND_TIMEOUT_MS = 200
_REPLAY_QUEUE = 1000
_LIVE_QUEUE = 10_000
_TOPIC = b""
_END = (-1).to_bytes(8, "big", signed=True)

_Change: TypeAlias = tuple[bytes, PageIdentity | None, Medium, bool]
"""Page, its identity, the tier, and whether it was stored there (or removed)."""


class PoolEventLog:
    """The last batches with their numbers, and snapshots in place of those that are no longer kept.

    A replay from before the first kept batch is a snapshot: a clear event, then every page, in batches with the last
    numbers. A subscriber sees a replay whose beginning is missing, and forgets what it knew. A pool of another geometry
    is like a new process: numbers begin at 0 again, with later times.
    """

    def __init__(self) -> None:
        self.pages: AnnouncedPages | None = None
        self._geometry: PoolGeometry | None = None
        self.snapshots = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._latest_s = 0.0
        self._encoder = msgspec.msgpack.Encoder()

    def open(self, geometry: PoolGeometry, now_s: float) -> tuple[int, bytes]:
        """Start with an empty pool of this geometry. Returns the batch that says so."""
        self.pages = AnnouncedPages(geometry)
        self._kept.clear()
        self._kept_bytes = 0
        if geometry != self._geometry:
            self._geometry, self._next = geometry, 0
        return self.add(self.pages.beginning(), now_s)

    def add(self, events: list[Event], now_s: float) -> tuple[int, bytes]:
        """Number a batch and keep it. `now_s`: Unix time."""
        # A subscriber takes a low number with a later time for a new process.
        self._latest_s = max(now_s, self._latest_s + 1e-6)
        sequence, payload = self._next, self._encoder.encode(EventBatch(self._latest_s, events))
        self._next += 1
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        return sequence, payload

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """The batches from number `first` on, or a snapshot in their place."""
        if self.pages is None or first >= self._next:
            return iter(())
        if first >= self._kept[0][0]:
            return iter([kept for kept in self._kept if kept[0] >= first])
        self.snapshots += 1
        return self._snapshot(self.pages, self._next - first)

    def _snapshot(self, pages: AnnouncedPages, most_batches: int) -> Iterator[tuple[int, bytes]]:
        """One batch for each portion of pages, but at most `most_batches`."""
        needed = 1 + -(-len(pages) // _BATCH_PAGES)
        batches = min(needed, most_batches)
        portion = max(-(-len(pages) // max(batches - 1, 1)), 1)
        portions = pages.snapshot(portion)
        beginning: Iterable[Event] = pages.beginning()
        if batches == 1:
            beginning, portions = chain(beginning, *portions), iter(())
        # There may be fewer portions than numbers, since not every page can be announced.
        batches_of_events = [list(beginning), *portions]
        for sequence, events in enumerate(batches_of_events, start=self._next - len(batches_of_events)):
            yield sequence, self._encoder.encode(EventBatch(self._latest_s, events))


class PoolEventPublisher:
    """Takes changes of pages in the store's loop, and publishes them from a thread.

    The loop calls `opened`, `stored` and `removed`, which only append to a queue. The thread (`_run`)
    publishes it in numbered batches of the `PoolEventLog`, and answers subscribers' replays (`_answer`). If it can't
    keep up, the pool reports that it is empty, which costs some recomputing and nothing else.
    """

    def __init__(self, endpoint: EventsEndpoint) -> None:
        """Bind; `start` begins to publish.

        Raises:
            zmq.ZMQError: an address is taken.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.linger = 0
        self._live = self._context.socket(zmq.PUB)
        self._live.sndhwm = _LIVE_QUEUE
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.sndhwm = _REPLAY_QUEUE
        # A subscriber that takes too little gets no replay; without this, it would get pieces of one.
        self._replay.router_mandatory = 1
        self._replay.sndtimeo = _SEND_TIMEOUT_MS
        try:
            self._live.bind(endpoint.bind_publish)
            self._replay.bind(endpoint.bind_replay)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._log = PoolEventLog()
        self._changes: deque[_Change | PoolGeometry] = deque()
        self._geometry: PoolGeometry | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_awake = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prfaas-pool-events", daemon=True)
        self.batches = self.replays = self.overflows = 0

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

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
        return {
            "batches": self.batches,
            "replays": self.replays,
            "snapshots": self._log.snapshots,
            "overflows": self.overflows,
        }

    def close(self) -> None:
        """End the thread; unsent changes are lost."""
        self._stop.set()
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._context.destroy(linger=0)
        os.close(self._wake)

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
        if not self._is_awake:
            self._is_awake = True
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._stop.is_set():
            try:
                ready = dict(poller.poll(_POLL_MS))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    self._is_awake = False
                self._publish()
                if self._replay in ready:
                    self._answer()
                # Changes that come meanwhile are published together.
                self._stop.wait(_COALESCE_S)
            except Exception:
                # Without events the index would claim pages that are gone.
                logger.exception("the pool's pages can't be published; they are reported anew")
                self._report_anew()

    def _publish(self) -> None:
        """Publish waiting changes."""
        pages = self._log.pages
        for _ in range(len(self._changes)):
            try:
                change = self._changes.popleft()
            except IndexError:
                break  # it overflowed meanwhile
            if isinstance(change, PoolGeometry):
                # Events before it no longer count.
                self._send(self._log.open(change, time.time()))
                pages = self._log.pages
                continue
            if pages is None:
                continue
            page_id, identity, medium, is_stored = change
            if is_stored:
                pages.stored(page_id, identity, medium)
            else:
                pages.removed(page_id, medium)
        if pages is not None:
            for events in pages.take_events(_BATCH_PAGES):
                self._send(self._log.add(events, time.time()))

    def _send(self, batch: tuple[int, bytes]) -> None:
        sequence, payload = batch
        self._live.send_multipart((_TOPIC, sequence.to_bytes(8, "big"), payload))
        self.batches += 1

    def _answer(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a question for a replay has another form than vLLM's")
            return
        client, _, start = frames
        self.replays += 1
        try:
            for sequence, payload in self._log.replay(int.from_bytes(start, "big")):
                self._replay.send_multipart((client, b"", _TOPIC, sequence.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", b"", _END, b""))
        except zmq.ZMQError as error:
            logger.info("a subscriber did not take its replay: %s", error)

    def _report_anew(self) -> None:
        geometry = self._geometry
        if geometry is not None:
            self._send(self._log.open(geometry, time.time()))
