"""Pages of the machine's pool on their way into the engine's blocks."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.serving.engines.vllm.metadata import PoolLoad, PoolLoadTime, PoolPages, StepReports
from prfaas.serving.engines.vllm.rank_pages import RankPages
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.pool.page_table import PageState, are_readable
from prfaas.serving.pool.protocol import PageRef

logger = logging.getLogger(__name__)

# Pages that come from the SSD are looked after that often while a load waits for them.
_LOOK_S = 0.001


class _LoadFailedError(Exception):
    """A load that will not be."""


@dataclass(slots=True, eq=False)
class _OpenLoad:
    """A load that has not ended; the loading thread's own."""

    order: PoolLoad
    ordered_at_s: float
    left: deque[PoolPages] | None = None
    """In pieces, after each of which other loads have their turn; None: not begun."""
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


class PoolReader:
    """Loads are asynchronous: one thread copies, the step loop only looks at what has become of them.

    Every ordered load is reported exactly once, as done or as failed. A failed one makes vLLM prefill the request
    locally (`kv_load_failure_policy=recompute`).
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
            client: this rank's session with the daemon.
            load_wait_s: a load waits that long at most for pages that come from the SSD.
            stats: where results are counted.
            now_s: a clock.
        """
        self._pages = pages
        self._client = client
        self._load_wait_s = load_wait_s
        self.stats = stats
        self.on_end: Callable[[], None] = lambda: None
        """Called in the loading thread when a load has ended; must not raise."""
        self._now_s = now_s
        self._closing = False
        self._ordered: queue.SimpleQueue[_OpenLoad] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[_LoadEnd] = queue.SimpleQueue()
        self._times = StepReports()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prfaas-pool-load", daemon=True)
        self._thread.start()

    def order(self, loads: Iterable[PoolLoad]) -> None:
        """Accept this step's loads."""
        for load in loads:
            self._ordered.put(_OpenLoad(load, self._now_s()))
            self._wake.set()

    def results(self) -> tuple[set[str], set[str]]:
        """Results of the ordered loads.

        Returns:
            Requests whose load has ended, and those of them that failed; each load is named once.
        """
        ended: set[str] = set()
        failed: set[str] = set()
        while not self._ends.empty():
            end = self._ends.get()
            ended.add(end.request_id)
            if end.failed:
                failed.add(end.request_id)
            self._times.loads[end.request_id] = end.time
            self.stats.add("pool_loads_failed" if end.failed else "pool_loads_completed")
            self.stats.add("pool_bytes_loaded", end.time.loaded_bytes)
            self.stats.add("pool_load_seconds", end.time.copy_s)
        return ended, failed

    def take_times(self) -> StepReports | None:
        """Times of the loads that `results` has named since the last call; None where there are none."""
        times, self._times = self._times, StepReports()
        return times if times.loads else None

    def close(self) -> None:
        """End the loading thread."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=10)

    # The loading thread

    def _run(self) -> None:
        waiting: list[_OpenLoad] = []
        while not self._closing:
            # What can go on at once does so; what waits for the SSD is looked after now and then.
            if not any(load.waiting_since_s is None for load in waiting):
                self._wake.wait(_LOOK_S if waiting else None)
            self._wake.clear()
            while not self._ordered.empty():
                waiting.append(self._ordered.get())
            for load in tuple(waiting):
                end = self._advanced(load)
                if end is not None:
                    waiting.remove(load)
                    self._ends.put(end)
                    self.on_end()

    def _advanced(self, load: _OpenLoad) -> _LoadEnd | None:
        """Load one piece, if it is in memory; the result if that was the last one, or it has failed. Never raises."""
        request_id, failed = load.order.request_id, False
        try:
            if load.left is None:
                load.left = deque(piece for part in load.order.parts for piece in self._pages.pieces(part))
            if load.left:
                self._load_piece(load, load.left)
            if load.left:
                return None
            refs = [ref for part in load.order.parts for ref in part.pages]
            if not self._client.intact(load.order.epoch, refs):
                raise _LoadFailedError("the pool's daemon is gone, or its pages changed meanwhile")
        except _LoadFailedError as error:
            failed = True
            logger.warning("request %s prefills locally: %s", request_id, error)
        except Exception:
            failed = True
            logger.exception("loading the prefix of request %s from the pool failed", request_id)
        loaded_bytes = 0 if failed else load.loaded_bytes
        elapsed_s = self._now_s() - load.ordered_at_s
        return _LoadEnd(request_id, failed, PoolLoadTime(loaded_bytes, load.wait_s, load.copy_s, elapsed_s))

    def _load_piece(self, load: _OpenLoad, left: deque[PoolPages]) -> None:
        """Fill the next blocks, as far as their pages are in memory."""
        part = left[0]
        if self._client.epoch != load.order.epoch:
            raise _LoadFailedError("the pool's daemon is gone or was restarted")
        count = self._count_readable(part.pages)
        now_s = self._now_s()
        if count == 0 and part.pages:
            if now_s - load.ordered_at_s > self._load_wait_s:
                raise _LoadFailedError(f"the pool's SSD has not given its pages for {self._load_wait_s:g} s")
            if load.waiting_since_s is None:
                load.waiting_since_s = now_s
            return
        if load.waiting_since_s is not None:
            load.wait_s += now_s - load.waiting_since_s
            load.waiting_since_s = None
        arena, refs = self._client.arena, part.pages[:count]
        to_verify = self._client.checksums_to_verify(refs)
        for ref in refs if to_verify else ():
            if ref.slot in to_verify and to_verify[ref.slot] != self._pages.checksum(arena, part.group, ref):
                raise _LoadFailedError("a page of the pool is not what was stored")
        self._pages.load(arena, part.group, part.block_ids[:count], refs)
        left.popleft()
        if count < len(part.pages):
            left.appendleft(part.cut(count))
        load.loaded_bytes += count * self._pages.rank_bytes(part.group)
        load.copy_s += self._now_s() - now_s

    def _count_readable(self, refs: Sequence[PageRef]) -> int:
        """How many of the first pages can be copied now."""
        states = self._client.page_states(refs)
        unreadable = np.flatnonzero(~are_readable(states))
        if not len(unreadable):
            return len(refs)
        state = PageState(states[unreadable[0]])
        if state is not PageState.PROMOTING:
            raise _LoadFailedError(f"a page of the pool is {state.name} where it was to be read")
        return int(unreadable[0])
