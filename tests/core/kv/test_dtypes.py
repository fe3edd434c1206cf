"""Caches in other dtypes: vLLM's names, its sizes, and what it makes of `auto`."""

import ast
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype, ModelDtype, StateDtype
from prfaas.core.kv.hf_config import model_from_config, model_from_directory
from prfaas.core.kv.layers import LinearState
from prfaas.core.kv.published import PublishedModel, published_models

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MLA: dict[str, Any] = {**DENSE, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
FP8_SCHEME = {"type": "float", "num_bits": 8, "dynamic": False, "strategy": "tensor"}

# Others keep an index beside, which has a dtype of its own.
PLAIN = [
    each
    for each in published_models()
    if each.name not in ("deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro", "minimax-m3")
]
MODELS = st.sampled_from(PLAIN)
TOKENS = st.integers(0, 200_000)


def of_modelopt(**fields: object) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "FP8", **fields}


def legacy(**fields: object) -> dict[str, Any]:
    """As in ModelOpt's own file."""
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", **fields}}


@given(MODELS, st.sampled_from(("fp8", "fp8_e4m3", "fp8_e5m2")), TOKENS)
def test_an_fp8_cache_is_half_and_states_stay(
    model: PublishedModel, dtype: KvCacheDtype, tokens: int
) -> None:
    whole, half = model.kv_model, model.kept_in(CacheDtypes(dtype))
    assert half.fixed_bytes == whole.fixed_bytes
    state = whole.fixed_bytes if tokens else 0
    assert 2 * (half.kv_bytes(tokens) - state) == whole.kv_bytes(tokens) - state
    moved = [each.bytes_to_move(tokens, tokens // 3, 16) - state for each in (half, whole)]
    assert 2 * moved[0] == moved[1]


@given(MODELS, TOKENS)
def test_a_float32_model_is_twice_with_its_convolutions_but_not_its_states(
    model: PublishedModel, tokens: int
) -> None:
    whole, double = model.kv_model, model.kept_in(CacheDtypes(model="float32"))
    for group, larger in zip(whole.groups, double.groups, strict=True):
        if isinstance(group, LinearState):
            assert isinstance(larger, LinearState)
            assert larger.recurrent_bytes == group.recurrent_bytes
            assert larger.conv_bytes == 2 * group.conv_bytes
        else:
            assert larger.bytes_at(tokens) == 2 * group.bytes_at(tokens)


@given(MODELS, st.sampled_from(("bfloat16", "float16")), st.sampled_from(("auto", "bfloat16", "float16")))
def test_all_of_two_bytes_are_alike(model: PublishedModel, kv: KvCacheDtype, own: ModelDtype) -> None:
    assert model.kept_in(CacheDtypes(kv, own)) == model.kept_in(CacheDtypes("auto", own)) == model.kv_model


def test_a_cache_of_two_bytes_in_a_float32_model() -> None:
    assert model_from_config(DENSE, dtypes=CacheDtypes("bfloat16", "float32")) == model_from_config(DENSE)


def vllm_source(file: str) -> ast.Module:
    """Read, not imported: that takes half a minute."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    return ast.parse((Path(found.origin).parent / file).read_text(encoding="utf-8"))


def assigned(source: ast.Module, name: str) -> ast.expr:
    (found,) = (
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return found


def literals(source: ast.Module, name: str) -> set[str]:
    found = assigned(source, name)
    assert isinstance(found, ast.Subscript)
    return set(ast.literal_eval(found.slice))


def test_the_names_are_vllm_s() -> None:
    assert set(get_args(KvCacheDtype)) < literals(vllm_source("config/cache.py"), "CacheDType")
    assert set(get_args(ModelDtype)) < literals(vllm_source("config/model.py"), "ModelDType")
    assert set(get_args(StateDtype)) < literals(vllm_source("config/cache.py"), "MambaDType")


def test_the_sizes_are_vllm_s() -> None:
    found = assigned(vllm_source("utils/torch_utils.py"), "STR_DTYPE_TO_TORCH_DTYPE")
    assert isinstance(found, ast.Dict)
    torch_bytes = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
    torch_names = {
        ast.literal_eval(name): value.attr
        for name, value in zip(found.keys, found.values, strict=True)
        if name is not None and isinstance(value, ast.Attribute)
    }
    for kept in get_args(KvCacheDtype)[1:]:
        assert CacheDtypes(kept).element_bytes(None, is_latent=False).kv == torch_bytes[torch_names[kept]]
    for own in get_args(ModelDtype)[1:]:
        counted = CacheDtypes(model=own).element_bytes(None, is_latent=False)
        assert counted.kv == counted.conv == torch_bytes[torch_names[own]]


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (
            {"kv_cache": "nvfp4"},
            r"the KV cache dtype must be one of auto, bfloat16, .*fp8_ds_mla, not \"nvfp4\"",
        ),
        ({"model": "half"}, r"the model dtype must be one of auto, bfloat16, float16, float32, not \"half\""),
        ({"state": "auto"}, r"the state dtype must be one of bfloat16, float16, float32, not \"auto\""),
    ],
)
def test_unknown_dtypes_are_refused(dtypes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheDtypes(**dtypes)


# What an `auto` cache has, in bytes of an element, by the checkpoint's quantization.
QUANTIZATIONS: dict[str, tuple[Any, int]] = {
    "none": (None, 2),
    "no object": ("fp8", 2),
    "weights only": ({"quant_method": "fp8"}, 2),
    "modelopt's word": (of_modelopt(kv_cache_quant_algo="FP8"), 1),
    "modelopt's scheme": (of_modelopt(kv_cache_scheme=FP8_SCHEME), 1),
    "modelopt's dynamic scheme": (of_modelopt(kv_cache_scheme={**FP8_SCHEME, "dynamic": True}), 2),
    "modelopt's scheme of integers": (of_modelopt(kv_cache_scheme={**FP8_SCHEME, "type": "int"}), 2),
    "modelopt's other word": (of_modelopt(kv_cache_quant_algo="INT8"), 2),
    "modelopt without": (of_modelopt(), 2),
    "modelopt's own file": (legacy(kv_cache_quant_algo="FP8"), 1),
    "modelopt's own file, without": (legacy(kv_cache_quant_algo=None), 2),
}


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_what_auto_is_by_modelopt(name: str) -> None:
    quantization, element_bytes = QUANTIZATIONS[name]
    for config in (DENSE, MLA):
        found = model_from_config({**config, "quantization_config": quantization})
        assert found.token_bytes * 2 == model_from_config(config).token_bytes * element_bytes
        said = CacheDtypes("bfloat16")
        found = model_from_config({**config, "quantization_config": quantization}, dtypes=said)
        assert found == model_from_config(config)


@pytest.mark.slow("imports vLLM or torch")
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_vllm_says_the_same_of_auto(name: str) -> None:
    torch_utils = pytest.importorskip("vllm.utils.torch_utils")
    quantization, element_bytes = QUANTIZATIONS[name]
    if isinstance(quantization, dict):
        # vLLM writes the method of ModelOpt's own file into it: model_arch_config_convertor.py.
        asked = {"quant_method": "modelopt", **quantization}
        if quantization.get("quant_method") == "fp8":
            asked = quantization
        resolved = torch_utils.get_kv_cache_quant_algo_string(asked) or "auto"
        assert torch_utils.get_kv_cache_torch_dtype(resolved, "bfloat16").itemsize == element_bytes


def test_compressed_tensors_say_it_too_but_not_of_mla() -> None:
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}
    for spelling in ("compressed-tensors", "compressed_tensors"):
        found = model_from_config(
            {**DENSE, "quantization_config": {**quantization, "quant_method": spelling}}
        )
        assert 2 * found.token_bytes == model_from_config(DENSE).token_bytes
    assert model_from_config({**MLA, "quantization_config": quantization}) == model_from_config(MLA)
    weights_only = {**quantization, "kv_cache_scheme": None}
    assert model_from_config({**DENSE, "quantization_config": weights_only}) == model_from_config(DENSE)


@pytest.mark.parametrize(
    "said",
    [
        {"kv_cache_quant_algo": "NVFP4"},
        {"kv_cache_scheme": {"type": "float", "num_bits": 4, "dynamic": False}},
    ],
)
def test_an_nvfp4_cache_is_refused_until_another_is_named(said: dict[str, Any]) -> None:
    config = {**DENSE, "quantization_config": of_modelopt(**said)}
    with pytest.raises(
        ConfigError, match="KV cache is nvfp4, whose size is not known; name another KV cache"
    ):
        model_from_config(config)
    half = model_from_config(config, dtypes=CacheDtypes("fp8"))
    assert 2 * half.token_bytes == model_from_config(DENSE).token_bytes


def test_the_file_beside_config_json_counts_where_that_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    whole = model_from_directory(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(legacy(kv_cache_quant_algo="FP8")))
    assert 2 * model_from_directory(tmp_path).token_bytes == whole.token_bytes
    (tmp_path / "config.json").write_text(
        json.dumps({**DENSE, "quantization_config": {"quant_method": "fp8"}})
    )
    assert model_from_directory(tmp_path) == whole
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: must hold one JSON object"):
        model_from_directory(tmp_path)


def test_a_published_model_has_the_defaults() -> None:
    for model in published_models():
        assert model.kept_in(CacheDtypes()) == model.kv_model
    for model in PLAIN:
        assert replace(model.kept_in(CacheDtypes("fp8")), groups=()) == replace(model.kv_model, groups=())
