"""The engine's blocks on their way into pages of the machine's pool."""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from prfaas.serving.engines.vllm.arena_pages import Bytes1D
from prfaas.serving.engines.vllm.metadata import PoolPages, PoolStore
from prfaas.serving.engines.vllm.rank_pages import RankPages
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.page_table import PageState

logger = logging.getLogger(__name__)

# Pieces that are copied while the daemon does not know of them yet.
_MOST_UNTOLD = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A part of a store that is copied in one go."""

    request_id: str
    epoch: int
    urgent: bool
    pages: PoolPages


@dataclass(slots=True)
class _Waiting:
    """What is to be copied; under the writer's lock."""

    urgent: deque[_Piece] = field(default_factory=deque)
    patient: deque[_Piece] = field(default_factory=deque)
    running: list[_Piece] = field(default_factory=list)
    """Their blocks are being read."""
    uncopied: Counter[str] = field(default_factory=Counter)
    """Pieces that still need their blocks, by request."""

    @property
    def has_any(self) -> bool:
        """True if blocks are being read, or are to be."""
        return bool(self.running or self.urgent or self.patient)

    def take(self) -> _Piece | None:
        """The next piece, which is running then."""
        pieces = self.urgent or self.patient
        if not pieces:
            return None
        self.running.append(pieces[0])
        return pieces.popleft()

    def leave(self, piece: _Piece) -> None:
        """Its blocks are no longer needed."""
        self.uncopied[piece.request_id] -= 1
        if not self.uncopied[piece.request_id]:
            del self.uncopied[piece.request_id]

    def cancel(self, request_ids: set[str]) -> list[_Piece]:
        """Forget what has not begun of these requests, and return it."""
        cancelled = [
            p for pieces in (self.urgent, self.patient) for p in pieces if p.request_id in request_ids
        ]
        for piece in cancelled:
            (self.urgent if piece.urgent else self.patient).remove(piece)
            self.leave(piece)
        return cancelled


class PoolWriter:
    """Blocks are read after the step that has filled them: one thread copies, another sums up and tells the daemon.

    What vLLM may free at once (states, windows) is read before the next step computes (`settle`), anything else while
    later steps run. Blocks of a running request stay, and those of a finished one are held until `finished` names it.
    The step loop never waits for the daemon.
    """

    def __init__(
        self,
        pages: RankPages,
        client: PoolClient,
        stats: ConnectorStats,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            pages: this rank's parts.
            client: this rank's session with the daemon.
            stats: where results are counted.
            now_s: a clock.
        """
        self._pages = pages
        self._client = client
        self.stats = stats
        self._now_s = now_s
        self._closing = False
        self._waiting = _Waiting()
        self._changed = threading.Condition()
        self._held: set[str] = set()
        self._counts: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = (
            threading.Thread(target=self._run, name="prfaas-pool-store", daemon=True),
            threading.Thread(target=self._tell, name="prfaas-pool-tell", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    # The step loop

    def order(self, stores: Sequence[PoolStore]) -> None:
        """Accept what this step has completed: at its end, when the compute stream has queued all of its writes."""
        if not stores:
            return
        for group in {part.group for store in stores for part in store.parts}:
            self._pages.mark_written(group)
        with self._changed:
            for store in stores:
                pieces = [
                    _Piece(store.request_id, store.epoch, store.urgent, pages)
                    for part in store.parts
                    for pages in self._pages.pieces(part)
                ]
                (self._waiting.urgent if store.urgent else self._waiting.patient).extend(pieces)
                if pieces:
                    self._waiting.uncopied[store.request_id] += len(pieces)
            self._changed.notify_all()

    def settle(self, preempted: Iterable[str]) -> None:
        """Before a step computes: read what is urgent of the last one, and nothing more of preempted requests."""
        gone = set(preempted)
        with self._changed:
            for piece in self._waiting.cancel(gone) if gone else ():
                self._news.put(partial(self._client.abort, piece.pages.pages))
        # The step loop lends a hand: so it waits for one piece of the other thread at most.
        while (urgent := self._take_urgent()) is not None:
            self._copy(urgent)
        with self._changed:
            while any(piece.urgent or piece.request_id in gone for piece in self._waiting.running):
                self._changed.wait()

    def hold(self, request_ids: Iterable[str]) -> None:
        """Take note of finished requests whose blocks vLLM keeps for us."""
        self._held.update(request_ids)

    def finished(self) -> set[str]:
        """Held requests whose blocks nobody here will read any more; each is named once."""
        while not self._counts.empty():
            self.stats.add(*self._counts.get())
        if not self._held:
            return set()
        with self._changed:
            done = self._held - self._waiting.uncopied.keys()
        self._held -= done
        return done

    def close(self) -> None:
        """End the threads; what was not copied is given up."""
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        self._threads[0].join(timeout=10)
        self._news.put(None)
        self._threads[1].join(timeout=10)

    def _take_urgent(self) -> _Piece | None:
        with self._changed:
            return self._waiting.take() if self._waiting.urgent else None

    # The storing thread, and the step loop for what is urgent

    def _run(self) -> None:
        while (piece := self._next()) is not None:
            self._copy(piece)

    def _next(self) -> _Piece | None:
        with self._changed:
            while not self._closing:
                piece = self._waiting.take()
                if piece is not None:
                    return piece
                self._changed.wait()
        return None

    def _copy(self, piece: _Piece) -> None:
        """Blocks into their pages; the daemon hears of it later. Never raises."""
        try:
            news = self._write(piece)
        except Exception:
            logger.exception("storing the prefix of request %s in the pool failed", piece.request_id)
            news = partial(self._client.abort, piece.pages.pages)
        with self._changed:
            self._waiting.running.remove(piece)
            self._waiting.leave(piece)
            self._changed.notify_all()
        self._news.put(news)

    def _write(self, piece: _Piece) -> Callable[[], None]:
        """What the daemon must be told of it."""
        started_s, group, refs = self._now_s(), piece.pages.group, piece.pages.pages
        with self._client.writing(piece.epoch) as allowed:
            # A daemon that was restarted, or gave a reservation up, has other use for the slots.
            if not allowed or (self._client.page_states(refs) != PageState.WRITING).any():
                return partial(self._client.abort, refs)
            arena = self._client.arena
            self._pages.store(arena, group, piece.pages.block_ids, refs)
        self._counts.put(("pool_bytes_stored", len(refs) * self._pages.rank_bytes(group)))
        self._counts.put(("pool_store_seconds", self._now_s() - started_s))
        return partial(self._commit, arena, piece.pages)

    # The telling thread

    def _let_copies_end(self) -> None:
        """Copies first, up to a point: two threads of one process hold each other up more than they gain."""
        with self._changed:
            while self._waiting.has_any and self._news.qsize() < _MOST_UNTOLD and not self._closing:
                self._changed.wait()

    def _commit(self, arena: Bytes1D, pages: PoolPages) -> None:
        # Checksums are computed here since neither the engine nor the next copy needs to wait for them.
        checksums = [self._pages.checksum(arena, pages.group, ref) for ref in pages.pages]
        self._client.commit(tuple(zip(pages.pages, checksums, strict=True)))

    def _tell(self) -> None:
        while (news := self._news.get()) is not None:
            self._let_copies_end()
            try:
                news()
            except Exception:
                logger.exception("the pool could not be told what became of its pages")
