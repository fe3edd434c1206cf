"""MLPs and experts of families that write them in their own way, against the parameters that their makers print."""

from typing import Any

import pytest
from tests.core.kv.model_cards import (
    APERTUS_8B,
    GEMMA_3N_E4B,
    LFM2,
    LLAMA_4_SCOUT,
    LONGCAT_FLASH,
    STEP_3,
)

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.latency.work import ModelWork, model_work

FULL, CONV = "full_attention", "conv"

# What model_cards.py leaves out, from the same places; of LFM2-8B-A1B transformers' Lfm2MoeConfig, of InternVL3-8B the
# Qwen2.5-7B in it. The second and third number are billions of parameters, in all and for a token, as printed.
# Tokens of LFM2 are embedded and read by one matrix, which is counted twice.
PRINTED: dict[str, tuple[dict[str, Any], float, float]] = {
    "apertus-8b": (APERTUS_8B | {"intermediate_size": 21504, "vocab_size": 131072}, 8.05, 7.5),
    "lfm2-1.2b": (LFM2 | {"block_ff_dim": 12288, "vocab_size": 65536}, 1.17 + 0.134, 1.17),
    "lfm2-8b-a1b": (
        {
            "model_type": "lfm2_moe", "conv_L_cache": 3, "hidden_size": 2048, "intermediate_size": 7168,
            "layer_types": [FULL if layer in (2, 6, 10, 14, 18, 21) else CONV for layer in range(24)],
            "moe_intermediate_size": 1792, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "vocab_size": 65536,
        },
        8.3 + 0.134,
        1.5,
    ),
    "longcat-flash": (
        LONGCAT_FLASH
        | {
            "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "moe_topk": 12, "n_routed_experts": 512,
            "q_lora_rank": 1536, "vocab_size": 131072, "zero_expert_num": 256,
        },
        560,
        27,
    ),
    "step-3": (
        STEP_3
        | {
            "text_config": STEP_3["text_config"]
            | {
                "intermediate_size": 18432, "moe_intermediate_size": 5120, "moe_num_experts": 48, "moe_top_k": 3,
                "moe_layers_enum": ",".join(map(str, range(4, 60))), "share_expert_dim": 5120, "vocab_size": 128815,
            }
        },
        316,
        38,
    ),
    "internvl3-8b": (
        {
            "model_type": "internvl_chat",
            "llm_config": {
                "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 151674,
            },
        },
        7.6,
        7.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_are_those_that_makers_print(name: str) -> None:
    config, total, active = PRINTED[name]
    work = model_work(config, name)
    assert work.total_params / 1e9 == pytest.approx(total, rel=0.02)
    assert work.active_params / 1e9 == pytest.approx(active, rel=0.05)


def test_longcat_has_two_layers_in_one() -> None:
    """Both of its attentions and MLPs cost what those of two layers do; 12 of 768 experts, of which 512 compute."""
    work = model_work(PRINTED["longcat-flash"][0], "longcat")
    assert (work.layers, work.softmax[0].layers) == (56, 56)
    assert work.experts is not None
    assert (work.experts.layers, work.experts.count, work.experts.per_token) == (28, 512, 8)


def test_an_mlp_of_lfm2_is_made_smaller_unless_its_file_says_no() -> None:
    """Of 6,656 the 350M model keeps 4,608: two thirds, in multiples of 256."""

    def inner_size(**more: object) -> float:
        work = model_work(LFM2 | {"block_ff_dim": 6656, "vocab_size": 65536, **more}, "lfm2")
        without = model_work(
            LFM2 | {"block_ff_dim": 1, "block_auto_adjust_ff_dim": False, "vocab_size": 65536}, "l"
        )
        return 1 + (work.dense_params - without.dense_params) / (3 * 16 * 2048)

    assert inner_size() == 4608
    assert inner_size(block_ffn_dim_multiplier=2) == 8960
    assert inner_size(block_multiple_of=1) == 4437
    assert inner_size(block_auto_adjust_ff_dim=False) == 6656


def test_a_size_that_is_missing_is_not_one() -> None:
    config = dict(APERTUS_8B) | {"vocab_size": 131072}
    with pytest.raises(ConfigError, match="intermediate_size must be a whole number above 0, not None"):
        model_work(config, "a")
    experts = config | {"num_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(ConfigError, match="intermediate_size must be a whole number above 0, not None"):
        model_work(experts, "a")


def gemma_3n(sizes: list[Any]) -> ModelWork:
    text = GEMMA_3N_E4B["text_config"] | {"intermediate_size": sizes, "vocab_size": 262400}
    return model_work(GEMMA_3N_E4B | {"text_config": text}, "3n")


def test_sizes_may_be_listed_layer_by_layer() -> None:
    work = gemma_3n([16384] * 34 + [8192])
    assert work.dense_params == gemma_3n([16384] * 35).dense_params - 3 * 2048 * 8192
    with pytest.raises(ConfigError, match="intermediate_size must be a list of 35 entries, one per layer"):
        gemma_3n([16384] * 34)
    with pytest.raises(ConfigError, match=r"intermediate_size\[34\] must be a whole number above 0, not 'x'"):
        gemma_3n([16384] * 34 + ["x"])


def test_layers_that_keep_no_cache_of_their_own_compute_all_the_same() -> None:
    work = gemma_3n([16384] * 35)
    assert sum(each.layers for each in work.softmax) == 35
    assert sum(group.layers for group in work.kv.groups) == 20


def test_what_a_file_says_of_caches_is_not_of_weights() -> None:
    awq = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": "FP8"},
    }
    text = LLAMA_4_SCOUT["text_config"] | {
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
        "num_experts_per_tok": 1, "vocab_size": 202048,
    }  # fmt: skip
    packed = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    config = LLAMA_4_SCOUT | {"text_config": text}
    for quantization in (packed, awq):
        assert model_work(config | {"quantization_config": quantization}, "scout").weights.name == "int4"
