"""Every engine's own counters, read from its /metrics once a second."""

import asyncio
import errno
import math
import re
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import aiohttp

from prfaas.core.deployment import Deployment, Instance
from prfaas.serving.certificates import https_options
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.own_process import lacks_descriptors
from prfaas.serving.transport.tls_identity import TlsIdentity

_SERIES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_generation_tokens_sum",
    "vllm:request_generation_tokens_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prfaas_pool_hit_tokens_memory_total",
    "vllm:prfaas_pool_hit_tokens_ssd_total",
    "vllm:prfaas_pool_bytes_loaded_total",
    "vllm:prfaas_pool_load_seconds_total",
    "process_start_time_seconds",
)
_SAMPLE = re.compile(
    rb"^(" + b"|".join(re.escape(name.encode()) for name in _SERIES) + rb")(?:\{[^\n]*\})? (\S+)",
    re.MULTILINE,
)
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_COUNT_DIGITS = 20
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class EngineReading:
    """An engine's own counters at one moment, summed over its data-parallel engines.

    Totals start again with the process. An absent metric is 0; absent facts of the process and its cache are None.
    """

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: float
    prefix_hits: float
    token_gaps_s: float
    token_gaps: float
    output_tokens: float
    outputs: float
    started_at_s: float | None
    """Unix time of the process's start."""
    block_tokens: int | None
    cache_tokens: int | None
    cache_blocks: int | None = None
    """Blocks of the engine, of all its KV groups together."""
    tokens: float = 0.0
    """Prompt tokens and generated ones."""
    pool_memory_tokens: float = 0.0
    """Prompt tokens that its machine's pool held in memory."""
    pool_ssd_tokens: float = 0.0
    """Prompt tokens that its machine's pool held on SSD only."""
    pool_loaded_bytes: float = 0.0
    """KV bytes loaded from its machine's pool."""
    pool_load_s: float = 0.0
    """What these loads took, summed over ranks."""

    def got_on(self, before: "EngineReading") -> bool:
        """Whether the engine has got on with its work since the reading `before`."""
        # A prompt that is prefilled in many steps only takes up more of the cache meanwhile. So does a new request.
        filled = self.kv_usage != before.kv_usage and self.running == before.running
        return filled or (self.tokens, self.token_gaps, self.output_tokens, self.outputs) != (
            before.tokens,
            before.token_gaps,
            before.output_tokens,
            before.outputs,
        )


def read_exposition(text: bytes) -> EngineReading:
    """Never raises: what can't be read counts as absent."""
    sums = dict.fromkeys(_SERIES, 0.0)
    seen: set[str] = set()
    for match in _SAMPLE.finditer(text):
        value = _number(match.group(2))
        name = match.group(1).decode()
        if value is not None and math.isfinite(sums[name] + value):
            sums[name] += value
            seen.add(name)
    found = _CACHE_CONFIG.search(text)
    labels = dict(_LABEL.findall(found.group(1))) if found else {}
    block_tokens = _positive(labels.get(b"block_size"))
    blocks = _positive(labels.get(b"num_gpu_blocks"))
    cache_tokens = _positive(labels.get(b"kv_cache_size_tokens"))
    if cache_tokens is None and block_tokens is not None and blocks is not None:
        cache_tokens = block_tokens * blocks
    return EngineReading(
        running=int(sums["vllm:num_requests_running"]),
        waiting=int(sums["vllm:num_requests_waiting"]),
        kv_usage=sums["vllm:kv_cache_usage_perc"],
        prefix_queries=sums["vllm:prefix_cache_queries_total"],
        prefix_hits=sums["vllm:prefix_cache_hits_total"],
        token_gaps_s=sums["vllm:inter_token_latency_seconds_sum"],
        token_gaps=sums["vllm:inter_token_latency_seconds_count"],
        output_tokens=sums["vllm:request_generation_tokens_sum"],
        outputs=sums["vllm:request_generation_tokens_count"],
        started_at_s=sums["process_start_time_seconds"] if "process_start_time_seconds" in seen else None,
        block_tokens=block_tokens,
        cache_tokens=cache_tokens,
        tokens=sums["vllm:prompt_tokens_total"] + sums["vllm:generation_tokens_total"],
        cache_blocks=blocks,
        pool_memory_tokens=sums["vllm:prfaas_pool_hit_tokens_memory_total"],
        pool_ssd_tokens=sums["vllm:prfaas_pool_hit_tokens_ssd_total"],
        pool_loaded_bytes=sums["vllm:prfaas_pool_bytes_loaded_total"],
        pool_load_s=sums["vllm:prfaas_pool_load_seconds_total"],
    )


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _positive(text: bytes | None) -> int | None:
    # Python refuses to read numbers of thousands of digits.
    if text is None or not text.isdigit() or len(text) > _COUNT_DIGITS:
        return None
    return int(text) if 0 < int(text) < 1 << 40 else None


