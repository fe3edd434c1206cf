"""Public model cards against the bytes that vLLM keeps, or the reason why they are refused."""

from typing import Any

import pytest

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.layers import ChunkedWindow, FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import Group

from .model_cards import (
    APERTUS_8B,
    COHERE_2,
    FALCON_H1,
    GEMMA_3_1B,
    GEMMA_3_4B,
    GEMMA_3_12B,
    GEMMA_3_27B,
    GEMMA_3N_E4B,
    GEMMA_4_E2B,
    GLM_4_5V,
    GLM_5_2,
    JAMBA,
    LFM2,
    LING_MINI,
    LLAMA_4_SCOUT,
    LONGCAT_FLASH,
    MINISTRAL_3_8B,
    NEMOTRON_NANO,
    PHI_4_MINI,
    QWEN_2_5_VL,
    QWEN_3_VL,
    SEED_OSS,
    SLIDING,
    STEP_3,
)

CARDS: dict[str, tuple[dict[str, Any], tuple[Group, ...]]] = {
    "llama-4-scout": (
        LLAMA_4_SCOUT,
        (FullAttention(12, 8, 128, 128), ChunkedWindow(36, 8, 128, 128, 8192)),
    ),
    "gemma-3-1b": (GEMMA_3_1B, (FullAttention(4, 1, 256, 256), SlidingWindow(22, 1, 256, 256, 512))),
    "gemma-3-4b": (GEMMA_3_4B, (FullAttention(5, 4, 256, 256), SlidingWindow(29, 4, 256, 256, 1024))),
    "gemma-3-12b": (GEMMA_3_12B, (FullAttention(8, 8, 256, 256), SlidingWindow(40, 8, 256, 256, 1024))),
    "gemma-3-27b": (GEMMA_3_27B, (FullAttention(10, 16, 128, 128), SlidingWindow(52, 16, 128, 128, 1024))),
    "gemma-3n-e4b": (GEMMA_3N_E4B, (FullAttention(4, 2, 256, 256), SlidingWindow(16, 2, 256, 256, 512))),
    "gemma-4-e2b": (GEMMA_4_E2B, (FullAttention(3, 1, 512, 512), SlidingWindow(12, 1, 256, 256, 512))),
    "jamba": (
        JAMBA,
        (
            FullAttention(4, 8, 128, 128),
            LinearState(28, 3 * 8192 * 2, 8192 * 16 * 4, kind="Mamba", heads=8192),
        ),
    ),
    "falcon-h1": (
        FALCON_H1,
        (
            FullAttention(24, 2, 128, 128),
            LinearState.mamba2(24, heads=48, head_size=64, groups=1, state_size=256, conv_kernel=4),
        ),
    ),
    "lfm2": (
        LFM2,
        (FullAttention(6, 8, 64, 64), LinearState(10, 2 * 2048 * 2, 0, kind="ShortConv", heads=2048)),
    ),
    "step-3": (STEP_3, (FullAttention(61, 1, 256, 256),)),
    "qwen-2.5-vl": (QWEN_2_5_VL, (FullAttention(36, 2, 128, 128),)),
    "qwen-3-vl": (QWEN_3_VL, (FullAttention(94, 4, 128, 128),)),
    "glm-4.5v": (GLM_4_5V, (FullAttention(46, 8, 128, 128),)),
    "ministral-3": (MINISTRAL_3_8B, (FullAttention(34, 8, 128, 128),)),
    "seed-oss": (SEED_OSS, (FullAttention(64, 8, 128, 128),)),
    "longcat-flash": (LONGCAT_FLASH, (FullAttention(56, 1, 576, 0),)),
    "ling": (LING_MINI, (FullAttention(20, 4, 128, 128),)),
    "apertus": (APERTUS_8B, (FullAttention(32, 8, 128, 128),)),
    # A layer sees 4096 tokens before its own, which makes 4097.
    "cohere2": (COHERE_2, (FullAttention(10, 8, 128, 128), SlidingWindow(30, 8, 128, 128, 4097))),
    "glm-5.2": (GLM_5_2, (FullAttention(78, 1, 576, 0), FullAttention(21, 1, 132, 0, 1))),
    "phi-4-mini": (PHI_4_MINI, (FullAttention(32, 8, 128, 128),)),
    "nemotron-nano": (
        NEMOTRON_NANO,
        (
            FullAttention(4, 8, 128, 128),
            LinearState.mamba2(27, heads=128, head_size=80, groups=8, state_size=128, conv_kernel=4),
        ),
    ),
}
# Bytes per token, of fixed states, and of full windows, worked out by hand.
BYTES = {
    "llama-4-scout": (49_152, 0, 36 * 4096 * 8192),
    "gemma-3-1b": (4_096, 0, 22 * 1024 * 512),
    "gemma-3-4b": (20_480, 0, 29 * 4096 * 1024),
    "gemma-3-12b": (65_536, 0, 40 * 8192 * 1024),
    "gemma-3-27b": (81_920, 0, 52 * 8192 * 1024),
    "gemma-3n-e4b": (8_192, 0, 16 * 2048 * 512),
    "gemma-4-e2b": (6_144, 0, 12 * 1024 * 512),
    "jamba": (16_384, 28 * (49_152 + 524_288), 0),
    "falcon-h1": (24_576, 24 * (21_504 + 3_145_728), 0),
    "lfm2": (12_288, 10 * 8_192, 0),
    "step-3": (62_464, 0, 0),
    "qwen-2.5-vl": (36_864, 0, 0),
    "qwen-3-vl": (192_512, 0, 0),
    "glm-4.5v": (188_416, 0, 0),
    "ministral-3": (139_264, 0, 0),
    "seed-oss": (262_144, 0, 0),
    "longcat-flash": (64_512, 0, 0),
    "ling": (40_960, 0, 0),
    "apertus": (131_072, 0, 0),
    "cohere2": (40_960, 0, 30 * 4096 * 4097),
    "glm-5.2": (78 * 1152 + 21 * 132, 0, 0),
    "phi-4-mini": (131_072, 0, 0),
    "nemotron-nano": (16_384, 27 * 5_316_608, 0),
}


