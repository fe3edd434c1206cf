"""KV events of all engines: received and decoded in one thread, applied in the event loop in small slices."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import zmq

from prfaas.cache.events import EventBatch
from prfaas.control.event_source import EventSource
from prfaas.control.subscription import Apply, Drop
from prfaas.deployment import EventsEndpoint

logger = logging.getLogger(__name__)

SLICE_S = 0.001
_POLL_MS = 100
# With so many batches waiting for the loop, sockets are left alone: their queues fill, and gaps are replayed.
_MOST_WAITING = 2000


class EventFeed:
    """Calls `apply(instance, batch)` and `drop(instance, reason)` in the event loop, in each engine's order.

    The loop is given back after every millisecond of applying; one batch (an engine's step) is not divided.
    """

    def __init__(
        self,
        endpoints: Mapping[str, EventsEndpoint],
        *,
        apply: Callable[[str, EventBatch], None],
        drop: Callable[[str, str], None],
    ) -> None:
        """`endpoints` by instance name."""
        self._endpoints = endpoints
        self._apply = apply
        self._drop = drop
        self._sources: dict[str, EventSource] = {}
        self._resets: deque[tuple[str, str]] = deque()
        self._waiting: deque[tuple[str, Apply | Drop]] = deque()
        self._stop = threading.Event()
        self._thread_errors = 0
        self.refused_batches = 0

    def reset(self, name: str, reason: str) -> None:
        """An engine lost its cache: drop what is known of it, and ask it what it holds."""
        if name in self._endpoints:
            self._resets.append((name, reason))

    async def run(self) -> None:
        """Until cancelled."""
        if not self._endpoints:
            return
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        self._stop.clear()
        thread = threading.Thread(
            target=self._receive,
            args=(lambda: loop.call_soon_threadsafe(news.set),),
            name="prfaas-kv-events",
            daemon=True,
        )
        thread.start()
        try:
            while True:
                await news.wait()
                news.clear()
                while self._waiting:
                    self._apply_slice()
                    await asyncio.sleep(0)
        finally:
            self._stop.set()
            await asyncio.shield(loop.run_in_executor(None, thread.join))

    def state(self) -> dict[str, dict[str, Any]]:
        """Per instance: the last sequence applied, and what was missed, replayed, given up and started again."""
        return {
            name: {
                "sequence": source.subscription.sequence,
                "replaying": source.subscription.is_replaying,
                "gaps": source.subscription.gaps,
                "replays": source.subscription.replays,
                "resyncs": source.subscription.resyncs,
                "restarts": source.subscription.restarts,
                "malformed": source.malformed,
            }
            for name, source in list(self._sources.items())
        }

    @property
    def waiting_batches(self) -> int:
        """Received and not applied yet."""
        return len(self._waiting)

    @property
    def thread_errors(self) -> int:
        """Times that receiving failed in a way nobody thought of; every source was started again then."""
        return self._thread_errors

    def _apply_slice(self) -> None:
        end_s = time.perf_counter() + SLICE_S
        while self._waiting and time.perf_counter() < end_s:
            name, step = self._waiting.popleft()
            if isinstance(step, Drop):
                self._drop(name, step.reason)
            else:
                self._apply_batch(name, step.batch)

    def _apply_batch(self, name: str, batch: EventBatch) -> None:
        try:
            self._apply(name, batch)
        except Exception:
            # Whatever one engine says, the others and the gateway go on.
            self.refused_batches += 1
            logger.exception("%s publishes events that can't be applied", name)
            self._drop(name, "unreadable")

    def _receive(self, wake: Callable[[], object]) -> None:
        while not self._stop.is_set():
            try:
                self._receive_with(zmq.Context(), wake)
            except zmq.ZMQError:
                self._thread_errors += 1
                logger.exception("KV events can't be received; starting again")
                self._stop.wait(1.0)

    def _receive_with(self, context: "zmq.Context[zmq.Socket[bytes]]", wake: Callable[[], object]) -> None:
        poller = zmq.Poller()

        def on_step(name: str, step: Apply | Drop) -> None:
            self._waiting.append((name, step))

        try:
            for name, endpoint in self._endpoints.items():
                source = EventSource(name, endpoint, context, poller, on_step)
                self._sources[name] = source
                source.start(time.monotonic())
            while not self._stop.is_set():
                if len(self._waiting) > _MOST_WAITING:
                    self._stop.wait(0.01)
                    continue
                ready = dict(poller.poll(_POLL_MS))
                now_s = time.monotonic()
                while self._resets:
                    name, reason = self._resets.popleft()
                    self._sources[name].reset(now_s, reason)
                for source in self._sources.values():
                    source.read(ready, now_s)
                if self._waiting:
                    # A loop that is closed already has nobody to wake.
                    with suppress(RuntimeError):
                        wake()
        finally:
            for source in self._sources.values():
                source.close()
            context.destroy(linger=0)
