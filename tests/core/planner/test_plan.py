"""Verdicts, baselines, cost, sizes: what a plan says beside its optimum."""

import math
from dataclasses import replace

import numpy as np
import pytest

from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.planner import KvSize, PdCluster, PlanError, PlanLink, egress, make_plan
from prfaas.core.planner.equations import kv_throughput_bits_per_s
from prfaas.core.workload.empirical import fixed
from prfaas.core.workload.lengths import TruncatedLogNormal, Uniform

from .problems import h20_s, h200_s, kv_bytes_1t, paper_problem


def test_network_bound_verdict_names_link_and_need() -> None:
    plan = make_plan(paper_problem(bits_per_s=5e9))
    assert plan.is_network_bound
    assert plan.verdict.startswith("Network-bound: link east->home has 5 Gbit/s, and this model")
    (link,) = plan.optimum.links
    assert link.needed_bits_per_s == pytest.approx(12.14e9, rel=1e-3)
    assert plan.lambda_max_unlimited_links == pytest.approx(3.1995, rel=1e-4)
    gains = {price.resource: price.gain_req_per_s for price in plan.shadow_prices}
    assert gains["east->home"] > 0.05 and gains["east"] == pytest.approx(0, abs=1e-6)


def test_decode_bound_verdict() -> None:
    plan = make_plan(paper_problem(output_tokens=1300))
    assert plan.verdict.startswith("Decode-bound:") and plan.optimum.binding == ("home decode",)


def test_verdict_without_prfaas_has_no_comparison() -> None:
    plan = make_plan(paper_problem(prfaas=0))
    assert "Worth" not in plan.verdict and plan.naive is None
    assert plan.ratio_to_homogeneous == pytest.approx(1)


def test_impossible_verdict() -> None:
    plan = make_plan(paper_problem(prfaas=0, pd=1))
    assert plan.optimum.lambda_max == 0 and plan.verdict.startswith("Impossible:")
    assert plan.cost is None and plan.ratio_to_homogeneous is None
    assert plan.to_json()["optimum"]["lambda_max"] == 0


def test_costly_prfaas_is_not_worth_it() -> None:
    plan = make_plan(replace(paper_problem(), prices={"h200": 9.0, "h20": 1.0}))
    assert plan.equal_cost_ratio is not None and plan.equal_cost_ratio < 0.6
    assert "Not worth it" in plan.verdict


def test_without_prices_nothing_is_said_about_cost() -> None:
    plan = make_plan(replace(paper_problem(), prices={}))
    assert (
        plan.cost
        is plan.equal_cost_ratio
        is plan.homogeneous_equal_cost
        is plan.homogeneous.cost_ratio
        is None
    )
    assert "cost" not in plan.verdict and "Worth it: 1.58 times" in plan.verdict


def test_homogeneous_takes_the_better_kind() -> None:
    problem = paper_problem()
    slow = PdCluster("slow", "old", 2, 8, lambda x: 3 * h20_s(x), 5, 0.025)
    problem = replace(problem, pd=(slow, *problem.pd), links=(PlanLink("east", "home", 1e11),))
    problem = replace(problem, prices={"h200": 2.0, "h20": 1.0, "old": 0.1})
    baseline = make_plan(problem).homogeneous
    assert (baseline.hardware, baseline.instances) == ("h20", 14)


def test_idle_gpus_of_a_baseline() -> None:
    """GPUs that don't make up an instance are not counted as throughput."""
    problem = paper_problem(prfaas=1)
    problem = replace(problem, prfaas=(replace(problem.prfaas[0], gpus_per_instance=7),))
    assert make_plan(problem).homogeneous.instances == 8


def test_plans_are_by_length_and_name_the_papers_number() -> None:
    plan = make_plan(paper_problem())
    assert plan.service_model == "by length"
    assert plan.optimum.lambda_max == pytest.approx(3.1995, rel=1e-4)
    assert plan.lambda_max_at_mean_length == pytest.approx(3.2589, rel=1e-4)
    assert plan.homogeneous_at_mean_length == pytest.approx(2.11, rel=1e-3)


def test_no_column_is_overloaded_by_a_part_of_its_own_throughput() -> None:
    """Very unlike lengths: T(E[L]) would have columns whose queues grow at 70 % of what they are said to carry."""
    plan = make_plan(paper_problem(lengths=TruncatedLogNormal(9.3, 1.6, 128, 131072)))
    for baseline in (plan.homogeneous, plan.fleet, plan.naive):
        assert baseline is not None and baseline.ttft_estimate is not None
        assert baseline.ttft_estimate.mean_s is not None
    assert plan.homogeneous_at_mean_length > 1.05 * plan.homogeneous.point.lambda_max


