"""All configurations that come with aiconfigurator-core: what they keep, counted once more by plain arithmetic.

The formulas follow the specs of vLLM 0.32, each from the fields of the file alone; see data/README.md.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.config_fields import ConfigError, UnknownModelError
from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.model import KvModel

CONFIGS: Mapping[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "public_configs.json").read_text()
)


def asks_for_fp8(config: Mapping[str, Any]) -> bool:
    """The checkpoint asks for K and V in fp8. Where ModelOpt is not named, as in four of the copies, vLLM looks at no
    KV cache of its quantization."""
    quantization = config.get("quantization_config", {})
    scheme = quantization.get("kv_cache_scheme")
    of_modelopt = "modelopt" in json.dumps(quantization) and '"FP8"' in json.dumps(quantization)
    return of_modelopt or (isinstance(scheme, dict) and scheme.get("num_bits") == 8)


Fields = Mapping[str, Any]
Sizes = tuple[int, int, int]
"""Bytes per token, of states, of full windows."""


def heads_of(t: Fields) -> tuple[int, int]:
    heads = t.get("num_key_value_heads") or t["num_attention_heads"]
    return heads, t.get("head_dim") or t["hidden_size"] // t["num_attention_heads"]


def dense(t: Fields, size: int) -> Sizes:
    heads, head = heads_of(t)
    return t["num_hidden_layers"] * 2 * heads * head * size, 0, 0


def latent(t: Fields, size: int) -> Sizes:
    return t["num_hidden_layers"] * 576 * size, 0, 0


def indexed_latent(t: Fields, size: int) -> Sizes:
    shared = sum(kind == "shared" for kind in t.get("indexer_types", ()))
    return latent(t, size)[0] + (t["num_hidden_layers"] - shared) * 132, 0, 0


def delta_net(t: Fields, size: int) -> Sizes:
    full = t["num_hidden_layers"] // 4
    keys = 2 * t["linear_num_key_heads"] * 128
    values = t["linear_num_value_heads"] * 128
    state = (keys + values) * 3 * 2 + values * 128 * 4
    return full * 2 * t["num_key_value_heads"] * t["head_dim"] * size, 3 * full * state, 0


def mamba2(t: Fields, size: int) -> Sizes:
    kinds = t.get("hybrid_override_pattern") or "".join(
        {"mamba": "M", "attention": "*"}.get(kind, "-") for kind in t["layers_block_type"]
    )
    inner = t["mamba_num_heads"] * t["mamba_head_dim"]
    groups = 2 * t["n_groups"] * t["ssm_state_size"]
    state = (inner + groups) * (t["conv_kernel"] - 1) * 2 + inner * t["ssm_state_size"] * 4
    # Without a head_dim it is 128 here, whatever the width.
    per_layer = (
        2 * t["num_key_value_heads"] * (t.get("head_dim") or t.get("attention_head_dim") or 128) * size
    )
    return kinds.count("*") * per_layer, kinds.count("M") * state, 0


def delta_attention(t: Fields, size: int) -> Sizes:
    linear = t["linear_attn_config"]
    width = linear["num_heads"] * linear["head_dim"]
    layers = len(linear["kda_layers"])
    state = 3 * width * 3 * 2 + width * linear["head_dim"] * 4
    return (t["num_hidden_layers"] - layers) * 576 * size, layers * state, 0


def windows(full: int, t: Fields, size: int, window: int) -> Sizes:
    heads, head = heads_of(t)
    per_layer = 2 * heads * head * size
    return full * per_layer, 0, (t["num_hidden_layers"] - full) * per_layer * window


def gemma4(t: Fields, size: int) -> Sizes:
    full = t["layer_types"].count("full_attention")
    heads, head = heads_of(t)
    wide = full * 2 * t["num_global_key_value_heads"] * t["global_head_dim"] * size
    return wide, 0, (t["num_hidden_layers"] - full) * 2 * heads * head * size * t["sliding_window"]


def mimo_v2(t: Fields, size: int) -> Sizes:
    narrow = sum(t["hybrid_layer_pattern"])
    return (48 - narrow) * 4 * (192 + 128) * size, 0, narrow * 8 * (192 + 128) * size * 128


def minimax_m3(t: Fields, size: int) -> Sizes:
    # Keys of the index are of 16 bits, whatever K and V are.
    marked = sum(t["sparse_attention_config"]["sparse_attention_freq"])
    return dense(t, size)[0] + marked * 128 * 2, 0, 0


def nemotron_nas(t: Fields, size: int) -> Sizes:
    kept = [block["attention"] for block in t["block_configs"]]
    heads = sum(64 // each["n_heads_in_group"] for each in kept if not each.get("no_op"))
    return heads * 2 * 128 * size, 0, 0


def deepseek_v4(t: Fields, _size: int) -> Sizes:
    """Pages of 256 tokens: 64 entries and their index, or 2 entries."""
    ratios = t["compress_ratios"][: t["num_hidden_layers"]]
    sparse, heavy = ratios.count(4), ratios.count(128)
    waiting = sparse * 8 * (4 * 2048 + 2048) + heavy * 128 * 4096
    # Each kind of layers is rounded up to whole bytes.
    token_bytes = sparse * (584 + 132) // 4 + -(-heavy * 584 // 128)
    return token_bytes, 0, len(ratios) * 128 * 584 + waiting


FORMULAS: Mapping[str, Callable[[Fields, int], Sizes]] = {
    **dict.fromkeys(
        [
            *("LlamaForCausalLM", "MixtralForCausalLM", "MiniMaxM2ForCausalLM", "MiMoForCausalLM"),
            *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        ],
        dense,
    ),
    **dict.fromkeys(["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"], latent),
    **dict.fromkeys(["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"], indexed_latent),
    **dict.fromkeys(["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"], delta_net),
    "NemotronHForCausalLM": mamba2,
    "KimiK3ForConditionalGeneration": delta_attention,
    "GptOssForCausalLM": lambda t, size: windows(t["num_hidden_layers"] // 2, t, size, 128),
    "Step3p7FlashForCausalLM": lambda t, size: windows(12, {**t, "num_key_value_heads": 8}, size, 512),
    # Chunks are as long as windows at most.
    "Llama4ForConditionalGeneration": lambda t, size: windows(12, t, size, 8192),
    "Gemma4ForConditionalGeneration": gemma4,
    "MiMoV2FlashForCausalLM": mimo_v2,
    **dict.fromkeys(["MiniMaxM3ForCausalLM", "MiniMaxM3SparseForConditionalGeneration"], minimax_m3),
    "DeciLMForCausalLM": nemotron_nas,
    "DeepseekV4ForCausalLM": deepseek_v4,
}


def test_there_are_89_of_21_architectures() -> None:
    assert len(CONFIGS) == 89
    assert {config["architectures"][0] for config in CONFIGS.values()} == set(FORMULAS)


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_of_plain_arithmetic(name: str) -> None:
    config = CONFIGS[name]
    text = {**config, **config.get("text_config", {})}
    formula = FORMULAS[config["architectures"][0]]
    model = model_from_config(config, name=name)
    size = 1 if asks_for_fp8(config) else 2
    assert (model.token_bytes, model.fixed_bytes, model.window_bytes) == formula(text, size)


V4 = CONFIGS["deepseek-ai/DeepSeek-V4-Flash"]


def v4(**changes: Any) -> KvModel:
    return model_from_config({**V4, **changes})


def test_entries_that_stand_for_several_tokens_move_in_whole_pages() -> None:
    model = v4()
    # 3.9 KB a token, which is less than a fifteenth of V3's.
    assert model.token_bytes == 3_851
    page = 21 * 45_824 + 20 * 1_168
    assert model.groups[0].bytes_to_move(256, 0) + model.groups[1].bytes_to_move(256, 0) == page
    assert model.groups[0].bytes_to_move(257, 256, 4) == 21 * 45_824
    assert model.groups[0].bytes_to_move(255, 0, 4) == 21 * 45_824
    assert model.groups[0].bytes_to_move(600, 300, 128) == 2 * 21 * 45_824
    # The pages of windows are smaller, whatever the engine's blocks are: two of 64 tokens, two of 4, 16 of 8.
    fixed = 43 * 2 * 37_376 + 21 * 2 * (32_768 + 8_192) + 20 * 16 * 32_768
    assert sum(group.bytes_to_move(4096, 0, 256) for group in model.groups[2:]) == fixed
    assert model.per_rank(8) == model
    assert model.on_all_ranks(2).bytes_to_move(256, 0) == 2 * model.bytes_to_move(256, 0)


def test_v4_may_keep_plain_values() -> None:
    plain = model_from_config(V4, dtypes=CacheDtypes("bfloat16"))
    assert plain.token_bytes == 21 * (1024 + 132) // 4 + 20 * 1024 // 128
    assert plain.window_bytes == 43 * 128 * 1024 + 21 * 8 * (8_192 + 2_048) + 20 * 128 * 4_096
    narrow = model_from_config(V4, dtypes=CacheDtypes("fp8_e4m3"))
    assert narrow.token_bytes == 21 * (512 + 132) // 4 + 20 * 512 // 128
    assert model_from_config(V4, dtypes=CacheDtypes("fp8_ds_mla")) == v4()
    with pytest.raises(ConfigError, match="has two layouts"):
        model_from_config(V4, dtypes=CacheDtypes("fp8"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"compress_ratios": [4] * 42},
            "compress_ratios must have one of 0, 1, 4, 128 for each of 43 layers",
        ),
        ({"compress_ratios": [8] * 43}, "compress_ratios must have one of"),
        ({"compress_ratios": None}, "compress_ratios must have one of"),
        ({"head_dim": 256}, "fp8_ds_mla is known for a head_dim of 512 only, not 256"),
    ],
)
def test_what_is_wrong_with_a_v4(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        v4(**changes)


# As vllm/models/deepseek_v41/attention.py reads it; nobody has published one yet.
V41: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "text_config": {
        "num_hidden_layers": 6,
        "head_dim": 512,
        "compress_ratios": [0, 1, 1, 2, 2, 2, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 2, 3],
        "index_head_dim": 128,
        "sliding_window": 128,
    },
}


def test_layers_of_v41_share_what_earlier_ones_keep() -> None:
    model = model_from_config(V41)
    # An entry for each token or for two, each with its index.
    assert model.token_bytes == (584 + 132) + (584 + 132) // 2
    # A ring of eight rows of keys and scores in one layer; the windows' pages have 32 tokens.
    assert model.fixed_bytes == 8 * 2 * 512 * 4
    assert model.window_bytes == 6 * 128 * 584
    assert model.per_rank(4).fixed_bytes == model.fixed_bytes
    assert model.on_all_ranks(4).fixed_bytes == 4 * model.fixed_bytes


QWEN4: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "text_config": {
        "model_type": "qwen4_exp_text",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "ple_layer_ids": [1, 5],
        "indexer_head_dim": 128,
        "indexer_compress_ratio": 16,
        "rope_parameters": {"mrope_section": [11, 11, 10]},
    },
}


def test_qwen4_keeps_an_index_and_embeddings_beside() -> None:
    model = model_from_config(QWEN4)
    assert model.token_bytes == 2 * 2 * 2 * 256 * 2 + 2 * 128 * 2 // 16
    state = (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4
    embeddings = 2 * (3 * 3) * 4 * 2048 * 2
    ring = 2 * 16 * (128 + 12) * 2
    assert model.fixed_bytes == 6 * state + embeddings + ring
    listed = ["linear_attention"] * 3 + ["indexed_attention"]
    text = {**QWEN4["text_config"], "layer_types": 2 * listed}
    assert model_from_config({**QWEN4, "text_config": text}) == model
    # Convolutions of embeddings and rings are whole on every rank.
    assert model.per_rank(2).fixed_bytes == 6 * state // 2 + embeddings + ring


GLM_5_NEXT: dict[str, Any] = {
    "model_type": "glm5_next",
    "text_config": {
        "model_type": "glm5_next_text",
        "num_hidden_layers": 8,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 0,
        "index_head_dim": 128,
        "index_kpool": 16,
    },
}


def test_glm_5_next_keeps_pooled_keys() -> None:
    model = model_from_config(GLM_5_NEXT)
    assert model.token_bytes == 2 * 512 * 2 + -(-2 * 132 // 16)
    state = 3 * 64 * 128 * 3 * 2 + 64 * 128 * 128 * 4
    assert model.fixed_bytes == 6 * state + 2 * 2 * 16 * 128 * 2
    nested = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
    text = {**GLM_5_NEXT["text_config"], "linear_attn_config": nested}
    half = model_from_config({**GLM_5_NEXT, "text_config": text})
    assert half.fixed_bytes == 6 * state // 2 + 2 * 2 * 16 * 128 * 2


def test_a_family_of_its_own_name_is_known_by_its_architecture() -> None:
    config = CONFIGS["sgl-project/DeepSeek-V4-Flash-FP8"]
    assert config["model_type"] == "deepseek_ref"
    assert model_from_config(config, name="x") == model_from_config(V4, name="x")


def test_a_family_that_nobody_knows_has_an_error_of_its_own() -> None:
    with pytest.raises(UnknownModelError, match='model_type "later" is not known'):
        model_from_config({"model_type": "later", "num_hidden_layers": 2})
