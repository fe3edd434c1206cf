"""The vLLM series in which gateways and controllers read a stand-in's counters."""

import contextlib
import re
import resource
from collections.abc import Collection
from pathlib import Path

from prfaas.serving.engines.synthetic.engine import SyntheticEngine
from prfaas.serving.engines.transfer_counters import COUNTERS


def exposition(model: str, engine: SyntheticEngine) -> str:
    """Prometheus text of a stand-in; `model`: label of every series."""
    counts, clock, pool = engine.counts, engine.clock, engine.cache.pool
    # The clock's sums are of the steps until now.
    clock.steps()
    block_tokens = engine.cache.layout.block_tokens
    labels = f'{{engine="0",model_name="{model}"}}'
    lines = [
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="{block_tokens}",engine="0",'
        f'kv_cache_size_tokens="{pool.capacity * block_tokens}",num_gpu_blocks="{pool.capacity}"}} 1.0',
    ]

    def add(name: str, kind: str, text: str, *values: tuple[str, float]) -> None:
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
        lines.extend(f"{name}{suffix}{labels} {value}" for suffix, value in values)

    def gauge(name: str, text: str, value: float) -> None:
        add(f"vllm:{name}", "gauge", text, ("", float(value)))

    def counter(name: str, text: str, value: float) -> None:
        add(f"vllm:{name}_total", "counter", text, ("", float(value)))

    gauge("num_requests_running", "Requests in prefill or decode", counts.running)
    gauge("num_requests_waiting", "Requests that wait for prefill, KV or a decode slot", counts.waiting)
    gauge("kv_cache_usage_perc", "Share of the KV cache that running requests hold", pool.used_ratio)
    counter("prefix_cache_queries", "Prompt tokens looked up", counts.prefix_queries)
    counter("prefix_cache_hits", "Prompt tokens found", counts.prefix_hits)
    counter("prompt_tokens", "Prompt tokens of finished requests", counts.prompt_tokens)
    counter("generation_tokens", "Tokens generated", counts.generated_tokens)
    counter("request_success", "Requests finished", counts.finished)
    add(
        "vllm:inter_token_latency_seconds",
        "summary",
        "Seconds between two tokens of a request",
        ("_sum", clock.request_seconds),
        ("_count", clock.tokens),
    )
    add(
        "vllm:request_generation_tokens",
        "summary",
        "Tokens generated per finished request",
        ("_sum", float(counts.generated_tokens)),
        ("_count", float(counts.finished)),
    )
    # Prometheus's own names for facts of a process, which several stand-ins may share. With no descriptor left its
    # client leaves them out too.
    with contextlib.suppress(OSError):
        lines += [f"process_open_fds {sum(1 for _ in Path('/proc/self/fd').iterdir())}"]
    lines += [f"process_max_fds {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"]
    for name, text in COUNTERS.items():
        counter(f"prfaas_{name}", text, engine.endpoints.counts[name])
    counter("prfaas_damaged_loads", "KV transfers whose bytes were not sound", counts.damaged_loads)
    return "\n".join(lines) + "\n"


def chosen(text: str, names: Collection[str]) -> str:
    """The samples of these names in an exposition, or all where none is named, as prometheus_client does it."""
    if not names:
        return text
    return "".join(
        line + "\n" for line in text.splitlines() if re.split(r"[{ ]", line, maxsplit=1)[0] in names
    )
