"""The connector's copies between the engine's blocks and the machine's pool."""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prfaas.serving.engines.vllm.metadata import (
    PoolLoad,
    PoolLoadTime,
    PoolLoadTimes,
    PoolPages,
    PoolStore,
)
from prfaas.serving.engines.vllm.rank_pages import RankPages
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.page_table import PageState
from prfaas.serving.pool.protocol import PageRef

logger = logging.getLogger(__name__)

# A copy job is cut into pieces of that size: a preemption waits for one of them at most.
_PIECE_BYTES = 4 << 20
# Pages that come from the SSD are looked after that often while a load waits for them.
_LOOK_S = 0.001


class _LoadFailedError(Exception):
    """A load that will not be; the request prefills locally."""


@dataclass(slots=True, eq=False)
class _OpenLoad:
    """A load that has not ended; the loading thread's own."""

    order: PoolLoad
    ordered_at_s: float
    left: "deque[PoolPages]"
    loaded_bytes: int = 0
    copy_s: float = 0.0
    wait_s: float = 0.0
    waiting_since_s: float | None = None
    """Its next page is still on the SSD."""


@dataclass(frozen=True, slots=True)
class _LoadEnd:
    """What has become of a load."""

    request_id: str
    failed: bool
    time: PoolLoadTime


@dataclass(frozen=True, slots=True, eq=False)
class _StorePiece:
    """A part of a store that is copied in one go."""

    request_id: str
    epoch: int
    pages: PoolPages


@dataclass(slots=True)
class _StoreQueue:
    """What is to be stored; under the worker's lock."""

    urgent: "deque[_StorePiece]" = field(default_factory=deque)
    patient: "deque[_StorePiece]" = field(default_factory=deque)
    copying: "list[tuple[_StorePiece, bool]]" = field(default_factory=list)
    """Pieces whose blocks are being read, and whether they are urgent."""
    uncopied: "Counter[str]" = field(default_factory=Counter)
    """Pieces that still need their blocks, by request."""