def test_uniform_lengths_by_hand() -> None:
    """All prompts alike but for a hair, decode idle: 12 H20 as 11 + 1."""
    plan = make_plan(paper_problem(prfaas=0, pd=12, lengths=Uniform(9_999, 10_001), output_tokens=1))
    assert plan.optimum.n_prefill == 11
    assert plan.optimum.lambda_max == pytest.approx(11 / h20_s(10_000), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "slope", "constant", "seconds", "tbits"),
    [
        # Table 3 at 32K: T = S · 8 / Φ; the egress of 512 GPUs is in section 2.3.
        ("minimax-m2.5", 253_952, 0, 253_952 * 32768 * 8 / 59.93e9, 3.8),
        ("qwen3-235b", 192_512, 0, 192_512 * 32768 * 8 / 33.35e9, 2.1),
        ("ring-2.5-1t", 11_520, 280 * 2**20, (11_520 * 32768 + 280 * 2**20) * 8 / 2.59e9, 0.17),
    ],
)
def test_egress_of_512_gpus(model: str, slope: int, constant: int, seconds: float, tbits: float) -> None:
    need = egress(
        512, 8, lambda x: constant + slope * x, lambda x: np.full(np.shape(x), seconds), fixed(32768)
    )
    assert need.instances == 64 and need.mean_tokens == 32768
    assert need.at_mean_bits_per_s == need.by_length_bits_per_s == pytest.approx(tbits * 1e12, rel=0.03), (
        model
    )


def test_egress_over_a_distribution_is_the_ratio_of_means() -> None:
    lengths = Uniform(1_000, 100_000)
    need = egress(32, 8, kv_bytes_1t, h200_s, lengths)
    samples = np.linspace(1_000, 100_000, 200_001)
    expected = 4 * 8 * kv_bytes_1t(samples).mean() / h200_s(samples).mean()
    assert need.by_length_bits_per_s == pytest.approx(expected, rel=1e-4)
    at_mean = 4 * kv_throughput_bits_per_s(kv_bytes_1t(50_500.0), h200_s(50_500.0))
    assert need.at_mean_bits_per_s == pytest.approx(at_mean)
    with pytest.raises(PlanError, match="7 GPUs are less than one instance of 8"):
        egress(7, 8, kv_bytes_1t, h200_s, lengths)


def test_sizes_between_whole_tokens() -> None:
    model = KvModel(
        "any", (FullAttention(2, 2, 64, 64), SlidingWindow(3, 1, 64, 64, 128), LinearState(4, 100, 900))
    )
    size = KvSize(model)
    whole = np.array([1, 2, 126, 127, 128, 129, 130, 5_000, 131_072])
    assert size(whole.astype(float)).tolist() == [model.kv_bytes(int(tokens)) for tokens in whole]
    for tokens in (1.5, 127.5, 128.5, 9_999.25):
        low, high = model.kv_bytes(math.floor(tokens)), model.kv_bytes(math.ceil(tokens))
        part = tokens - math.floor(tokens)
        assert size(np.array([tokens]))[0] == pytest.approx(low + part * (high - low))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pd": ()}, "nothing decodes"),
        ({"links": (PlanLink("east", "nowhere", 1e9),)}, 'names cluster "nowhere"'),
        ({"links": (PlanLink("east", "home", 0.0),)}, "a bandwidth above 0"),
        ({"links": (PlanLink("east", "home", 1e9), PlanLink("east", "home", 1e9))}, "two links join"),
        ({"load": 1.0}, "must be in (0, 1)"),
        ({"prfaas": (replace(paper_problem().prfaas[0], name="home"),)}, "the same name"),
        ({"prfaas": (replace(paper_problem().prfaas[0], instances=0),)}, "at least one instance"),
        ({"prfaas": (replace(paper_problem().prfaas[0], prefix_hit_ratio=1.0),)}, "in [0, 1), not 1.0"),
        ({"pd": (replace(paper_problem().pd[0], decode_step_s=0.0),)}, "a step above 0 s"),
    ],
)
def test_impossible_problems_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError) as error:
        replace(paper_problem(), **changes)
    assert words in str(error.value)
