"""Every engine's own counters, asked for once a second."""

import asyncio
from collections import deque
from itertools import pairwise

from prfaas.core.deployment import Instance
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_http import EngineHttp
from prfaas.serving.control.engine_reading import EngineReading, read_exposition
from prfaas.serving.control.listeners import Listeners
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part
from prfaas.serving.running_deployment import RunningDeployment
from prfaas.serving.tasks import BackgroundTasks

_STARTED_TOLERANCE_S = 0.5
# Counts are whole, and loads take microseconds: less is no measurement, and would make endless rates.
_LEAST_DIVISOR = 1e-6


class EngineMeter:
    """Readings of the last `window_s` seconds. A restart of the engine empties it."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, EngineReading]] = deque()
        self._moved_s = 0.0

    def add(self, reading: EngineReading, now_s: float) -> bool:
        """One more reading; True if the engine is another process than at the last one."""
        newest = self.newest
        restarted = newest is not None and _is_another(newest, reading)
        if newest is None or restarted or not reading.running or reading.got_on(newest):
            self._moved_s = now_s
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
    def stuck_s(self) -> float:
        """For how long, up to the newest reading, it has had running requests and got on with none of them."""
        return self._readings[-1][0] - self._moved_s if self._readings else 0.0

    @property
    def token_gap_s(self) -> float | None:
        """Mean seconds between tokens of one answer: the decode step; None if none were generated."""
        return self._ratio("token_gaps_s", "token_gaps")

    @property
    def output_tokens(self) -> float | None:
        """Mean tokens of the answers that ended; None if none did."""
        return self._ratio("output_tokens", "outputs")

    def answer_s(self, max_tokens: int | None) -> float:
        """Seconds of an answer after its first token: the mean, or less where `max_tokens` is below the mean."""
        lengths = [tokens for tokens in (max_tokens, self.output_tokens) if tokens is not None]
        return max(min(lengths) - 1, 0) * (self.token_gap_s or 0.0) if lengths else 0.0

    @property
    def outputs(self) -> float:
        """Answers that ended."""
        return self._grown("outputs")

    @property
    def hit_rate(self) -> float | None:
        """Share of the looked-up prompt tokens that the engine's own prefix cache held; None if none were."""
        return self._ratio("prefix_hits", "prefix_queries")

    @property
    def pool_loaded_bytes(self) -> float:
        """KV bytes that it loaded from its machine's pool."""
        return self._grown("pool_loaded_bytes")

    @property
    def pool_load_bytes_per_s(self) -> float | None:
        """Bandwidth at which one rank loaded pages; None if it loaded nothing."""
        return self._ratio("pool_loaded_bytes", "pool_load_s")

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
        return self._grown(above) / count if count >= _LEAST_DIVISOR else None


def _is_another(before: EngineReading, after: EngineReading) -> bool:
    if before.started_at_s is not None and after.started_at_s is not None:
        return abs(after.started_at_s - before.started_at_s) > _STARTED_TOLERANCE_S
    # Counters never fall while a process lives.
    return after.prefix_queries < before.prefix_queries or after.outputs < before.outputs


def period_s(wanted_s: float, members: int, most_per_s: float) -> float:
    """Seconds between two rounds over `members`, so that never more than `most_per_s` are asked in a second."""
    return max(wanted_s, members / most_per_s)


WANTED_S = 1.0
# Writing its exposition costs an engine some milliseconds, and reading it costs us one.
MOST_ASKED_PER_S = 24.0
_ANSWER_S = 2.0
_WINDOW_S = 60.0


class EngineMonitor(Part):
    """Asks every engine for its counters, and keeps one meter per instance."""

    def __init__(
        self,
        running: RunningDeployment,
        http: EngineHttp,
        cluster_state: ClusterState,
        listeners: Listeners,
    ) -> None:
        """`listeners`: are told what was read, and who was started again."""
        self._running = running
        self._http = http
        self._cluster_state = cluster_state
        self._clock = cluster_state.clock
        self._listeners = listeners
        self.meters = {instance.name: EngineMeter(_WINDOW_S) for instance in running.current.instances}
        self.failures = self._counted = 0

    def join(self, instance: Instance) -> None:
        """Begin a meter."""
        self.meters[instance.name] = EngineMeter(_WINDOW_S)

    def leave(self, name: str) -> None:
        """Forget its meter."""
        del self.meters[name]

    def stuck_s(self, name: str) -> float:
        """For how long an instance has had running requests and made no progress."""
        return self.meters[name].stuck_s

    def state_of(self, name: str, _now_s: float) -> Json:
        """An engine's own word, and how far an operator's drain is.

        It is drained once nothing is open there, not even another gateway's work.
        """
        meter = self.meters.get(name)
        if meter is None:
            return {}
        view, newest = self._cluster_state.instance(name), meter.newest
        is_idle = view.in_flight == 0 and (newest is None or newest.running + newest.waiting == 0)
        drain = ("drained" if is_idle else "draining") if view.closed else None
        return {"drain": drain, "engine": None if newest is None else _told(meter, newest)}

    def write_gauges(self, metrics: ControlMetrics, _now_s: float) -> None:
        """Write the gauges of engines' caches."""
        for name, meter in self.meters.items():
            if meter.newest is None:
                continue
            told = _told(meter, meter.newest)
            metrics.instance_kv_usage_ratio.labels(name).set(told["kv_usage"])
            if told["hit_rate"] is not None:
                metrics.instance_prefix_hit_ratio.labels(name).set(told["hit_rate"])
        metrics.telemetry_failures.labels("engines").inc(self.failures - self._counted)
        self._counted = self.failures

    async def run(self) -> None:
        """Until cancelled. Instances are asked one after the other, evenly over the period."""
        asked = BackgroundTasks()
        try:
            while True:
                instances = self._running.current.instances
                between_s = period_s(WANTED_S, len(instances), MOST_ASKED_PER_S) / len(instances)
                for instance in instances:
                    asked.start(self.ask(instance))
                    await asyncio.sleep(between_s)
        finally:
            await asked.cancel()

    async def ask(self, instance: Instance) -> None:
        """One look at one engine; without an answer nothing changes."""
        text = await self._http.metrics(instance, _ANSWER_S)
        if text is None:
            self.failures += 1
            return
        if instance.name not in self.meters:
            return
        reading = read_exposition(text)
        now_s = self._clock()
        if self.meters[instance.name].add(reading, now_s):
            self._listeners.restarted.tell(instance.name)
        self._cluster_state.instance(instance.name).seen_s = now_s
        self._cluster_state.set_engine_load(instance.name, reading.running + reading.waiting)
        self._listeners.read.tell(instance, reading)


def _told(meter: EngineMeter, newest: EngineReading) -> Json:
    return {
        "running": newest.running,
        "waiting": newest.waiting,
        "kv_usage": round(newest.kv_usage, 4),
        "hit_rate": _rounded(meter.hit_rate),
        "pool_hit_tokens": {"memory": round(newest.pool_memory_tokens), "ssd": round(newest.pool_ssd_tokens)},
        "token_gap_s": _rounded(meter.token_gap_s),
        "output_tokens": _rounded(meter.output_tokens),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
