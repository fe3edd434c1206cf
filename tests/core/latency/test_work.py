"""What models compute and read, against the parameters that their makers print."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.core.kv.model_cards import GEMMA_3_27B, LLAMA_4_SCOUT

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype
from prfaas.core.kv.published import published_model
from prfaas.core.latency.feed_forward import Experts
from prfaas.core.latency.work import WEIGHT_FORMATS, SoftmaxLayers, model_work, weight_format

MODELS: dict[str, dict[str, Any]] = yaml.load(
    (Path(__file__).parent / "public_models.yaml").read_text(), yaml.CSafeLoader
)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_makers_print(name: str) -> None:
    total, active = MODELS[name]["params"]
    work = model_work(MODELS[name]["config"], name)
    assert work.total_params / 1e9 == pytest.approx(total, rel=0.03)
    # Makers round to whole billions, and count the embedding or leave it out.
    assert work.active_params / 1e9 == pytest.approx(active, rel=0.2)


def test_attention_of_each_kind() -> None:
    widths = {
        "deepseek-r1": [(61, 128 * (192 + 128), None)],
        "qwen3.5-397b": [(15, 32 * 512, None)],
        "kimi-linear": [(7, 32 * 320, None)],
        "mimo-v2-flash": [(9, 64 * 320, None), (39, 64 * 320, 128)],
        "nemotron-3-nano": [(6, 32 * 256, None)],
    }
    for name, expected in widths.items():
        softmax = model_work(MODELS[name]["config"], name).softmax
        assert [(each.layers, each.width, each.window_tokens) for each in softmax] == expected


def test_sparse_attention_sees_its_top_tokens_and_has_an_index() -> None:
    config = MODELS["deepseek-r1"]["config"] | {
        "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    }  # fmt: skip
    latent, index = model_work(config, "v3.2").softmax
    assert latent.window_tokens == 2048
    assert (index.width, index.window_tokens) == (64 * 128, None)


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "fp8_e4m3"])
def test_the_dtype_of_its_cache_changes_nothing_that_a_model_computes(dtype: KvCacheDtype) -> None:
    config = MODELS["deepseek-r1"]["config"] | {
        "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    }  # fmt: skip
    whole, small = (model_work(config, "v3.2", None, CacheDtypes(each)) for each in ("auto", dtype))
    assert small.kv.token_bytes < whole.kv.token_bytes
    assert replace(small, kv=whole.kv) == whole


@given(st.integers(1, 5000), st.integers(1, 500))
def test_pairs_of_a_window_are_counted_one_by_one(tokens: int, window: int) -> None:
    pairs = sum(min(position, window) for position in range(1, tokens + 1))
    assert SoftmaxLayers(1, 1, window).prefill_flops(tokens) == 2 * pairs
    assert SoftmaxLayers(3, 5).prefill_flops(tokens) == 2 * 15 * tokens * (tokens + 1) / 2


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 2000))
def test_a_batch_touches_some_experts_and_never_more_than_all(
    count: int, per_token: int, tokens: int
) -> None:
    experts = Experts(1, count, min(per_token, count), 1)
    assert experts.per_token <= experts.touched(1) + 1e-9
    assert experts.touched(tokens) <= experts.touched(tokens + 1) + 1e-9 <= count + 2e-9


def test_weights_are_read_once_and_only_the_experts_that_are_touched() -> None:
    work = model_work(MODELS["minimax-m2.5"]["config"], "m")
    assert work.weights.name == "fp8"
    assert work.read_bytes(1) == pytest.approx(work.active_params)
    assert work.read_bytes(1e6) == pytest.approx(work.total_params - work.head_params)
    assert work.weight_bytes == pytest.approx(work.total_params)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4-experts"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "int4"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"type": "float", "num_bits": 8}}},
            "fp8",
        ),
    ],
)  # fmt: skip
def test_how_weights_are_stored(quantization: dict[str, Any] | None, expected: str) -> None:
    assert weight_format({"quantization_config": quantization}) is WEIGHT_FORMATS[expected]
    assert weight_format({"text_config": {"quantization_config": quantization}}).name == expected


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match='how "hqq" stores weights is not known; say it: bf16, fp8'):
        weight_format({"quantization_config": {"quant_method": "hqq"}})
    config = dict(MODELS["qwen3-235b"]["config"])
    del config["num_experts_per_tok"]
    with pytest.raises(ConfigError, match="num_experts_per_tok is missing"):
        model_work(config, "q")
    del config["hidden_size"]
    with pytest.raises(ConfigError, match="hidden_size must be a whole number above 0, not None"):
        model_work(config, "q")


def test_layers_with_and_without_experts() -> None:
    base = MODELS["qwen3-235b"]["config"]
    for more, layers in (
        ({}, 94),
        ({"decoder_sparse_step": 2}, 47),
        ({"mlp_only_layers": [0, 5]}, 92),
        ({"first_k_dense_replace": 3}, 91),
        ({"moe_layers_enum": "3,4,5"}, 3),
    ):
        experts = model_work(base | more, "q").experts
        assert experts is not None
        assert experts.layers == layers


def test_gates_of_attention_heads_are_counted() -> None:
    config = MODELS["qwen3.5-397b"]["config"]
    without = config | {"text_config": config["text_config"] | {"attn_output_gate": False}}
    more = model_work(config, "q").dense_params - model_work(without, "q").dense_params
    assert more == 15 * 4096 * 32 * 256
    assert model_work(MODELS["qwen3-next-80b"]["config"], "n").softmax[0].layers == 12


def test_every_layer_of_llama_4_scout_has_a_shared_expert() -> None:
    """As printed: 109 billion parameters, 17 for a token. From config.json, see tests/core/kv/model_cards.py."""
    text = LLAMA_4_SCOUT["text_config"] | {
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1,
        "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202048,
    }  # fmt: skip
    work = model_work(LLAMA_4_SCOUT | {"text_config": text}, "scout")
    assert work.total_params / 1e9 == pytest.approx(109, rel=0.02)
    assert work.active_params / 1e9 == pytest.approx(17, rel=0.1)


def test_experts_in_a_latent_space_are_smaller() -> None:
    """Nemotron 3 Super, as printed: 120 billion parameters, 12 for a token. aiconfigurator has its config.json."""
    pattern = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    config = {
        "model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_hidden_layers": 88,
        "hidden_size": 4096, "intermediate_size": 2688, "head_dim": 128, "num_attention_heads": 32,
        "num_key_value_heads": 2, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 8, "conv_kernel": 4, "expand": 2, "mlp_hidden_act": "relu2", "moe_intermediate_size": 2688,
        "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "n_routed_experts": 512,
        "n_shared_experts": 1, "num_experts_per_tok": 22, "vocab_size": 131072,
    }  # fmt: skip
    work = model_work(config, "super")
    assert work.total_params / 1e9 == pytest.approx(120, rel=0.03)
    assert work.active_params / 1e9 == pytest.approx(12, rel=0.1)
    blocks = [{"M": "mamba", "E": "moe", "*": "attention"}[letter] for letter in pattern]
    listed = {
        key: value
        for key, value in config.items()
        if key not in ("hybrid_override_pattern", "num_hidden_layers")
    }
    assert model_work(listed | {"layers_block_type": blocks}, "super") == work


def test_gemma_4_has_an_mlp_beside_its_experts() -> None:
    """Gemma 4 26B A4B, as printed: 26 billion parameters, 4 for a token. aiconfigurator has its config.json."""
    config = {
        "model_type": "gemma4_text", "num_hidden_layers": 30, "hidden_size": 2816, "intermediate_size": 2112,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704, "sliding_window": 1024, "vocab_size": 262144,
    }  # fmt: skip
    work = model_work(config, "gemma")
    assert work.total_params / 1e9 == pytest.approx(26, rel=0.05)
    assert work.active_params / 1e9 == pytest.approx(4, rel=0.1)


def test_gemma_3_leaves_out_its_vocabulary() -> None:
    text = GEMMA_3_27B["text_config"] | {"intermediate_size": 21504}
    work = model_work(GEMMA_3_27B | {"text_config": text}, "gemma")
    assert work.head_params == 262_208 * 5376
    assert work.active_params / 1e9 == pytest.approx(27, rel=0.03)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "minimax-m3"])
def test_what_sparse_layers_cost_is_not_guessed(name: str) -> None:
    with pytest.raises(ConfigError, match=r'sparse layers of model_type ".*" cost is not known; measure'):
        model_work({**published_model(name).config, "hidden_size": 4096}, name)
