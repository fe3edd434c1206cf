"""Estimated profiles: what the file says of itself, and the estimate beside a measured one."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.core.kv.config_fields import ConfigError
from prfaas.core.kv.dtypes import CacheDtypes
from prfaas.core.latency.files import load_profile, profile_text, save_profile
from prfaas.core.latency.profile import ProfileError
from prfaas.core.latency.roofline import REQUEST_S, Roofline, gpu
from prfaas.core.latency.work import model_work
from prfaas.tools.profiling.estimate import EstimatePlan, beside, estimate

MODELS: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "core" / "latency" / "public_models.yaml").read_text()
)


@pytest.fixture(autouse=True)
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without aiconfigurator-core."""
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)


def config(directory: Path, model: str, **more: object) -> Path:
    path = directory / model
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[model]["config"] | more))
    return path


def test_a_profile_that_says_that_it_is_estimated(tmp_path: Path) -> None:
    made = estimate(EstimatePlan(config(tmp_path, "qwen3-next-80b"), "H100", 4))
    profile = made.profile
    assert (profile.name, profile.model) == ("qwen3-next-80b-h100", "qwen3-next-80b")
    assert (profile.hardware, profile.gpus_per_instance) == ("h100", 4)
    assert profile.range_tokens == (128, 131072)
    assert profile.source.startswith("Estimated, not measured: the roofline of prfaas")
    assert "bf16 weights" in profile.source
    assert profile.decode is not None
    assert profile.decode.context_tokens == 8192
    assert profile.range_batch == (1, 256)
    for evidence in (profile.evidence, profile.decode.evidence):
        assert evidence.origin == "estimated"
        assert evidence.band is not None
    assert made.notes == ()


def test_an_fp8_cache_is_read_faster_and_more_of_it_fits(tmp_path: Path) -> None:
    path, batches = config(tmp_path, "minimax-m2.5"), (1, 64)
    plan = EstimatePlan(path, "h200", 8, batches=batches, context_tokens=32_768)
    whole = estimate(plan)
    half = estimate(replace(plan, dtypes=CacheDtypes("fp8")))
    assert whole.profile.decode is not None and half.profile.decode is not None
    for (batch, slow_s), (_, fast_s) in zip(
        whole.profile.decode.curve.points, half.profile.decode.curve.points, strict=True
    ):
        assert fast_s < slow_s, batch
    assert half.profile.prefill == whole.profile.prefill
    assert half.profile.source == f"{whole.profile.source}, KVCache in fp8"
    rooms = []
    for dtype in ("auto", "fp8"):
        with pytest.raises(ProfileError, match="has memory for") as told:
            estimate(replace(plan, batches=(1, 99_999), dtypes=CacheDtypes(dtype)))
        rooms.append(int(str(told.value).split("for ")[1].split()[0]))
    assert rooms[1] in (2 * rooms[0], 2 * rooms[0] + 1)


def test_quantization_in_a_file_beside_the_config_counts(tmp_path: Path) -> None:
    """As older checkpoints of ModelOpt have it: weights and KVCache are smaller."""
    path = config(tmp_path, "qwen3-next-80b")
    plain = estimate(EstimatePlan(path, "b200", 4))
    told = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
    }
    (path / "hf_quant_config.json").write_text(json.dumps(told))
    quantized = estimate(EstimatePlan(path, "b200", 4))
    assert "nvfp4 weights" in quantized.profile.source
    assert quantized.profile.decode is not None and plain.profile.decode is not None
    assert quantized.profile.decode.curve.at(64) < plain.profile.decode.curve.at(64)


@pytest.mark.parametrize(
    ("gpu", "ranks", "is_told"), [("h200", 8, False), ("h200", 16, True), ("gb200", 16, False)]
)
def test_more_gpus_than_a_machine_has_are_told(tmp_path: Path, gpu: str, ranks: int, is_told: bool) -> None:
    made = estimate(EstimatePlan(config(tmp_path, "deepseek-r1"), gpu, ranks))
    told = [f"{ranks} {gpu} are more than the 8 of one machine" in note for note in made.notes]
    assert any(told) == is_told


def test_it_survives_the_file(tmp_path: Path) -> None:
    profile = estimate(EstimatePlan(config(tmp_path, "minimax-m2.5"), "h20", 8, name="mine")).profile
    save_profile(profile, tmp_path / "mine.yaml")
    assert load_profile(tmp_path / "mine.yaml") == profile
    assert "origin: estimated" in profile_text(profile)


def test_batches_end_where_memory_does(tmp_path: Path) -> None:
    path = config(tmp_path, "minimax-m2.5")
    # 230 GB of weights leave little of 4 × 72 GB for requests of 254 kB a token.
    made = estimate(EstimatePlan(path, "h100", 4))
    assert made.notes == ()
    assert made.profile.range_batch[1] == 32
    with pytest.raises(
        ProfileError,
        match=r"minimax-m2.5 on 4 h100 has memory for \d+ requests of 8192 tokens, not for a batch of 999",
    ):
        estimate(EstimatePlan(path, "h100", 4, batches=(1, 999)))
    only = estimate(EstimatePlan(path, "h100", 4, batches=())).profile
    assert only.decode is None


