"""Durations of a stand-in's work: prefill by a latency profile, decode by a clock that all requests share."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from prfaas.core.latency.cached_prefix import after_prefix_s
from prfaas.core.latency.profile import LatencyProfile

DEFAULT_STEP_S = 0.025
"""One decode step where a profile has no decode times: the paper's 40 tokens/s."""


class Pace:
    """An instance's times, `speedup` times as fast as its profile.

    Outside a profile's range: below it the time at its lower end, above it in proportion to length or batch.
    """

    def __init__(self, profile: LatencyProfile, speedup: float) -> None:
        self._profile = profile
        self._speedup = speedup

    def prefill_s(self, uncached_tokens: int, reused_tokens: int = 0) -> float:
        """Seconds from a prefill's start until `uncached_tokens` tokens are done, behind `reused_tokens`."""
        return after_prefix_s(self._whole_s, uncached_tokens, reused_tokens)

    def _whole_s(self, tokens: float) -> float:
        low, high = self._profile.range_tokens
        inside = min(max(tokens, low), high)
        return self._profile.prefill_s(inside) * max(tokens / high, 1.0) / self._speedup

    def step_s(self, batch: int) -> float:
        """Seconds of one decode step."""
        if self._profile.decode is None:
            return DEFAULT_STEP_S / self._speedup
        low, high = self._profile.range_batch
        inside = min(max(batch, low), high)
        return self._profile.decode_step_s(inside) * max(batch / high, 1.0) / self._speedup


class DecodeClock:
    """Counts decode steps of a batch that changes; every request in the batch gets one token per step.

    Between two changes it costs nothing, however many steps pass. Use it from one event loop.
    """

    def __init__(self, step_s: Callable[[int], float]) -> None:
        self._step_s = step_s
        self._loop = asyncio.get_running_loop()
        self._steps = 0.0
        self._at_s = self._loop.time()
        self._batch = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None
        self.request_seconds = 0.0
        """Seconds that requests have spent in the batch, all together."""
        self.tokens = 0.0
        """Tokens that requests have got, all together."""

    @property
    def batch(self) -> int:
        """Requests in the batch."""
        return self._batch

    @property
    def step_now_s(self) -> float:
        """Seconds of a step with the present batch."""
        return self._step_s(max(self._batch, 1))

    def steps(self) -> float:
        """Steps done until now, in fractions."""
        # Held, the clock's own time lies ahead of the loop's.
        now_s = max(self._loop.time(), self._at_s)
        if self._batch:
            elapsed_s = now_s - self._at_s
            done = elapsed_s / self._step_s(self._batch)
            self._steps += done
            self.request_seconds += elapsed_s * self._batch
            self.tokens += done * self._batch
        self._at_s = now_s
        return self._steps

    def change_batch(self, by: int) -> None:
        """Requests join (positive) or leave (negative)."""
        self.steps()
        self._batch += by
        self._arm()

    async def reach(self, target_steps: float) -> None:
        """Wait until so many steps are done; at least one request must be in the batch."""
        if self.steps() >= target_steps:
            return
        reached: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._waiting, (target_steps, next(self._order), reached))
        self._arm()
        await reached

    def hold(self, seconds: float) -> None:
        """No step goes on for so long from now, as when a GPU hangs. A longer hold that is under way stays."""
        self.steps()
        self._at_s = max(self._at_s, self._loop.time() + seconds)
        self._arm()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self.close()
        while self._waiting and self._waiting[0][2].done():
            heapq.heappop(self._waiting)
        if self._waiting and self._batch:
            left = max(0.0, self._waiting[0][0] - self._steps)
            self._timer = self._loop.call_at(self._at_s + left * self._step_s(self._batch), self._ring)

    def _ring(self) -> None:
        # A timer may be early by rounding: a millionth of a step is no reason to wait again.
        steps = self.steps() + 1e-6
        while self._waiting and (self._waiting[0][0] <= steps or self._waiting[0][2].done()):
            _, _, reached = heapq.heappop(self._waiting)
            if not reached.done():
                reached.set_result(None)
        self._arm()