@pytest.mark.parametrize("name", CARDS)
def test_public_model_cards(name: str) -> None:
    config, groups = CARDS[name]
    model = model_from_config(config, name=name)
    assert model.groups == groups
    assert (model.token_bytes, model.fixed_bytes, model.window_bytes) == BYTES[name]


def text(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The card with changed fields of its language model."""
    if "text_config" not in config:
        return {**config, **changes}
    return {**config, "text_config": {**config["text_config"], **changes}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (text(LLAMA_4_SCOUT, no_rope_layers=[1, 0]), "no_rope_layers must be a list of 48 entries"),
        (
            text(LLAMA_4_SCOUT, attention_chunk_size=-1),
            "attention_chunk_size must be a whole number from 0 on",
        ),
        (
            text(GEMMA_3_4B, num_hidden_layers=None),
            "num_hidden_layers must be a whole number above 0, not None",
        ),
        (text(GEMMA_3_4B, sliding_window=None), "sliding_window must be a whole number above 0, not None"),
        (
            text(GEMMA_3N_E4B, num_kv_shared_layers=35),
            "num_kv_shared_layers must be below the 35 layers, not 35",
        ),
        (
            text(GEMMA_4_E2B, use_bidirectional_attention="all"),
            "use_bidirectional_attention of all: what layers keep",
        ),
        (
            text(COHERE_2, model_type="cohere2_moe"),
            "layer_types is missing, and with it which layers of cohere2_moe",
        ),
        (text(JAMBA, attn_layer_offset=8), "attn_layer_offset must be below attn_layer_period (8), not 8"),
        (
            text(FALCON_H1, mamba_n_heads=47),
            "mamba_n_heads must divide the width of Mamba2, 3072; 47 does not",
        ),
        (
            text(LFM2, layer_types=["conv", SLIDING] * 8),
            "layer_types must be a list of full_attention and conv",
        ),
        (text(LFM2, full_attn_idxs=[2, 2]), "full_attn_idxs must be different layer numbers from 0 to 15"),
        (text(STEP_3, num_attention_groups=2), "num_attention_groups must be 1"),
        (text(QWEN_3_VL, layer_types=["linear_attention"] * 94), 'what a "linear_attention" layer of'),
        (text(LONGCAT_FLASH, num_layers=None), "num_layers must be a whole number above 0, not None"),
        (text(LONGCAT_FLASH, architectures=["Other"]), "model_type is missing"),
        (
            text(GLM_5_2, index_topk_pattern="FFS"),
            "index_topk_pattern must be text of F and S, one per layer of 78",
        ),
        (
            text(GLM_5_2, index_topk_freq=None, indexer_types=["half"] * 78),
            'indexer_types must be a list of "full"',
        ),
        (text(COHERE_2, sliding_window=None), "sliding_window must be a whole number above 0, not None"),
    ],
)
def test_cards_that_cannot_be_read_say_why(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_from_config(config)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "indexed"),
    [
        ({}, 21),
        ({"index_topk_freq": None}, 21),
        ({"index_topk_freq": None, "indexer_types": None}, 78),
        ({"indexer_types": None}, 21),
        ({"indexer_types": None, "index_skip_topk_offset": None}, 21),
        ({"index_topk_pattern": "F" * 3 + "S" * 75}, 3),
    ],
)
def test_an_index_in_some_layers(changes: dict[str, Any], indexed: int) -> None:
    latent, index = model_from_config({**GLM_5_2, **changes}).groups
    assert (latent.layers, index.layers) == (78, indexed)


@pytest.mark.parametrize(
    ("changes", "full_layers"),
    [
        ({}, 12),
        ({"no_rope_layers": []}, 12),
        ({"no_rope_layers": [1, 0] * 24}, 24),
        ({"no_rope_layer_interval": 2}, 24),
        ({"attention_chunk_size": None}, 48),
        # No token leaves a chunk that is as long as the context.
        ({"attention_chunk_size": 10485760}, 48),
    ],
)
def test_llama_4_chunks(changes: dict[str, Any], full_layers: int) -> None:
    full, *chunked = model_from_config(text(LLAMA_4_SCOUT, **changes)).groups
    assert full == FullAttention(full_layers, 8, 128, 128)
    assert [group.layers for group in chunked] == ([48 - full_layers] if full_layers < 48 else [])


def test_gemma_4_full_layers_may_have_fewer_heads() -> None:
    changes = {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "num_kv_shared_layers": None}
    full, _ = model_from_config(text(GEMMA_4_E2B, **changes)).groups
    assert full == FullAttention(7, 4, 512, 512)
    full, _ = model_from_config(text(GEMMA_4_E2B, **changes, attention_k_eq_v=True)).groups
    assert full == FullAttention(7, 2, 512, 512)


def test_head_sizes_that_files_leave_out() -> None:
    """The width of Nemotron Nano divided by its heads would be 112."""
    shorter = {field: value for field, value in NEMOTRON_NANO.items() if field != "head_dim"}
    assert model_from_config(shorter) == model_from_config(NEMOTRON_NANO)
    # A text_config without a model_type is a Mistral's, whose KV heads are 8.
    text_fields = {
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "head_dim": 128,
        "sliding_window": None,
    }
    small = {"model_type": "mistral3", "text_config": text_fields}
    assert model_from_config(small).groups == (FullAttention(40, 8, 128, 128),)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, 0),
        ({"sliding_window": 131072}, 0),
        ({"sliding_window": 131071}, 32),
        ({"sliding_window": 0}, 0),
        ({"max_position_embeddings": None}, 32),
        # These scale the context beyond max_position_embeddings.
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 32),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 0),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 0),
    ],
)
def test_a_window_of_the_whole_context_is_none(changes: dict[str, Any], windows: int) -> None:
    model = model_from_config({**PHI_4_MINI, **changes})
    assert sum(group.layers for group in model.groups if isinstance(group, SlidingWindow)) == windows
    assert model.layers == 32
    # What the other side holds stays where it is, if no token leaves.
    assert model.bytes_to_move(100, 100) == (windows > 0) * model.kv_bytes(100)


def test_windows_of_the_whole_context_join_the_full_layers() -> None:
    config = text(GEMMA_3_27B, max_position_embeddings=1024)
    assert model_from_config(config).groups == (FullAttention(62, 16, 128, 128),)


@pytest.mark.parametrize(("layout", "latent_bytes"), [("fp8_ds_mla", 78 * 656), ("fp8_e4m3", 78 * 576)])
def test_sparse_mla_has_two_fp8_layouts(layout: KvCacheDtype, latent_bytes: int) -> None:
    latent, index = model_from_config(GLM_5_2, dtypes=CacheDtypes(layout)).groups
    assert isinstance(latent, FullAttention)
    assert latent.is_mla
    assert latent.token_bytes == latent_bytes
    assert index == FullAttention(21, 1, 132, 0, 1)


def test_fp8_layouts_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two layouts; say fp8_ds_mla .* or fp8_e4m3"):
        model_from_config(GLM_5_2, dtypes=CacheDtypes("fp8"))
    with pytest.raises(ConfigError, match="fp8_ds_mla is known for a kv_lora_rank of 512 and"):
        model_from_config({**GLM_5_2, "kv_lora_rank": 256}, dtypes=CacheDtypes("fp8_ds_mla"))
    with pytest.raises(ConfigError, match='not of model_type "longcat_flash"'):
        model_from_config(LONGCAT_FLASH, dtypes=CacheDtypes("fp8_ds_mla"))
    # Dense MLA has one layout, a byte per value.
    assert model_from_config(LONGCAT_FLASH, dtypes=CacheDtypes("fp8")).token_bytes == 56 * 576
