"""A tiny Kimi Linear: three layers of Kimi Delta Attention, then one of MLA, as the paper's architecture has them."""

import json
from pathlib import Path
from typing import Any

from prfaas.serving.engines.tiny.checkpoint import write_tokenizer
from prfaas.serving.engines.tiny.configs import BEGIN_ID, END_ID, VOCAB_SIZE
from prfaas.serving.engines.tiny.weights import WeightMaker

_CONTEXT_TOKENS = 32768
_KDA_HEADS, _KDA_SIZE, _CONV_TOKENS = 2, 32, 4

CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "hidden_size": 256,
    "intermediate_size": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": _CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": _KDA_HEADS,
        "head_dim": _KDA_SIZE,
        "short_conv_kernel_size": _CONV_TOKENS,
    },
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    # The only latent that vLLM's kernel for CPUs knows.
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 128,
    "routed_scaling_factor": 1.0,
}


def write_checkpoint(directory: Path, *, experts: bool = True) -> Path:
    """Configuration, tokenizer and seeded weights. Without `experts` it has one for all tokens in each layer."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    dense_layers = CONFIG["first_k_dense_replace"] if experts else CONFIG["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(CONFIG | {"first_k_dense_replace": dense_layers}))
    write_tokenizer(directory, _CONTEXT_TOKENS)
    maker, hidden = WeightMaker("kimi-linear"), CONFIG["hidden_size"]
    maker.put("model.embed_tokens.weight", maker.normal("model.embed_tokens.weight", VOCAB_SIZE, hidden))
    maker.vector("model.norm.weight", hidden, 1.0)
    maker.head("lm_head.weight", VOCAB_SIZE, hidden)
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        maker.vector(layer + "input_layernorm.weight", hidden, 1.0)
        maker.vector(layer + "post_attention_layernorm.weight", hidden, 1.0)
        is_linear = index + 1 in CONFIG["linear_attn_config"]["kda_layers"]
        (_put_delta_attention if is_linear else _put_latent_attention)(maker, layer + "self_attn.")
        if index < dense_layers:
            _put_mlp(maker, layer + "mlp.", CONFIG["intermediate_size"])
        else:
            _put_experts(maker, layer + "block_sparse_moe.")
    save_file(maker.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _put_delta_attention(maker: WeightMaker, prefix: str) -> None:
    hidden, size = CONFIG["hidden_size"], _KDA_HEADS * _KDA_SIZE
    for name in "qkv":
        maker.matrix(f"{prefix}{name}_proj.weight", size, hidden)
        maker.matrix(f"{prefix}{name}_conv1d.weight", size, _CONV_TOKENS, 2.0)
    maker.matrix(prefix + "b_proj.weight", _KDA_HEADS, hidden)
    for gate in "fg":
        maker.matrix(f"{prefix}{gate}_a_proj.weight", _KDA_SIZE, hidden)
        maker.matrix(f"{prefix}{gate}_b_proj.weight", size, _KDA_SIZE)
    # So that what a token wrote is there hundreds of tokens later.
    maker.vector(prefix + "dt_bias", size, -5.0, 0.7)
    maker.vector(prefix + "A_log", _KDA_HEADS, 0.0, 0.3)
    maker.vector(prefix + "o_norm.weight", _KDA_SIZE, 1.0)
    maker.matrix(prefix + "o_proj.weight", hidden, size, 1.5)


def _put_latent_attention(maker: WeightMaker, prefix: str) -> None:
    hidden, heads, latent = CONFIG["hidden_size"], CONFIG["num_attention_heads"], CONFIG["kv_lora_rank"]
    nope, rope, values = (CONFIG[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    # Of thousands of tokens a handful gets most of the weight: scores of a standard deviation of three.
    maker.matrix(prefix + "q_proj.weight", heads * (nope + rope), hidden, 3.0)
    maker.matrix(prefix + "kv_a_proj_with_mqa.weight", latent + rope, hidden)
    maker.vector(prefix + "kv_a_layernorm.weight", latent, 1.0)
    maker.matrix(prefix + "kv_b_proj.weight", heads * (nope + values), latent)
    maker.matrix(prefix + "o_proj.weight", hidden, heads * values, 1.5)


def _put_mlp(maker: WeightMaker, prefix: str, size: int, names: tuple[str, str, str] | None = None) -> None:
    gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
    maker.matrix(f"{prefix}{gate}.weight", size, CONFIG["hidden_size"])
    maker.matrix(f"{prefix}{up}.weight", size, CONFIG["hidden_size"])
    maker.matrix(f"{prefix}{down}.weight", CONFIG["hidden_size"], size, 1.5)


def _put_experts(maker: WeightMaker, prefix: str) -> None:
    size = CONFIG["moe_intermediate_size"]
    maker.matrix(prefix + "gate.weight", CONFIG["num_experts"], CONFIG["hidden_size"], 2.0)
    maker.vector(prefix + "gate.e_score_correction_bias", CONFIG["num_experts"])
    for expert in range(CONFIG["num_experts"]):
        _put_mlp(maker, f"{prefix}experts.{expert}.", size, ("w1", "w3", "w2"))
    _put_mlp(maker, prefix + "shared_experts.", size * CONFIG["num_shared_experts"])
