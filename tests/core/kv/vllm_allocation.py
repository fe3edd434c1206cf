"""Run in a process of its own: which KV cache vLLM gives the layers of a checkpoint, as JSON on the last line."""

import json
import sys
from math import prod

from vllm import LLM
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

engine = LLM(
    model=sys.argv[1],
    enforce_eager=True,
    max_model_len=2048,
    max_num_batched_tokens=2048,
    max_num_seqs=2,
    disable_log_stats=True,
    **({"mamba_ssm_cache_dtype": "float32"} if sys.argv[2] == "state" else {}),
)
core = engine.llm_engine.engine_core.engine_core
config = core.scheduler.kv_cache_config
layers = []
for group in config.kv_cache_groups:
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        spec = specs[name] if specs is not None else group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            parts = [
                prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            ]
            layers.append({"kind": "state", "parts": parts, "page_bytes": spec.page_size_bytes})
        else:
            layers.append(
                {
                    "kind": "window" if isinstance(spec, SlidingWindowSpec) else "full",
                    "window": getattr(spec, "sliding_window", None),
                    "block_tokens": spec.block_size,
                    "page_bytes": spec.page_size_bytes,
                }
            )
print()
print(json.dumps(layers))