_STARTED_TOLERANCE_S = 0.5


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
        """How fast one rank loaded them; None if it loaded nothing."""
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
        return self._grown(above) / count if count > 0 else None


def _is_another(before: EngineReading, after: EngineReading) -> bool:
    if before.started_at_s is not None and after.started_at_s is not None:
        return abs(after.started_at_s - before.started_at_s) > _STARTED_TOLERANCE_S
    # Counters never fall while a process lives.
    return after.prefix_queries < before.prefix_queries or after.outputs < before.outputs


_LARGEST_BYTES = 4 << 20
# vLLM closes idle connections after 5 s: ours must be gone before, or a request meets a closing one.
_KEEPALIVE_S = 2.0


class EngineAccess(Protocol):
    """How engines are asked; `EngineHttp` is the real one."""

    async def is_healthy(self, instance: Instance, timeout_s: float) -> bool | None: ...

    async def metrics(self, instance: Instance, timeout_s: float) -> bytes | None: ...

    async def close(self) -> None: ...


class EngineHttp:
    """One pooled session for all engines. Make it inside a running event loop."""

    def __init__(self, tls: TlsIdentity | None = None) -> None:
        """`tls`: who the gateway is, for engines that speak TLS only."""
        self._tls = tls
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def is_healthy(self, instance: Instance, timeout_s: float) -> bool | None:
        """Whether GET /health answers 200; None if nothing answers in time.

        Raises:
            OSError: this process has no file descriptor left.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._get(instance, "/health") as response,
            ):
                return response.status == 200
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            if lacks_descriptors(error):
                raise OSError(errno.EMFILE, "no file descriptor left") from error
            # Anything but a refusal or a reset, such as a lost route, is silence.
            return False if _is_answer(error) else None

    async def metrics(self, instance: Instance, timeout_s: float) -> bytes | None:
        """What GET /metrics answers; None if it doesn't."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._get(instance, "/metrics") as response,
            ):
                if response.status != 200:
                    return None
                text = await response.content.read(_LARGEST_BYTES)
                while len(text) < _LARGEST_BYTES and (more := await response.content.read(_LARGEST_BYTES)):
                    text += more
                return text
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def close(self) -> None:
        await self._session.close()

    def _get(self, instance: Instance, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        options = https_options(instance, self._tls)
        return self._session.get(instance.url + path, allow_redirects=False, **options)


def _is_answer(error: BaseException) -> bool:
    """Whether an error is the doing of the server's process, or of a kernel that has none at this port."""
    if isinstance(error, aiohttp.ClientSSLError):
        return True
    number = error.errno if isinstance(error, OSError) else None
    return number is None or number in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


def period_s(wanted_s: float, members: int, most_per_s: float) -> float:
    """Seconds between two rounds over `members`, so that never more than `most_per_s` are asked in a second."""
    return max(wanted_s, members / most_per_s)


WANTED_S = 1.0
# Writing its exposition costs an engine some milliseconds, and reading it costs us one.
MOST_ASKED_PER_S = 24.0
_ANSWER_S = 2.0
_WINDOW_S = 60.0


class EngineMonitor:
    """Asks every engine for its counters, and keeps one meter per instance."""

    def __init__(
        self,
        deployment: Deployment,
        http: EngineAccess,
        cluster_state: ClusterState,
        *,
        clock: Clock,
        on_restart: Callable[[str], None],
        on_reading: Callable[[Instance, EngineReading], None],
    ) -> None:
        """`on_restart(instance name)`: the process is another one than at the last look."""
        self._instances = deployment.instances
        self._http = http
        self._cluster_state = cluster_state
        self._clock = clock
        self._on_restart = on_restart
        self._on_reading = on_reading
        self.meters = {instance.name: EngineMeter(_WINDOW_S) for instance in self._instances}
        self.period_s = period_s(WANTED_S, len(self._instances), MOST_ASKED_PER_S)
        self.failures = 0

    def adopt(self, instances: tuple[Instance, ...]) -> None:
        """Ask these instances from now on."""
        self._instances = instances
        names = [instance.name for instance in instances]
        for name in self.meters.keys() - set(names):
            del self.meters[name]
        for name in names:
            self.meters.setdefault(name, EngineMeter(_WINDOW_S))
        self.period_s = period_s(WANTED_S, len(instances), MOST_ASKED_PER_S)

    async def run(self) -> None:
        """Until cancelled. Instances are asked one after the other, evenly over the period."""
        asked: set[asyncio.Task[None]] = set()
        try:
            while True:
                for instance in self._instances:
                    task = asyncio.get_running_loop().create_task(self.ask(instance))
                    asked.add(task)
                    task.add_done_callback(asked.discard)
                    await asyncio.sleep(self.period_s / len(self._instances))
        finally:
            for task in list(asked):
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

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
            self._on_restart(instance.name)
        self._cluster_state.instance(instance.name).seen_s = now_s
        self._cluster_state.set_engine_load(instance.name, reading.running + reading.waiting)
        self._on_reading(instance, reading)
