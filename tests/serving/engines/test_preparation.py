"""What is seen before an engine starts: whether this machine's CPU has the dtypes that the file asks for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.core.kv.model_cards import SEED_OSS
from tests.ports import free_ports

from prfaas.core.deployment import Deployment, load_deployment
from prfaas.serving.engines import EngineError, preparation, running
from prfaas.serving.engines.preparation import ensure_dtypes
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.engines.tiny import tiny_config

AVX_2 = "processor : 0\nflags\t\t: fpu sse4_2 avx2 avx512f\n"
AVX_512 = "processor : 0\nflags\t\t: fpu avx2 avx512f avx512dq avx512bw avx512vl\n"
LATENT = {
    "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16,
}  # fmt: skip


def deployment(folder: Path, config: dict[str, Any], hardware: str = "cpu", **model: str) -> Deployment:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    http, kv, gateway = free_ports(3)
    instance = {
        "name": "both",
        "roles": ["prefill", "decode"],
        "host": "127.0.0.1",
        "http_port": http,
        "kv_port": kv,
    }
    document = {
        "name": "dtypes",
        "model": {"served_name": "m", "max_model_len": 4096, "path": "model", **model},
        "clusters": [
            {
                "name": "home",
                "kind": "pd",
                "hardware": hardware,
                "profile": "internal-1t-h20",
                "instances": [instance],
            }
        ],
        "gateway": {"port": gateway},
        "engine": {"kv_cache_gib": 1},
    }
    (folder / "file.yaml").write_text(json.dumps(document))
    return load_deployment(folder / "file.yaml", state_dir=folder / "state")


@pytest.fixture
def cpu_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(AVX_2)
    monkeypatch.setattr(preparation, "_CPU_INFO", path)
    return path


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_cache_needs_avx_512(tmp_path: Path, cpu_info: Path, dtype: str) -> None:
    given = deployment(tmp_path, SEED_OSS, kv_cache_dtype=dtype)
    with pytest.raises(EngineError) as refused:
        ensure_dtypes(given, given.instances)
    assert str(refused.value) == (
        f"model.kv_cache_dtype of {tmp_path / 'file.yaml'}: on cpu vLLM has {dtype} caches only with AVX-512, which "
        "this machine lacks; take the field out, or use other machines"
    )
    cpu_info.write_text(AVX_512)
    ensure_dtypes(given, given.instances)


def test_each_cluster_s_own_dtype_counts(tmp_path: Path, cpu_info: Path) -> None:
    given = deployment(tmp_path, SEED_OSS)
    (home,) = given.clusters
    narrow = replace(given, clusters=(replace(home, kv_cache_dtype="fp8"),))
    with pytest.raises(
        EngineError, match=r"^clusters\[home\]\.kv_cache_dtype of .*: on cpu vLLM has fp8 caches only"
    ):
        ensure_dtypes(narrow, narrow.instances)
    wide = replace(narrow, model=replace(given.model, kv_cache_dtype="fp8"))
    wide = replace(wide, clusters=(replace(home, kv_cache_dtype="bfloat16"),))
    ensure_dtypes(wide, wide.instances)


def test_no_engine_is_started_then(tmp_path: Path, cpu_info: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = deployment(tmp_path, SEED_OSS, kv_cache_dtype="fp8")
    monkeypatch.setattr(running, "ensure_vllm", lambda: None)
    engines = RunningEngines(given)
    with pytest.raises(EngineError, match="only with AVX-512"):
        engines.start()
    assert not engines.is_running("both")
    assert not given.logs_dir.exists()


def test_latents_have_the_dtype_of_the_model(tmp_path: Path, cpu_info: Path) -> None:
    cpu_info.write_text(AVX_512)
    given = deployment(tmp_path, LATENT, kv_cache_dtype="fp8")
    with pytest.raises(EngineError, match="keeps the latents of MLA in the model's dtype, not in fp8"):
        ensure_dtypes(given, given.instances)


@pytest.mark.parametrize("hardware", ["h200", "synthetic"])
def test_other_devices_are_not_judged(tmp_path: Path, cpu_info: Path, hardware: str) -> None:
    given = deployment(tmp_path, LATENT, hardware, kv_cache_dtype="fp8")
    ensure_dtypes(given, given.instances)


def test_without_the_field_nothing_is_judged(tmp_path: Path, cpu_info: Path) -> None:
    cpu_info.unlink()
    given = deployment(tmp_path, LATENT, dtype="float32")
    ensure_dtypes(given, given.instances)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gated_delta_net_has_one_dtype(tmp_path: Path, cpu_info: Path, dtype: str) -> None:
    given = deployment(tmp_path, tiny_config("qwen3-next"), dtype=dtype)
    with pytest.raises(EngineError, match=f"computes Gated DeltaNet in bfloat16 only, not in {dtype}; take"):
        ensure_dtypes(given, given.instances)


def test_gated_delta_net_in_its_own_dtype(tmp_path: Path, cpu_info: Path) -> None:
    given = deployment(tmp_path, tiny_config("qwen3-next"), dtype="bfloat16")
    ensure_dtypes(given, given.instances)


def test_two_bytes_are_what_cpus_have(tmp_path: Path, cpu_info: Path) -> None:
    given = deployment(tmp_path, SEED_OSS, kv_cache_dtype="bfloat16")
    ensure_dtypes(given, given.instances)
