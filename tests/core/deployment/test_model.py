"""The model of a running deployment: its KVCache in the dtypes that its engines are started with."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype, ModelDtype
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.shipped import example_path
from prfaas.serving.control.planning_inputs import kv_facts, kv_model_of
from prfaas.serving.engines.tiny import tiny_config


def loaded(folder: Path, model: str = "") -> Deployment:
    text = example_path("local").read_text().replace("trained: words", f"path: checkpoint{model}")
    (folder / "local.yaml").write_text(text)
    (folder / "checkpoint").mkdir(exist_ok=True)
    (folder / "checkpoint" / "config.json").write_text(json.dumps(tiny_config("qwen3-next")))
    return load_deployment(folder / "local.yaml", state_dir=folder / "state")


def test_nothing_said_is_auto(tmp_path: Path) -> None:
    model = loaded(tmp_path).model
    assert (model.kv_cache_dtype, model.dtype) == ("auto", "auto")
    assert model.kv_model() == model_from_config(tiny_config("qwen3-next"), name=model.served_name)


@pytest.mark.parametrize("dtype", get_args(ModelDtype))
@pytest.mark.parametrize("kv_cache_dtype", get_args(KvCacheDtype)[:-1])
def test_the_fields_of_the_file_count(tmp_path: Path, kv_cache_dtype: Any, dtype: Any) -> None:
    deployment = loaded(tmp_path, f"\n  kv_cache_dtype: {kv_cache_dtype}\n  dtype: {dtype}")
    dtypes, name = CacheDtypes(kv_cache_dtype, dtype), deployment.model.served_name
    expected = model_from_config(tiny_config("qwen3-next"), name=name, dtypes=dtypes)
    assert deployment.model.kv_model() == expected == kv_model_of(deployment)


def test_a_transfer_is_predicted_in_the_cache_s_bytes(tmp_path: Path) -> None:
    whole, half = (kv_model_of(loaded(tmp_path, said)) for said in ("", "\n  kv_cache_dtype: fp8"))
    assert whole is not None and half is not None
    # The state moves whole, whatever K and V are kept in.
    moved = [kv_facts(model).bytes_to_move(8192, 0) - model.fixed_bytes for model in (half, whole)]
    assert 2 * moved[0] == moved[1] > 0


def test_a_cache_that_the_model_can_not_have_is_no_known_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kv_model_of(loaded(tmp_path, "\n  kv_cache_dtype: fp8_ds_mla")) is None
    assert "fp8_ds_mla is a layout of sparse MLA" in caplog.text
