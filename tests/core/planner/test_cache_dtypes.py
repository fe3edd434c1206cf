"""Plans with caches in other dtypes: a dense model needs half the link, a hybrid one's states stay."""

from pathlib import Path

import numpy as np
import pytest

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.planner import Plan, make_plan, problem_of
from prfaas.core.shipped import example_path
from prfaas.lab.report.plan_figures import kv_throughput_curves


def planned(folder: Path, name: str, said: str = "", bandwidth: str = "100 Gbit/s") -> PlannedDeployment:
    text = example_path(name).read_text().replace("model:\n", f"model:\n{said}")
    text = text.replace("bandwidth: 100 Gbit/s", f"bandwidth: {bandwidth}")
    (folder / "plan.yaml").write_text(text)
    return load_planned(folder / "plan.yaml")


def plan(deployment: PlannedDeployment) -> Plan:
    return make_plan(problem_of(deployment))


FP8 = "  kv_cache_dtype: fp8\n"


def test_a_dense_model_in_fp8_plans_as_on_twice_the_link(tmp_path: Path) -> None:
    whole = plan(planned(tmp_path, "dense"))
    half = plan(planned(tmp_path, "dense", FP8, "50 Gbit/s"))
    assert half.optimum.lambda_max == pytest.approx(whole.optimum.lambda_max, rel=1e-9)
    assert half.optimum.threshold_tokens == pytest.approx(whole.optimum.threshold_tokens, rel=1e-9)
    sent = [each.optimum.links[0].egress_bits_per_s for each in (half, whole)]
    assert 2 * sent[0] == pytest.approx(sent[1], rel=1e-9)
    assert half.optimum.binding == whole.optimum.binding


def test_the_states_of_a_hybrid_model_stay(tmp_path: Path) -> None:
    lengths = np.array([1.0, 1000.0, 100_000.0])
    whole, half = (planned(tmp_path, "paper", said) for said in ("", FP8))
    state = whole.kv_model.fixed_bytes
    assert state == half.kv_model.fixed_bytes > 0
    sizes = [problem_of(each).kv_bytes(lengths) - state for each in (half, whole)]
    assert 2 * sizes[0] == pytest.approx(sizes[1])


def test_a_plan_says_which_cache_it_counts(tmp_path: Path) -> None:
    assert planned(tmp_path, "dense").model_title == "minimax-m2.5"
    assert planned(tmp_path, "dense", FP8).model_title == "minimax-m2.5, KVCache in fp8"
    for said in ("  dtype: float32\n", "  dtype: float32\n  kv_cache_dtype: auto\n"):
        assert planned(tmp_path, "dense", said).model_title == "minimax-m2.5, KVCache in float32"


def test_the_plot_has_a_curve_of_the_cache_that_is_counted(tmp_path: Path) -> None:
    whole = kv_throughput_curves(planned(tmp_path, "dense"))
    half = kv_throughput_curves(planned(tmp_path, "dense", FP8))
    added = {each.label: each for each in half}.keys() - {each.label for each in whole}
    assert added == {f"minimax-m2.5, KVCache in fp8, 8 {gpu}" for gpu in ("h200", "h20")}
    published = next(each for each in whole if each.label == "MiniMax-M2.5, 8 h200")
    mine = next(each for each in half if each.label == "minimax-m2.5, KVCache in fp8, 8 h200")
    assert 2 * np.array(mine.bits_per_s) == pytest.approx(np.array(published.bits_per_s))
