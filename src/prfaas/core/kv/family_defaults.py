"""What transformers 5.x puts in place of fields that a `config.json` leaves out, for fields that sizes depend on.

Published files do leave them out: `text_config` of Gemma 3 4B names neither heads nor their size. From
`transformers/models/FAMILY/configuration_FAMILY.py`, and vLLM 0.32's transformers_utils/configs/step3_vl.py. The
number of layers is never assumed.
"""

from collections.abc import Mapping

_HEADS_256 = {"num_key_value_heads": 4, "head_dim": 256}
_GEMMA3 = {"num_attention_heads": 8, **_HEADS_256, "sliding_window": 4096}
_GEMMA3N = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512}
_KV_8 = {"num_key_value_heads": 8}
_KV_8_OF_128 = {"num_key_value_heads": 8, "head_dim": 128}
_KV_2_OF_128 = {"num_key_value_heads": 2, "head_dim": 128}
_KV_2_OF_256 = {"num_key_value_heads": 2, "head_dim": 256}
_LLAMA4 = {**_KV_8_OF_128, "attention_chunk_size": 8192}
_GEMMA4 = {**_GEMMA3, "sliding_window": 512}
_GLM4V = {"num_key_value_heads": 2}
_MISTRAL = {**_KV_8, "sliding_window": 4096}
_QWEN3 = {"head_dim": 128}

FAMILY_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "ernie4_5": _KV_2_OF_128,
    "ernie4_5_moe": {"num_key_value_heads": 4},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": _GEMMA3,
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _GEMMA3N),
    **dict.fromkeys(("glm", "glm4"), _KV_2_OF_128),
    **dict.fromkeys(("glm4v", "glm4v_text"), _GLM4V),
    **dict.fromkeys(("glm4_moe", "glm4v_moe", "glm4v_moe_text"), _KV_8),
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    "cohere2": {"sliding_window": 4096},
    "cohere2_moe": {"head_dim": 128, "sliding_window": 4096},
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
    "minimax_m2": _KV_8_OF_128,
    **dict.fromkeys(("ministral", "mistral", "mistral3"), _MISTRAL),
    "ministral3": _KV_8_OF_128,
    "mixtral": _KV_8,
    "nemotron_h": _KV_8_OF_128,
    "qwen3": _QWEN3,
    "qwen3_moe": {"num_key_value_heads": 4},
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _KV_8),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), _QWEN3),
    "qwen3_next": _KV_2_OF_256,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _HEADS_256),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _KV_2_OF_256),
    "seed_oss": _KV_8_OF_128,
    "smollm3": {"num_key_value_heads": 4},
    "starcoder2": {"num_key_value_heads": 2},
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "lfm2", "lfm2_moe", "minimax"), _KV_8),
}
