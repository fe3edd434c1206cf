"""Events of a stream that leave a little later than they come, so that a pause in their coming is not seen."""

import asyncio
import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable

from prfaas.serving.gateway.stream_resume import EventSink
from prfaas.serving.tasks import end_all

# How much further apart events leave than they come, before a pause and in it. A reader notices twice as far, and
# busy machines add to it.
STRETCH = 1.25

# At a steady pace four times the pause and five events are enough, by `STRETCH`.
_PATIENCE = 6.0

# The pace of a stream is the median of its latest intervals.
_INTERVALS = 32


class HeldEvents:
    """Stands in front of a sink. Events keep their order, and none is lost unless the sink fails or `close` is called.

    It passes everything on at once until `hold` is called. From then on what is added leaves `STRETCH` times further
    apart than it came, until what is held lasts as long as the pause that is ahead. It leaves so as well while nothing
    more is added. `write` ends that: what is held leaves at once.
    """

    def __init__(self, sink: EventSink, now_s: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._now_s = now_s
        self._events: deque[bytes] = deque()
        self._intervals_s: deque[float] = deque(maxlen=_INTERVALS)
        self._came_s: float | None = None
        self._cover_s = 0.0
        self.pause_s: float | None = None
        """How long nothing had been added when something was first written; None: nothing was yet."""
        self._leaving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._filled = asyncio.Event()
        self._released = False

    async def add(self, event: bytes) -> None:
        """Give on an event that may be held. Raises what the sink raises, perhaps for an event before it."""
        now_s = self._now_s()
        if self._came_s is not None:
            self._intervals_s.append(now_s - self._came_s)
        self._came_s = now_s
        if self._leaving is None:
            await self._sink.write(event)
            return
        if self._leaving.done():
            self._leaving.result()
        self._events.append(event)
        self._note_filling()
        self._changed.set()

    async def write(self, event: bytes, /) -> None:
        """Give on an event that leaves now, behind all that are held. Raises what the sink raises."""
        if self.pause_s is None and self._came_s is not None:
            self.pause_s = self._now_s() - self._came_s
        await self.release()
        await self._sink.write(event)

    def hold(self, pause_s: float) -> None:
        """Begin to hold events back for a pause of so many seconds."""
        self._cover_s = pause_s
        self._note_filling()
        if self._leaving is None and not self._released:
            self._leaving = asyncio.get_running_loop().create_task(self._leave(self._came_s or 0.0))

    async def filled(self) -> None:
        """Wait until what is held lasts as long as the pause, or no more is to come, or too slowly."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE * (self._cover_s + self._pace_s())):
                await self._filled.wait()

    def end_filling(self) -> None:
        """No more is to come: nobody need wait for it."""
        self._filled.set()

    async def release(self) -> None:
        """Let leave at once what is held. Raises what the sink raises."""
        self._released = True
        if self._leaving is not None:
            self._changed.set()
            # It is not cancelled: an event that is being written must not be written again, nor be lost.
            await asyncio.wait((self._leaving,))
            leaving, self._leaving = self._leaving, None
            leaving.result()
            while self._events:
                await self._sink.write(self._events.popleft())

    async def close(self) -> None:
        """What is held is lost."""
        if self._leaving is not None:
            await end_all(self._leaving)
            self._leaving = None

    async def _leave(self, left_s: float) -> None:
        """Let events leave in their time; `left_s`: when the one before left."""
        while not self._released:
            self._changed.clear()
            due_s = left_s + self._interval_s() if self._events else None
            if due_s is None or due_s > self._now_s():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if due_s is None else due_s - self._now_s()):
                        await self._changed.wait()
                continue
            left_s = self._now_s()
            await self._sink.write(self._events.popleft())

    def _interval_s(self) -> float:
        """Between two events that leave."""
        pace_s = self._pace_s()
        return pace_s if self._lasts(pace_s) else STRETCH * pace_s

    def _pace_s(self) -> float:
        return statistics.median(self._intervals_s) if self._intervals_s else 0.0

    def _lasts(self, pace_s: float) -> bool:
        # The next one leaves within an interval, perhaps at once. With none held, the last one has just left.
        return max(len(self._events), 1) * STRETCH * pace_s >= self._cover_s

    def _note_filling(self) -> None:
        if self._lasts(self._pace_s()):
            self._filled.set()
