"""Reading of an engine's /metrics at one moment."""

import re
from dataclasses import dataclass
from typing import Any

_FIELDS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "token_gaps_s": "vllm:inter_token_latency_seconds_sum",
    "token_gaps": "vllm:inter_token_latency_seconds_count",
    "output_tokens": "vllm:request_generation_tokens_sum",
    "outputs": "vllm:request_generation_tokens_count",
    "pool_memory_tokens": "vllm:prfaas_pool_hit_tokens_memory_total",
    "pool_ssd_tokens": "vllm:prfaas_pool_hit_tokens_ssd_total",
    "pool_loaded_bytes": "vllm:prfaas_pool_bytes_loaded_total",
    "pool_load_s": "vllm:prfaas_pool_load_seconds_total",
}
_PROMPT_TOKENS, _GENERATED_TOKENS = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
_STARTED = "process_start_time_seconds"
SERIES = (*_FIELDS.values(), _PROMPT_TOKENS, _GENERATED_TOKENS, _STARTED)
"""What is read as a sum of all samples of a name."""
CACHE_SERIES = "vllm:cache_config_info"
"""What is read by its labels."""
_SAMPLE = re.compile(
    rb"^(" + b"|".join(re.escape(name.encode()) for name in SERIES) + rb")(?:\{[^\n]*\})? (\S+)",
    re.MULTILINE,
)
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_MOST_COUNT = 1 << 40
# What other programs read exactly. Of a sum that is more, its last samples are left out.
_MOST = float(1 << 53)
_CACHE_BLOCKS = re.compile(rb'\bnum_gpu_blocks="(\d{1,20})"')


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
        """True if the engine has made progress since the reading `before`."""
        # A prompt that is prefilled in many steps only takes up more of the cache meanwhile. So does a new request.
        filled = self.kv_usage != before.kv_usage and self.running == before.running
        return filled or (self.tokens, self.token_gaps, self.output_tokens, self.outputs) != (
            before.tokens,
            before.token_gaps,
            before.output_tokens,
            before.outputs,
        )


def read_exposition(text: bytes) -> EngineReading:
    """Never raises: what can't be read, or is no number of 0 to 2⁵³, counts as absent."""
    sums = dict.fromkeys(SERIES, 0.0)
    seen: set[str] = set()
    for match in _SAMPLE.finditer(text):
        value = _number(match.group(2))
        name = match.group(1).decode()
        if value is not None and sums[name] + value <= _MOST:
            sums[name] += value
            seen.add(name)
    found = _CACHE_CONFIG.search(text)
    blocks = _CACHE_BLOCKS.search(found.group(1)) if found else None
    told: dict[str, Any] = {field: sums[name] for field, name in _FIELDS.items()}
    told |= {"running": int(told["running"]), "waiting": int(told["waiting"])}
    return EngineReading(
        **told,
        started_at_s=sums[_STARTED] if _STARTED in seen else None,
        cache_blocks=_count(int(blocks.group(1))) if blocks else None,
        tokens=sums[_PROMPT_TOKENS] + sums[_GENERATED_TOKENS],
    )


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None


def _count(number: int) -> int | None:
    return number if 0 < number <= _MOST_COUNT else None