class PoolWorker:
    """Loads and stores of one rank. One thread loads, one stores, one tells the daemon what was stored.

    Loads: every ordered one is reported exactly once, as done or as failed. A failed one makes vLLM prefill the
    request locally.

    Stores: blocks are read after the step that has filled them. What vLLM may free at once (states, windows) is read
    before the next step computes (`settle`), anything else while later steps run: blocks of a running request
    stay, and those of a finished one are held until `finished` names it.
    """

    def __init__(
        self,
        pages: RankPages,
        client: PoolClient,
        load_wait_s: float,
        stats: ConnectorStats,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            pages: this rank's parts.
            client: this rank's session with the daemon, which closes with this.
            load_wait_s: a load waits that long at most for pages that come from the SSD.
            stats: where results are counted.
            now_s: a clock.
        """
        self._pages = pages
        self._client = client
        self._load_wait_s = load_wait_s
        self.stats = stats
        self._now_s = now_s
        self._closing = False
        self._new_loads: queue.SimpleQueue[_OpenLoad] = queue.SimpleQueue()
        self._load_ends: queue.SimpleQueue[_LoadEnd] = queue.SimpleQueue()
        self._load_times = PoolLoadTimes()
        self._load_ordered = threading.Event()
        self._stores = _StoreQueue()
        self._stores_changed = threading.Condition()
        self._held: set[str] = set()
        self._counts: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"prfaas-pool-{name}", daemon=True)
            for name, run in (
                ("load", self._run_loads),
                ("store", self._run_stores),
                ("tell", self._run_news),
            )
        ]
        for thread in self._threads:
            thread.start()

    # ---- the step loop's side: none of these waits for the daemon

    def order(self, loads: Iterable[PoolLoad]) -> None:
        """Accept this step's loads."""
        for load in loads:
            pieces = deque(piece for part in load.parts for piece in self._pieces(part))
            self._new_loads.put(_OpenLoad(load, self._now_s(), pieces))
            self._load_ordered.set()

    def store(self, stores: Sequence[PoolStore]) -> None:
        """Accept what this step has completed; at its end, when the compute stream has queued all of its writes."""
        if not stores:
            return
        for group in {part.group for store in stores for part in store.parts}:
            self._pages.mark_written(group)
        with self._stores_changed:
            for store in stores:
                pieces = [
                    _StorePiece(store.request_id, store.epoch, piece)
                    for part in store.parts
                    for piece in self._pieces(part)
                ]
                (self._stores.urgent if store.urgent else self._stores.patient).extend(pieces)
                if pieces:
                    self._stores.uncopied[store.request_id] += len(pieces)
            self._stores_changed.notify_all()

    def settle(self, preempted: Iterable[str]) -> None:
        """Before a step computes: read what is urgent of the last one, and nothing more of preempted requests."""
        # The step loop lends a hand, so it waits for one piece of the storing thread's at most.
        while (piece := self._take_urgent()) is not None:
            self._copy(piece, urgent=True)
        gone = set(preempted)
        with self._stores_changed:
            if gone:
                self._cancel(gone)
            while any(urgent or piece.request_id in gone for piece, urgent in self._stores.copying):
                self._stores_changed.wait()

    def hold(self, held: Iterable[str]) -> None:
        """Take note of finished requests whose blocks vLLM keeps for us."""
        self._held.update(held)

    def finished(self) -> set[str]:
        """Held requests whose blocks nobody reads any more; each is named once."""
        if not self._held:
            return set()
        with self._stores_changed:
            done = {request_id for request_id in self._held if request_id not in self._stores.uncopied}
        self._held -= done
        return done

    def results(self) -> tuple[set[str], set[str]]:
        """What has become of the ordered loads.

        Returns:
            Requests whose load has ended, and those of them that failed; each load is named once.
        """
        ended: set[str] = set()
        failed: set[str] = set()
        while not self._load_ends.empty():
            end = self._load_ends.get()
            ended.add(end.request_id)
            if end.failed:
                failed.add(end.request_id)
            self._load_times.loads[end.request_id] = end.time
            self.stats.add("pool_loads_failed" if end.failed else "pool_loads_completed")
            self.stats.add("pool_bytes_loaded", end.time.loaded_bytes)
            self.stats.add("pool_load_seconds", end.time.copy_s)
        while not self._counts.empty():
            self.stats.add(*self._counts.get())
        return ended, failed

    def take_load_times(self) -> PoolLoadTimes | None:
        """Of the loads that `results` has named since the last call; None where there are none."""
        times, self._load_times = self._load_times, PoolLoadTimes()
        return times if times.loads else None

    def close(self) -> None:
        """End the threads and the session; what is not stored is given up."""
        self._closing = True
        self._load_ordered.set()
        with self._stores_changed:
            self._stores_changed.notify_all()
        self._news.put(None)
        for thread in self._threads:
            thread.join(timeout=10)
        self._client.close()

    def _pieces(self, part: PoolPages) -> list[PoolPages]:
        count = max(1, _PIECE_BYTES // self._pages.rank_bytes(part.group))
        return [
            PoolPages(
                part.group,
                part.first_block + first,
                part.block_ids[first : first + count],
                part.pages[first : first + count],
            )
            for first in range(0, len(part.block_ids), count)
        ]

    # ---- the loading thread

    def _run_loads(self) -> None:
        waiting: list[_OpenLoad] = []
        while not self._closing:
            self._load_ordered.wait(_LOOK_S if waiting else None)
            self._load_ordered.clear()
            while not self._new_loads.empty():
                waiting.append(self._new_loads.get())
            for load in tuple(waiting):
                end = self._advanced(load)
                if end is not None:
                    waiting.remove(load)
                    self._load_ends.put(end)

    def _advanced(self, load: _OpenLoad) -> _LoadEnd | None:
        """Load what is in memory; the result once that is all of it, or it has failed. Never raises."""
        request_id, failed = load.order.request_id, False
        try:
            while load.left:
                if not self._load_piece(load):
                    return None
            refs = [ref for part in load.order.parts for ref in part.pages]
            if not self._client.intact(load.order.epoch, refs):
                raise _LoadFailedError("the pool's pages changed meanwhile")
        except _LoadFailedError as error:
            failed = True
            logger.warning("request %s prefills locally: %s", request_id, error)
        except Exception:
            failed = True
            logger.exception("loading the prefix of request %s from the pool failed", request_id)
        loaded_bytes = 0 if failed else load.loaded_bytes
        elapsed_s = self._now_s() - load.ordered_at_s
        return _LoadEnd(request_id, failed, PoolLoadTime(loaded_bytes, load.wait_s, load.copy_s, elapsed_s))

    def _load_piece(self, load: _OpenLoad) -> bool:
        """Fill the next blocks as far as their pages are in memory; False: the next one is not."""
        part = load.left[0]
        if self._client.epoch != load.order.epoch:
            raise _LoadFailedError("the pool's daemon is gone or was restarted")
        count = self._count_readable(part.pages)
        now_s = self._now_s()
        if count == 0:
            if now_s - load.ordered_at_s > self._load_wait_s:
                raise _LoadFailedError(f"the pool's SSD has not given its pages for {self._load_wait_s:g} s")
            if load.waiting_since_s is None:
                load.waiting_since_s = now_s
            return False
        if load.waiting_since_s is not None:
            load.wait_s += now_s - load.waiting_since_s
            load.waiting_since_s = None
        arena, pages = self._client.arena, part.pages[:count]
        for page in pages:
            checksum = self._client.checksum_to_verify(page.slot)
            if checksum is not None and checksum != self._pages.checksum(arena, part.group, page):
                raise _LoadFailedError("a page of the pool is not what was stored")
        self._pages.load(arena, part.group, part.block_ids[:count], pages)
        load.left.popleft()
        if count < len(part.pages):
            rest = PoolPages(part.group, part.first_block + count, part.block_ids[count:], part.pages[count:])
            load.left.appendleft(rest)
        load.loaded_bytes += count * self._pages.rank_bytes(part.group)
        load.copy_s += self._now_s() - now_s
        return True

    def _count_readable(self, pages: Sequence[PageRef]) -> int:
        """How many of the first pages can be copied now."""
        for count, page in enumerate(pages):
            state = self._client.page_state(page.slot)
            if not state.is_readable:
                if state is not PageState.PROMOTING:
                    raise _LoadFailedError(f"a page of the pool is {state.name} where it was to be read")
                return count
        return len(pages)

    # ---- the storing thread, and the step loop where it can't wait

    def _run_stores(self) -> None:
        stores = self._stores
        while not self._closing:
            with self._stores_changed:
                while not (stores.urgent or stores.patient or self._closing):
                    self._stores_changed.wait()
                if self._closing:
                    return
                urgent = bool(stores.urgent)
                piece = (stores.urgent if urgent else stores.patient).popleft()
                stores.copying.append((piece, urgent))
            self._copy(piece, urgent=urgent)

    def _take_urgent(self) -> _StorePiece | None:
        with self._stores_changed:
            if not self._stores.urgent:
                return None
            piece = self._stores.urgent.popleft()
            self._stores.copying.append((piece, True))
            return piece

    def _copy(self, piece: _StorePiece, *, urgent: bool) -> None:
        """Blocks into their pages; what the daemon must hear of it is told by another thread. Never raises."""
        pages, started_s = piece.pages, self._now_s()
        news: Callable[[], None] | None = partial(self._client.abort, pages.pages)
        try:
            with self._client.writing(piece.epoch) as allowed:
                if allowed:
                    arena = self._client.arena
                    sums = self._pages.store(arena, pages.group, pages.block_ids, pages.pages)
                    news = partial(self._client.commit, tuple(zip(pages.pages, sums, strict=True)))
                    self._counts.put(("pool_bytes_stored", len(sums) * self._pages.rank_bytes(pages.group)))
                    self._counts.put(("pool_store_seconds", self._now_s() - started_s))
                else:
                    news = None  # the daemon was restarted: it knows nothing of this reservation
        except Exception:
            logger.exception("storing the prefix of request %s in the pool failed", piece.request_id)
        if news is not None:
            self._news.put(news)
        with self._stores_changed:
            self._stores.copying.remove((piece, urgent))
            self._count_copied(piece.request_id)
            self._stores_changed.notify_all()

    def _cancel(self, request_ids: set[str]) -> None:
        """Copy nothing more of these requests; under the lock."""
        for pieces in (self._stores.urgent, self._stores.patient):
            cancelled = [piece for piece in pieces if piece.request_id in request_ids]
            for piece in cancelled:
                pieces.remove(piece)
                self._count_copied(piece.request_id)
                self._news.put(partial(self._client.abort, piece.pages.pages))

    def _count_copied(self, request_id: str) -> None:
        self._stores.uncopied[request_id] -= 1
        if not self._stores.uncopied[request_id]:
            del self._stores.uncopied[request_id]

    # ---- the telling thread

    def _run_news(self) -> None:
        while (news := self._news.get()) is not None:
            try:
                news()
            except Exception:
                logger.exception("the pool could not be told what became of its pages")