def test_lengths_are_those_the_model_takes(tmp_path: Path) -> None:
    path = config(tmp_path, "llama-3.1-8b", max_position_embeddings=8192)
    assert estimate(EstimatePlan(path, "l40s", 1)).profile.range_tokens == (128, 8192)
    given = estimate(EstimatePlan(path / "config.json", "l40s", 1, lengths=(100, 2000))).profile
    assert [tokens for tokens, _ in given.prefill.points] == [100, 2000]
    with pytest.raises(ProfileError, match="at least two lengths"):
        estimate(EstimatePlan(path, "l40s", 1, lengths=(100,)))


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    path = config(tmp_path, "qwen3-235b")
    with pytest.raises(ProfileError, match=r"needs 59 GB on each of 8 l40s"):
        estimate(EstimatePlan(path, "l40s", 8))
    with pytest.raises(ProfileError, match="--weights: must be one of bf16, fp8"):
        estimate(EstimatePlan(path, "h200", 8, weights="int3"))
    with pytest.raises(ProfileError, match=r"nowhere: there is no such file; name"):
        estimate(EstimatePlan(tmp_path / "nowhere", "h200", 8))
    (path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(ConfigError, match="rwkv"):
        estimate(EstimatePlan(path, "h200", 8))


def test_an_estimate_beside_a_measured_profile(tmp_path: Path) -> None:
    made = estimate(EstimatePlan(config(tmp_path, "minimax-m2.5"), "h200", 8)).profile
    printed = load_profile("minimax-m2.5-h200")
    rows = beside(made, printed)
    assert [row["at"] for row in rows["prefill"]] == [2**power for power in range(7, 18)]
    # The batches that were measured, too, and those of the estimate that were not.
    both = [row["at"] for row in rows["decode"] if "measured_s" in row]
    assert both == [4, 8, 16, 32, 64, 128]
    assert made.evidence.band is not None
    for row in rows["prefill"]:
        assert row["estimated_s"] == made.prefill_s(row["at"])
        assert row["low_s"] == pytest.approx(made.evidence.band[0] * row["estimated_s"])
        if row["at"] >= 1024:
            assert row["measured_s"] == printed.prefill_s(row["at"])
    assert set(beside(replace(made, decode=None), printed)) == {"prefill"}
    assert all("measured_s" not in row for row in beside(made, None)["prefill"])


@pytest.fixture
def with_brought_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package of that name with two config.json files, as aiconfigurator-core has them, and nothing to ask."""
    folder = tmp_path / "site" / "aiconfigurator_core"
    (folder / "model_configs").mkdir(parents=True)
    (folder / "__init__.py").touch()
    for hub, model in (
        ("MiniMaxAI--MiniMax-M2.5", "minimax-m2.5"),
        ("Some--Qwen3-Next-80B", "qwen3-next-80b"),
    ):
        file = folder / "model_configs" / f"{hub}_config.json"
        file.write_text(json.dumps(MODELS[model]["config"]))
    monkeypatch.delitem(sys.modules, "aiconfigurator_core")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.mark.usefixtures("with_brought_configs")
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("minimax-m2.5", "minimax-m2.5"),
        ("MiniMaxAI/MiniMax-M2.5", "minimax-m2.5"),
        ("qwen3-next-80b", "qwen3-next-80b"),
    ],
)
def test_models_by_their_names(given: str, name: str) -> None:
    """Published ones, and those on the hub whose config.json the package brings."""
    made = estimate(EstimatePlan(Path(given), "h200", 8))
    assert (made.profile.model, made.profile.name) == (name, f"{name}-h200")


@pytest.mark.usefixtures("with_brought_configs")
@pytest.mark.parametrize("given", ["kimi-linear", "nobody/nothing"])
def test_models_whose_config_nobody_brings(given: str) -> None:
    with pytest.raises(ProfileError, match=f"--model {given}: its config.json is needed"):
        estimate(EstimatePlan(Path(given), "h200", 8))


def test_an_h20_is_as_fast_as_public_figures_say() -> None:
    """16,500 input tokens/s of DeepSeek-R1 on 8 of them, prompts of 4,096 tokens (SGLang with Ant Group, 2025-09-26).

    And at 32K tokens an H200 is 2.7 times as fast, as the paper's own two profiles have it.
    """
    work = model_work(MODELS["deepseek-r1"]["config"], "deepseek-r1")
    h20, h200 = (Roofline(work, gpu(name), 8) for name in ("h20", "h200"))
    assert 4096 / (h20.prefill_s(4096) - REQUEST_S) == pytest.approx(16_500, rel=0.05)
    assert h20.prefill_s(32_768) / h200.prefill_s(32_768) == pytest.approx(2.7, rel=0.05)


@pytest.mark.parametrize(
    "name", ["h20-3e", "gb300", "mi300x", "mi355x", "rtx-pro-6000", "ascend-910b", "ascend-910c"]
)
def test_gpus_have_sources_and_peaks_that_fit_together(name: str) -> None:
    found = gpu(name)
    assert found.source and found.memory_bytes > 5e10
    assert found.flops_per_s("fp8") in (
        found.bf16_flops_per_s,
        pytest.approx(2 * found.bf16_flops_per_s, rel=0.01),
    )
    assert found.flops_per_s("fp4") >= found.flops_per_s("fp8")
