"""The `config.json` and the vocabulary of every tiny model.

Field names are those of the model's family on the Hugging Face hub. Sizes are chosen for one CPU core: a
16,000-token prompt takes seconds, and its KVCache is worth streaming. A token's id is its byte; special tokens
follow after the 256 bytes.
"""

from typing import Any

SPECIAL_TOKENS: tuple[str, ...] = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")

PAD_ID, BEGIN_ID, END_ID, TURN_START_ID, TURN_END_ID = range(256, 256 + len(SPECIAL_TOKENS))

# A multiple of 64, as engines pad the embedding to that anyway; the ids above the special tokens are never used.
VOCAB_SIZE = 320

# The only tokens that a tiny model can answer with, so that answers are readable text and never end by themselves.
PRINTABLE_IDS: tuple[int, ...] = (ord("\n"), *range(0x20, 0x7F))

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}

# 6 gated-delta-net layers with a fixed state, 2 full-attention layers: 1 KiB of KV per token.
_QWEN3_NEXT: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}

# Sliding-window (128 tokens) and full attention by turns: 1 KiB of KV per token and a fixed window.
_GPT_OSS: dict[str, Any] = {
    **_COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "initial_context_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}

# One full-attention layer before five sliding-window layers: 1/2 KiB of KV per token and a fixed window.
_MIMO_V2_FLASH: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 6,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 1],
    "layer_types": ["full_attention"] + ["sliding_attention"] * 5,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "v_head_dim": 64,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 64,
    "swa_v_head_dim": 64,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1],
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "n_routed_experts": 4,
    "n_shared_experts": None,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "layernorm_epsilon": 1e-6,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "rope_theta": 1_000_000,
    "swa_rope_theta": 10_000,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
}

# Every layer keeps every token: 6 KiB of KV per token, six times the hybrid's.
_QWEN3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
    "layer_types": ["full_attention"] * 6,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-next": _QWEN3_NEXT,
    "gpt-oss": _GPT_OSS,
    "mimo-v2-flash": _MIMO_V2_FLASH,
    "qwen3": _QWEN3,
}

TINY_MODEL_NAMES: tuple[str, ...] = tuple(_CONFIGS)


def tiny_config(name: str) -> dict[str, Any]:
    """A fresh copy of the `config.json` content of tiny model `name`; ValueError names the models that exist."""
    if name not in _CONFIGS:
        raise ValueError(f"there is no tiny model {name!r}; choose one of {', '.join(TINY_MODEL_NAMES)}")
    return dict(_CONFIGS[name])
