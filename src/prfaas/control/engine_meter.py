"""One engine's readings over time: rates and means of what happened lately."""

from collections import deque
from itertools import pairwise

from prfaas.control.exposition import EngineReading

_STARTED_TOLERANCE_S = 0.5


class EngineMeter:
    """Readings of the last `window_s` seconds. A restart of the engine empties it."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, EngineReading]] = deque()

    def add(self, reading: EngineReading, now_s: float) -> bool:
        """One more reading; True if the engine is another process than at the last one."""
        restarted = bool(self._readings) and _is_another(self._readings[-1][1], reading)
        if restarted:
            self._readings.clear()
        self._readings.append((now_s, reading))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - self._window_s:
            self._readings.popleft()
        return restarted

    @property
    def newest(self) -> EngineReading | None:
        return self._readings[-1][1] if self._readings else None

    @property
    def token_gap_s(self) -> float | None:
        """Mean seconds between tokens of one answer: the decode step; None if none were generated."""
        return self._ratio("token_gaps_s", "token_gaps")

    @property
    def output_tokens(self) -> float | None:
        """Mean tokens of the answers that ended; None if none did."""
        return self._ratio("output_tokens", "outputs")

    @property
    def outputs(self) -> float:
        """Answers that ended."""
        return self._grown("outputs")

    @property
    def hit_rate(self) -> float | None:
        """Share of the looked-up prompt tokens that the engine's own prefix cache held; None if none were."""
        return self._ratio("prefix_hits", "prefix_queries")

    @property
    def waiting(self) -> float:
        """Mean number of requests waiting, each reading counting for the time until the next."""
        total_s = waiting_s = 0.0
        for (start_s, reading), (end_s, _) in pairwise(self._readings):
            total_s += end_s - start_s
            waiting_s += reading.waiting * (end_s - start_s)
        newest = self.newest
        return waiting_s / total_s if total_s > 0 else float(newest.waiting) if newest is not None else 0.0

    def _grown(self, field: str) -> float:
        if len(self._readings) < 2:
            return 0.0
        return float(getattr(self._readings[-1][1], field)) - float(getattr(self._readings[0][1], field))

    def _ratio(self, above: str, below: str) -> float | None:
        count = self._grown(below)
        return self._grown(above) / count if count > 0 else None


def _is_another(before: EngineReading, after: EngineReading) -> bool:
    if before.started_at_s is not None and after.started_at_s is not None:
        return abs(after.started_at_s - before.started_at_s) > _STARTED_TOLERANCE_S
    # Counters never fall while a process lives.
    return after.prefix_queries < before.prefix_queries or after.outputs < before.outputs
