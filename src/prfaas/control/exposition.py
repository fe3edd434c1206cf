"""What an engine's /metrics says of it, out of the Prometheus text that vLLM writes."""

import math
import re
from dataclasses import dataclass

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
    """One look at an engine's own counters, summed over its data-parallel engines. Totals start again with the
    process. Absent series are 0, `started_at_s` (Unix time) and the cache's facts None."""

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
    block_tokens: int | None
    cache_tokens: int | None


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
