"""The roofline, against times that others measured on real servers."""

import csv
import statistics
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.latency.files import load_profile
from prfaas.core.latency.profile import ProfileError
from prfaas.core.latency.roofline import DECODE_BAND, PREFILL_BAND, Roofline, gpu
from prfaas.core.latency.work import WEIGHT_FORMATS, model_work

HERE = Path(__file__).parent
MODELS: dict[str, dict[str, Any]] = yaml.load((HERE / "public_models.yaml").read_text(), yaml.CSafeLoader)
PAPER = ("kimi-linear", "mimo-v2-flash", "qwen3.5-397b", "ring-2.5-1t", "minimax-m2.5", "qwen3-235b")


@cache
def roof(model: str, name: str, ranks: int, weights: str | None = None) -> Roofline:
    chosen = WEIGHT_FORMATS[weights] if weights else None
    return Roofline(model_work(MODELS[model]["config"], model, chosen), gpu(name), ranks)


def ratios() -> dict[str, list[float]]:
    """Measured over estimated, of all public times."""
    lines = [line for line in (HERE / "public_times.csv").read_text().splitlines() if line[0] != "#"]
    found = defaultdict(list)
    for row in csv.DictReader(lines):
        instance = roof(row["model"], row["gpu"], int(row["ranks"]), row["weights"])
        prompt, answer = int(row["prompt_tokens"]), int(row["answer_tokens"])
        # SGLang takes some 0.2 s for any prompt, which is not the GPU's.
        if row["prefill_s"] and row["engine"] == "vllm":
            found["prefill"].append(float(row["prefill_s"]) / instance.prefill_s(prompt))
        if row["step_s"]:
            step_s = instance.decode_step_s(int(row["batch"]), prompt + answer // 2)
            found["decode"].append(float(row["step_s"]) / step_s)
    return found


@pytest.mark.parametrize(("what", "band"), [("prefill", PREFILL_BAND), ("decode", DECODE_BAND)])
def test_the_error_bars_hold_eight_of_ten_public_times(what: str, band: tuple[float, float]) -> None:
    measured = ratios()[what]
    assert len(measured) > 100
    inside = sum(band[0] <= ratio <= band[1] for ratio in measured) / len(measured)
    assert 0.78 <= inside <= 0.9
    assert statistics.median(measured) == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("model", PAPER)
def test_what_more_tokens_cost_is_near_what_the_paper_measured(model: str) -> None:
    """Its times begin at 0.34 s whatever the model, which is no arithmetic: what comes on top is compared."""
    printed, instance = load_profile(f"{model}-h200"), roof(model, "h200", 8)
    more = printed.prefill_s(131072) - printed.prefill_s(32768)
    assert 0.7 < more / (instance.prefill_s(131072) - instance.prefill_s(32768)) < 2.1


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["h100", "h200", "h20", "b200"]),
    st.integers(1, 100_000),
    st.integers(1, 256),
)
def test_more_work_never_takes_less_time(model: str, name: str, tokens: int, batch: int) -> None:
    try:
        instance = roof(model, name, 8)
    except ProfileError:
        return
    assert instance.prefill_s(tokens) < instance.prefill_s(tokens + 1)
    assert instance.decode_step_s(batch, tokens) <= instance.decode_step_s(batch + 1, tokens)
    assert instance.decode_step_s(batch, tokens) <= instance.decode_step_s(batch, tokens + 1)


def test_faster_gpus_and_more_of_them_are_faster() -> None:
    assert roof("qwen3-235b", "b200", 8).prefill_s(65536) < roof("qwen3-235b", "h200", 8).prefill_s(65536)
    assert (
        roof("qwen3-235b", "h200", 8).prefill_s(65536) < roof("qwen3-235b", "h20", 8).prefill_s(65536) / 2.5
    )
    assert roof("llama-3.1-70b", "h200", 8).decode_step_s(64, 8192) < (
        roof("llama-3.1-70b", "h200", 4).decode_step_s(64, 8192)
    )
    # fp8 weights are half as many bytes.
    assert roof("llama-3.1-70b", "h200", 4, "fp8").decode_step_s(1, 1) < (
        roof("llama-3.1-70b", "h200", 4).decode_step_s(1, 1)
    )


def test_memory_holds_weights_and_requests() -> None:
    instance = roof("llama-3.1-70b", "h200", 4)
    left = 0.9 * 141 * 2**30 - 70.6e9 * 2 / 4
    # 80 layers × 2 of 8 KV heads × 256 numbers of 2 bytes on each rank.
    assert instance.max_batch(8192) == pytest.approx(left / (80 * 2 * 256 * 2 * 8192), rel=0.02)
    with pytest.raises(
        ProfileError, match=r"deepseek-r1 \(fp8 weights\) needs 168 GB on each of 4 h200, which have 136 GB"
    ):
        roof("deepseek-r1", "h200", 4)
    with pytest.raises(ProfileError, match="can't be divided among 3 ranks"):
        roof("llama-3.1-8b", "h200", 3)


def test_gpus_are_known_by_name_in_any_case_and_compute_what_they_can() -> None:
    assert gpu("H200") is gpu("h200")
    assert gpu("h20").source.startswith("NVIDIA H20 96 GB")
    assert gpu("a100").flops_per_s("fp8") == gpu("a100").flops_per_s("bf16") == 312e12
    assert gpu("h200").flops_per_s("fp4") == gpu("h200").flops_per_s("fp8") == 1979e12
    assert gpu("b200").flops_per_s("fp4") == 9000e12
    with pytest.raises(ProfileError, match='there is no GPU "h2000"; did you mean "h200"'):
        gpu("h2000")
    with pytest.raises(ProfileError, match='there is no GPU "abacus"; there are a100, h100'):
        gpu("abacus")


@pytest.mark.parametrize("model", ["kimi-linear", "mimo-v2-flash", "ring-2.5-1t", "qwen3-235b"])
def test_shipped_decode_estimates_are_the_rooflines(model: str) -> None:
    """A change of the roofline changes these files too."""
    decode = load_profile(f"{model}-h200").decode
    assert decode is not None
    assert decode.evidence.band == DECODE_BAND
    assert decode.context_tokens is not None
    for batch, step_s in decode.curve.points:
        assert roof(model, "h200", 8).decode_step_s(batch, decode.context_tokens) == pytest.approx(
            step_s, rel=1e-3
        )
