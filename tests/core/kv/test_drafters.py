"""What drafters keep, family by family; `test_allocation.py` has vLLM say it for three of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.drafters import DrafterError, Speculation, with_drafter
from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.layers import FullAttention, SlidingWindow
from prfaas.core.kv.model import KvModel, model_on_wire

MTP = Speculation("mtp")
DENSE = {
    "model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 2,
}  # fmt: skip
HYBRID = {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MIMO = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "sliding_window_size": 128, "hybrid_layer_pattern": [0, 1], "num_nextn_predict_layers": 3,
}  # fmt: skip
STEP = {
    "model_type": "step3p5", "num_hidden_layers": 2, "num_attention_heads": 8, "num_attention_groups": 2,
    "head_dim": 64, "sliding_window": 512, "num_nextn_predict_layers": 3,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
}  # fmt: skip
SPARSE = {**LATENT, "model_type": "deepseek_v32", "index_topk_freq": 2, "num_nextn_predict_layers": 1}
NEMOTRON = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M*", "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 64, "conv_kernel": 4,
    "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1,
}  # fmt: skip
LONGCAT = {**LATENT, "model_type": "longcat_flash", "num_layers": 3}


def drafting(config: dict[str, Any], speculation: Speculation, dtypes: CacheDtypes | None = None) -> KvModel:
    dtypes = dtypes or CacheDtypes()
    return with_drafter(model_from_config(config, dtypes=dtypes), config, speculation, dtypes)


@pytest.mark.parametrize(
    ("config", "drafters"),
    [
        (LATENT, [FullAttention(2, 1, 576, 0)]),
        (SPARSE, [FullAttention(1, 1, 576, 0), FullAttention(1, 1, 132, 0, 1)]),
        (LONGCAT, [FullAttention(1, 1, 576, 0)]),
        # Published files of this family leave the number of its layers out.
        (HYBRID, [FullAttention(1, 2, 256, 256)]),
        ({**HYBRID, "mtp_num_hidden_layers": 2}, [FullAttention(2, 2, 256, 256)]),
        # vLLM builds the first of three.
        (MIMO, [SlidingWindow(1, 8, 192, 128, 128)]),
        (STEP, [FullAttention(1, 2, 64, 64), SlidingWindow(2, 2, 64, 64, 512)]),
        (NEMOTRON, [FullAttention(1, 2, 64, 64)]),
    ],
)
def test_layers_of_multi_token_prediction(config: dict[str, Any], drafters: list[object]) -> None:
    own = model_from_config(config)
    model = drafting(config, MTP)
    assert model.groups == (*own.groups, *drafters)
    assert (model.drafter, model.own_groups, model.without_drafter()) == ("mtp", own.groups, own)
    assert "; drafts: 1 " in model.describe() or "; drafts: 2 " in model.describe()


def checkpoint(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_drafter_with_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "draft", {**DENSE, "num_hidden_layers": 2, "num_key_value_heads": 1})
    for method in ("", "draft_model", "eagle3"):
        model = drafting(LATENT, Speculation(method, place))
        assert model.groups[1:] == (FullAttention(2, 1, 64, 64),)
        assert model.drafter == "draft"


def test_the_library_speculators_has_the_layers_in_a_section(tmp_path: Path) -> None:
    layers = {**DENSE, "num_hidden_layers": 1}
    place = checkpoint(
        tmp_path / "draft", {"speculators_model_type": "eagle3", "transformer_layer_config": layers}
    )
    assert drafting(LATENT, Speculation("", place)).groups[1:] == (FullAttention(1, 2, 64, 64),)


def test_a_checkpoint_with_such_layers_gives_these_alone(tmp_path: Path) -> None:
    """As vLLM takes it, whatever the method says."""
    place = checkpoint(tmp_path / "draft", HYBRID)
    assert drafting(LATENT, Speculation("draft_model", place)).groups[1:] == (FullAttention(1, 2, 256, 256),)


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("ngram", ""),
        ("suffix", ""),
        ("", "ngram"),
        ("medusa", "no-such"),
        ("", "our.Proposer"),
        ("custom_class", "a.B"),
    ],
)
def test_what_looks_drafts_up_keeps_nothing(method: str, model: str) -> None:
    assert drafting(DENSE, Speculation(method, model)) == model_from_config(DENSE)


def test_an_assistant_reads_the_models_caches(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "draft", {"model_type": "gemma4_assistant"})
    assert drafting(DENSE, Speculation("mtp", place)) == model_from_config(DENSE)


@pytest.mark.parametrize(
    ("dtypes", "own", "width"),
    [
        (CacheDtypes(), None, 2),
        (CacheDtypes("fp8"), None, 1),
        (CacheDtypes("fp8"), "bfloat16", 2),
        (CacheDtypes(model="float32"), None, 4),
        (CacheDtypes("fp8_e5m2", "float32"), None, 1),
    ],
)
def test_a_drafter_keeps_what_the_model_does_or_its_own(
    tmp_path: Path, dtypes: CacheDtypes, own: Any, width: int
) -> None:
    quantized = {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
    place = checkpoint(tmp_path / "draft", {**DENSE, **quantized})
    model = drafting({**DENSE, "dtype": "float32"}, Speculation("", place, own), dtypes)
    assert [group.dtype_bytes for group in model.groups[1:] if isinstance(group, FullAttention)] == [width]


@pytest.mark.parametrize(
    ("config", "speculation", "said"),
    [
        (DENSE, MTP, 'the layers of model_type "qwen3" that do so are not known'),
        (LATENT, Speculation("eagle", "org/eagle"), "org/eagle is no directory on this machine"),
        ({**NEMOTRON, "mtp_hybrid_override_pattern": None}, MTP, "mtp_hybrid_override_pattern must be"),
        (LATENT, Speculation("mtp", "", "int3"), "the KV cache dtype must be one of"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_known_is_said(config: dict[str, Any], speculation: Speculation, said: str) -> None:
    with pytest.raises(DrafterError, match=f"^what drafts tokens: .*{said}"):
        drafting(config, speculation)


def test_a_drafters_part_crosses_between_equal_drafters_alone(tmp_path: Path) -> None:
    plain, mtp = model_from_config(LATENT), drafting(LATENT, MTP)
    place = checkpoint(tmp_path / "draft", DENSE)
    other = drafting(LATENT, Speculation("", place))
    for one, another in ((plain, mtp), (mtp, plain), (mtp, other), (other, mtp)):
        assert model_on_wire(one, another, 1) == plain
    assert model_on_wire(mtp, mtp, 1) == mtp
    narrow = drafting(LATENT, MTP, CacheDtypes("fp8"))
    # The narrower side has a drafter and the other has none.
    assert model_on_wire(narrow, plain, 1) == model_from_config(LATENT, dtypes=CacheDtypes("fp8"))


def test_ranks_share_a_drafters_latents_but_not_its_heads(tmp_path: Path) -> None:
    """vLLM does not say which of a drafter's heads a rank has."""
    place = checkpoint(tmp_path / "draft", {**DENSE, "num_key_value_heads": 1})
    of_heads = model_on_wire(
        drafting(DENSE, Speculation("", place)), drafting(DENSE, Speculation("", place)), 4
    )
    assert [group.kv_heads for group in of_heads.groups if isinstance(group, FullAttention)] == [2, 4]
    latents = drafting(LATENT, MTP)
    assert model_on_wire(latents, latents, 4) == latents
