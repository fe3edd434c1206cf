"""Shapes of published models, against the sizes in their documentation and vLLM's own calculation."""

import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.kv.hf_config import model_from_config, model_from_directory
from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow

MIB = 1024 * 1024

QWEN3_235B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "use_sliding_window": False,
    "sliding_window": None,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
}
MIMO_V2_FLASH = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0] + [1] * 39 + [0] * 8,
}
QWEN35_397B = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
}
KIMI_LINEAR_48B = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "kda_layers": [layer for layer in range(1, 28) if layer not in (4, 8, 12, 16, 20, 24, 27)],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


@pytest.mark.parametrize(
    ("config", "token_bytes", "fixed_bytes"),
    [
        (QWEN3_235B, 192_512, 0),
        (GPT_OSS_120B, 36_864, 128 * 36_864),
        (MIMO_V2_FLASH, 23_040, 25_559_040),
        (QWEN35_397B, 30_720, 192_061_440),
        (KIMI_LINEAR_48B, 8_064, 43_417_600),
        (DEEPSEEK_V3, 70_272, 0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_published_sizes(config: dict[str, Any], token_bytes: int, fixed_bytes: int) -> None:
    model = model_from_config(config)
    assert model.token_bytes == token_bytes
    assert model.kv_bytes(8192) == 8192 * token_bytes + fixed_bytes
    assert model.is_hybrid == (fixed_bytes > 0)


@pytest.mark.slow("imports vLLM or torch")
def test_gated_delta_net_is_what_vllm_allocates() -> None:
    torch = pytest.importorskip("torch")
    mamba_utils = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
    shape = {
        "key_heads": 16,
        "value_heads": 32,
        "key_head_size": 128,
        "value_head_size": 64,
        "conv_kernel": 4,
    }
    conv, state = mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape(
        1,
        num_k_heads=shape["key_heads"],
        num_v_heads=shape["value_heads"],
        head_k_dim=shape["key_head_size"],
        head_v_dim=shape["value_head_size"],
        conv_kernel_size=shape["conv_kernel"],
    )
    dtypes = mamba_utils.MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        torch.bfloat16, "auto", "float32"
    )
    group = LinearState.gated_delta_net(3, **shape)
    sizes = [
        torch.Size(dims).numel() * dtype.itemsize for dims, dtype in zip((conv, state), dtypes, strict=True)
    ]
    assert [group.conv_bytes, group.recurrent_bytes] == sizes


def test_layer_types_win_over_the_interval() -> None:
    config = {
        **QWEN35_397B["text_config"],  # type: ignore[dict-item]
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"],
    }
    attention, linear = model_from_config(config).groups
    assert isinstance(attention, FullAttention)
    assert isinstance(linear, LinearState)
    assert (attention.layers, linear.layers) == (3, 1)


def test_gpt_oss_begins_with_a_window() -> None:
    full, window = model_from_config({**GPT_OSS_120B, "num_hidden_layers": 3}).groups
    assert isinstance(window, SlidingWindow)
    assert (full.layers, window.layers) == (1, 2)


def test_dense_models_with_a_window() -> None:
    mistral = {**QWEN3_235B, "model_type": "mistral", "sliding_window": 4096}
    assert [type(group) for group in model_from_config(mistral).groups] == [SlidingWindow]
    assert [type(group) for group in model_from_config({**mistral, "sliding_window": None}).groups] == [
        FullAttention
    ]
    qwen = {**QWEN3_235B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 90}
    assert [group.layers for group in model_from_config(qwen).groups] == [90, 4]


def test_heads_default_to_attention_heads_and_size_to_the_hidden_size() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert model_from_config(config).groups == (FullAttention(2, 4, 16, 16),)


def test_an_fp8_cache_is_half() -> None:
    assert 2 * model_from_config(QWEN3_235B, dtypes=CacheDtypes("fp8")).kv_bytes(100) == model_from_config(
        QWEN3_235B
    ).kv_bytes(100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, 'model_type "mamba2" is not known, and it has no layer_types'),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a whole number above 0, not None"),
        ({"head_dim": "64"}, "head_dim must be a whole number above 0, not '64'"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 36 entries"),
        ({"layer_types": ["conv"] * 36}, 'layer_types: "conv" is not known'),
        ({"sliding_window": None}, "sliding_window must be a whole number"),
    ],
)
def test_errors_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_from_config({**GPT_OSS_120B, **change})
    assert message in str(raised.value)


def test_reads_a_checkpoint_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: there is no such file"):
        model_from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold one JSON object"):
        model_from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**GPT_OSS_120B, "head_dim": 0}))
    with pytest.raises(ConfigError, match=r"config\.json: head_dim must be"):
        model_from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_120B))
    model = model_from_directory(tmp_path, name="mine")
    assert model.describe().startswith(
        "mine: 18 full attention (8 heads of 64+64), 36864 B per token; 18 sliding"
    )
