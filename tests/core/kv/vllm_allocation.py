"""Run in a process of its own: which KV cache vLLM gives the layers of checkpoints.

Arguments: FOLDER:PLACE:DRAFTS for each, where `{"kind": …}` of its layers are written as JSON; DRAFTS is vLLM's
`--speculative-config`, or empty. vLLM is imported once: each checkpoint has a fork.
"""

import gc
import json
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.model_executor.models import ModelRegistry
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from prfaas.core.kv.hf_config import model_from_directory
from prfaas.serving.engines.vllm.template import import_model

KV_CACHE_BYTES = 64 << 20
# What vLLM makes of the architectures of models that draft for themselves.
DRAFTERS = ("Qwen3NextMTP", "MiMoV2MTPModel")


def layers_of(checkpoint: Path, drafts: str) -> list[dict[str, Any]]:
    has_state = model_from_directory(checkpoint).has_linear_state
    engine = LLM(
        model=str(checkpoint),
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=2,
        # More would take longer to be zeroed than all the rest.
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        disable_log_stats=True,
        **({"mamba_ssm_cache_dtype": "float32"} if has_state else {}),
        # A tiny checkpoint has no layer that drafts.
        **({"speculative_config": json.loads(drafts), "load_format": "dummy"} if drafts else {}),
    )
    core = engine.llm_engine.engine_core.engine_core
    layers = []
    for group in core.scheduler.kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        of_layers = [specs[name] if specs is not None else group.kv_cache_spec for name in group.layer_names]
        layers += map(layer_of, of_layers)
    return layers


def layer_of(spec: Any) -> dict[str, Any]:
    if isinstance(spec, MambaSpec):
        parts = [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
        return {"kind": "state", "parts": parts, "page_bytes": spec.page_size_bytes}
    return {
        "kind": "window" if isinstance(spec, SlidingWindowSpec) else "full",
        "window": getattr(spec, "sliding_window", None),
        "block_tokens": spec.block_size,
        "page_bytes": spec.page_size_bytes,
    }


if __name__ == "__main__":
    orders = [argument.split(":", 2) for argument in sys.argv[1:]]
    # Of a class that is not there vLLM would ask a process that imports all of it.
    for folder, _, _ in orders:
        import_model(Path(folder))
    for name in DRAFTERS:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    gc.freeze()
    for folder, place, drafts in orders:
        if os.fork() == 0:
            Path(place).write_text(json.dumps(layers_of(Path(folder), drafts)))
            sys.stdout.flush()
            os._exit(0)
        os.wait()
