"""A tiny DeepSeek V4: compressed KV of two ratios with indexers, and a sliding window in each layer."""

import json
from pathlib import Path
from typing import Any

from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.engines.tiny.configs import BEGIN_ID, END_ID, VOCAB_SIZE

_CONTEXT_TOKENS = 32768

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "hidden_size": 512,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": _CONTEXT_TOKENS,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    # Of each layer, and of the one that would draft; 0: its window is all that it keeps.
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rope_theta": 160_000,
    "sliding_window": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "o_groups": 8,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    # The only numbers that vLLM's router for CPUs knows.
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "num_hash_layers": 1,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}


def write_folder(directory: Path) -> Path:
    """Configuration and tokenizer; `with_deepseek_v4` makes the weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(directory, _CONTEXT_TOKENS)
    return directory
