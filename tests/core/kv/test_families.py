"""Families whose layers keep something else than K and V of every token."""

from typing import Any

import pytest

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow

HEADS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 8,
}
MLA: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
FULL, SLIDING = "full_attention", "sliding_attention"
NEMOTRON: dict[str, Any] = {
    **HEADS,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*-M*E",
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "n_groups": 4,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
GRANITE: dict[str, Any] = {
    **HEADS,
    "model_type": "granitemoehybrid",
    "hidden_size": 512,
    "layer_types": ["mamba"] * 6 + ["attention"] * 2,
    "mamba_n_heads": 32,
    "mamba_d_head": "auto",
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
RING: dict[str, Any] = {**HEADS, **MLA, "model_type": "bailing_hybrid", "layer_group_size": 3}


def kinds(config: dict[str, Any]) -> list[tuple[type, int]]:
    return [(type(group), group.layers) for group in model_from_config(config).groups]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NEMOTRON, [(FullAttention, 2), (LinearState, 3)]),
        (GRANITE, [(FullAttention, 2), (LinearState, 6)]),
        (RING, [(FullAttention, 2), (LinearState, 6)]),
        # The generation with a convolution also makes the unfinished last group attention layers.
        (RING | {"short_conv_kernel_size": 4}, [(FullAttention, 4), (LinearState, 4)]),
        (HEADS | {"model_type": "gemma2", "sliding_window": 9}, [(FullAttention, 4), (SlidingWindow, 4)]),
        (
            HEADS | {"model_type": "gemma3_text", "sliding_window": 9},
            [(FullAttention, 1), (SlidingWindow, 7)],
        ),
        (HEADS | {"model_type": "mixtral"}, [(FullAttention, 8)]),
        (HEADS | MLA | {"model_type": "deepseek_v2"}, [(FullAttention, 8)]),
    ],
)
def test_layers(config: dict[str, Any], expected: list[tuple[type, int]]) -> None:
    assert kinds(config) == expected


def test_nemotron_layers_may_be_names() -> None:
    names = ["mamba", "moe", "mamba", "attention", "mlp", "mamba", "attention", "moe"]
    listed = {**NEMOTRON, "hybrid_override_pattern": None, "layers_block_type": names}
    assert model_from_config(listed) == model_from_config(NEMOTRON)


def test_granite_head_size_follows_from_the_width() -> None:
    state = model_from_config(GRANITE).groups[1]
    assert isinstance(state, LinearState)
    assert state.recurrent_bytes == 32 * 32 * 64 * 4
    assert state.conv_bytes == 3 * (1024 + 2 * 64) * 2


def test_lightning_has_no_convolution() -> None:
    state = model_from_config(RING).groups[1]
    assert state == LinearState(6, 0, 8 * 64 * 64 * 4, kind="Lightning", heads=8)


def test_bf16_states_are_half() -> None:
    half = model_from_config(RING, dtypes=CacheDtypes(state="bfloat16"))
    assert 2 * half.fixed_bytes == model_from_config(RING).fixed_bytes


def test_sparse_attention_keeps_an_index() -> None:
    latent, index = model_from_config(
        HEADS | MLA | {"model_type": "deepseek_v32", "index_head_dim": 128}
    ).groups
    assert latent == FullAttention(8, 1, 576, 0)
    assert isinstance(index, FullAttention)
    assert index.token_bytes == 8 * (128 + 4)


def test_step_has_other_heads_in_its_windows() -> None:
    config = {
        **HEADS,
        "model_type": "step3p5",
        "num_attention_groups": 4,
        "sliding_window": 512,
        # Three layers of multi-token prediction stand behind the eight.
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 2 + [SLIDING] * 3,
        "attention_other_setting": {"attention_type": SLIDING, "num_attention_groups": 8, "head_dim": 32},
    }
    assert model_from_config(config).groups == (
        FullAttention(2, 4, 64, 64),
        SlidingWindow(6, 8, 32, 32, 512),
    )
    with pytest.raises(ConfigError, match="layer_types must have an entry for each of 8 layers"):
        model_from_config({**config, "layer_types": [FULL]})


def test_unknown_families_that_list_plain_layers_are_read() -> None:
    config = {**HEADS, "model_type": "new", "sliding_window": 16, "layer_types": [FULL, SLIDING] * 4}
    assert kinds(config) == [(FullAttention, 4), (SlidingWindow, 4)]


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": None},
        {"layer_types": ["full_attention"] * 7 + ["conv"]},
        {"layer_types": ["full_attention"] * 7 + ["linear_attention"]},
        {"num_kv_shared_layers": 2},
        {"kv_lora_rank": 512},
        {"swa_head_dim": 128},
    ],
)
def test_unknown_families_that_may_keep_something_else_are_not(change: dict[str, Any]) -> None:
    config = {**HEADS, "model_type": "new", "layer_types": [FULL] * 8, **change}
    with pytest.raises(
        ConfigError, match='model_type "new" is not known, and it has no layer_types that tell'
    ):
        model_from_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NEMOTRON | {"hybrid_override_pattern": "MXM"}, "hybrid_override_pattern must be text of M"),
        (NEMOTRON | {"hybrid_override_pattern": None}, "hybrid_override_pattern must be text of M"),
        (NEMOTRON | {"n_groups": None}, "n_groups must be a whole number above 0, not None"),
        (GRANITE | {"layer_types": None}, "layer_types must be a list of mamba"),
        (RING | {"layer_group_size": 0}, "layer_group_size must be a whole number above 0, not 0"),
        (HEADS | {"model_type": "llama", "layer_types": ["linear_attention"] * 8}, "is not known"),
        (
            HEADS | {"model_type": "kimi_linear", "linear_attn_config": {}},
            "linear_attn_config.kda_layers must be",
        ),
        (
            HEADS | {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [0, 1]}},
            "kda_layers must be different layer numbers from 1 to 8",
        ),
        (HEADS, "model_type is missing"),
    ],
)
def test_errors_name_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_from_config(config)
    assert message in str(raised.value)
