"""What of a failure is this process's own doing: its event loop is late, or it has no file descriptor left.

Both look like dead engines from here, and are not.
"""

import asyncio
import errno
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_TICK_S = 0.05
# What a tick may take and still count in full: on a busy machine timers are never quite on time.
_MOST_COUNTED_S = 0.25
_TICKS_SHOWN = 100


class LoopClock:
    """Seconds in which this event loop ran on time.

    Of a spell in which the loop was late, or the process stood still, at most 0.25 s count. What others have to answer
    in time is measured with this clock: an answer that lies unread in a socket is not late.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """It stands still until `run`."""
        self._monotonic_s = monotonic_s
        self._ticked_s = monotonic_s()
        self._on_time_s = 0.0
        self._lags_s = deque([0.0], maxlen=_TICKS_SHOWN)

    def __call__(self) -> float:
        return self._on_time_s

    @property
    def lag_s(self) -> float:
        """How late the loop was, at worst in the last five seconds in which it was on time."""
        return max(self._lags_s)

    def tick(self) -> None:
        """The loop has come around; it should every 0.05 s."""
        now_s = self._monotonic_s()
        passed_s, self._ticked_s = now_s - self._ticked_s, now_s
        self._on_time_s += min(passed_s, _MOST_COUNTED_S)
        self._lags_s.append(max(passed_s - _TICK_S, 0.0))

    async def run(self) -> None:
        """Until cancelled."""
        self._ticked_s = self._monotonic_s()
        while True:
            await asyncio.sleep(_TICK_S)
            self.tick()


@asynccontextmanager
async def on_time_timeout(limit_s: float, clock: Callable[[], float]) -> AsyncIterator[None]:
    """`asyncio.timeout` by a clock such as `LoopClock`.

    Raises:
        TimeoutError: the body took longer.
    """
    loop = asyncio.get_running_loop()
    end_s = clock() + limit_s
    alarm: asyncio.TimerHandle
    async with asyncio.timeout(None) as timeout:

        def look() -> None:
            nonlocal alarm
            left_s = end_s - clock()
            if left_s > 0:
                alarm = loop.call_later(max(left_s, _TICK_S), look)
            else:
                timeout.reschedule(loop.time())

        alarm = loop.call_later(limit_s, look)
        try:
            yield
        finally:
            alarm.cancel()


def lacks_descriptors(error: BaseException | None) -> bool:
    """Whether a connection could not be made because this process, or this machine, has no file descriptor left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False
