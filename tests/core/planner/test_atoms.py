"""Lengths that many prompts have: a threshold divides them, as policies carry out."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.planner import PlanProblem, make_plan
from prfaas.core.planner.fixed_roles import prefill_sides
from prfaas.core.planner.plan import best_operation
from prfaas.core.planner.two_clusters import best_point, best_threshold, evaluate
from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.workload.empirical import Empirical, divisible, edge_factor, fixed
from prfaas.core.workload.lengths import Uniform

from .problems import best_of_side, paper_problem, rate_of

# What all instances can do together, by the linear programme, which divides a length as it likes.
FROM_HALVES = {27_000: 3.284, 131_072: 0.806}


@pytest.mark.parametrize("tokens", FROM_HALVES)
def test_prompts_of_one_length_use_both_clusters(tokens: int) -> None:
    point = best_point(paper_problem(lengths=fixed(tokens)))
    assert point.lambda_max == pytest.approx(FROM_HALVES[tokens], rel=2e-3)
    assert 0 < point.offloaded_fraction < 1
    assert point.mean_long_tokens == pytest.approx(tokens) == point.mean_short_tokens


def test_so_do_three_templates() -> None:
    lengths = Empirical([8192, 32768, 65536], [6, 3, 1])
    assert best_point(paper_problem(lengths=lengths)).lambda_max == pytest.approx(3.906, rel=2e-3)


def test_one_length_is_as_good_as_almost_one() -> None:
    one = best_point(paper_problem(lengths=fixed(27_000))).lambda_max
    almost = best_point(paper_problem(lengths=divisible(Uniform(26_990, 27_010)))).lambda_max
    assert one == pytest.approx(almost, rel=1e-3)


def parts_sent(threshold: float, lengths: Sequence[int], count: int = 20_000) -> float:
    """By the rule of policies, the part of `count` requests that is offloaded; lengths come in turn."""
    long = [lengths[k % len(lengths)] > threshold * edge_factor(k) for k in range(count)]
    return sum(long) / count


@given(st.floats(0.97, 1.03), st.lists(st.integers(900, 60_000), min_size=1, max_size=3))
@settings(deadline=None, max_examples=30)
def test_policies_send_the_part_that_is_planned(at: float, lengths: list[int]) -> None:
    threshold = lengths[0] * at
    ((planned,), _) = Empirical(lengths).beyond(np.array([threshold]))
    assert parts_sent(threshold, lengths) == pytest.approx(planned, abs=2e-3)


def test_the_edge_of_the_first_request_is_the_threshold_itself() -> None:
    assert edge_factor(0) == 1
    assert all(0.975 <= edge_factor(k) <= 1.025 for k in range(1000))


laws = st.one_of(
    st.integers(2000, 100_000).map(lambda tokens: [tokens]),
    st.tuples(st.integers(2000, 100_000), st.integers(1, 3000)).map(lambda x: [x[0], x[0] + x[1]]),
    st.tuples(st.integers(2000, 100_000), st.integers(2, 800)).map(lambda x: list(range(x[0], sum(x)))),
    st.lists(st.integers(500, 120_000), min_size=2, max_size=6),
    st.tuples(st.integers(0, 99), st.integers(10_000, 60_000)).map(
        lambda x: np.random.default_rng(x[0]).lognormal(9.5, 1, 400).clip(256, x[1]).astype(int).tolist()
    ),
)


@given(laws, st.integers(1, 7), st.sampled_from([2e9, 8e9, 100e9]))
@settings(deadline=None, max_examples=60)
def test_what_a_window_of_lengths_finds_is_within_a_hundredth_of_the_best(
    lengths: list[int], n_prefill: int, bits_per_s: float
) -> None:
    """Templates, narrow and clipped lengths: the live threshold, by a histogram, against the exact one."""
    window = LengthWindow(600.0, min_count=1)
    for tokens in lengths:
        window.add(tokens, 1.0)
    known, exact = window.lengths(1.0), Empirical(lengths)
    assert known is not None
    seen, true = (problem_of(each, bits_per_s) for each in (known, exact))
    threshold = best_of_side(prefill_sides(seen, {"home": n_prefill}, {"home": 1.0})["home"])
    side = prefill_sides(true, {"home": n_prefill}, {"home": 1.0})["home"]
    best = rate_of(side, best_of_side(side))
    if math.isfinite(threshold):
        assert rate_of(side, threshold) >= 0.99 * best


@given(laws, st.tuples(st.integers(1, 7), st.integers(1, 7)), st.sampled_from([2e9, 8e9, 100e9]))
@settings(deadline=None, max_examples=8)
@pytest.mark.slow("brute force")
def test_so_is_that_of_each_of_several_pd_clusters(
    lengths: list[int], n_prefill: tuple[int, int], bits_per_s: float
) -> None:
    """Two PrfaaS clusters for two PD clusters: each one's threshold against all in the edges of all lengths."""
    window = LengthWindow(600.0, min_count=1)
    for tokens in lengths:
        window.add(tokens, 1.0)
    known, exact = window.lengths(1.0), Empirical(lengths)
    assert known is not None
    roles = dict(zip(("home", "away"), n_prefill, strict=True))
    spread = {"home": 0.6, "away": 0.4}
    seen, true = (
        prefill_sides(of_four(problem_of(each, bits_per_s)), roles, spread) for each in (known, exact)
    )
    tried = [0.0, math.inf, *(tokens * (1 + k / 800) for tokens in set(lengths[:6]) for k in range(-20, 21))]
    for name, side in true.items():
        best = max(rate_of(side, threshold) for threshold in tried)
        assert rate_of(side, best_of_side(side)) >= 0.99 * best
        assert rate_of(side, best_of_side(seen[name])) >= 0.99 * best


def of_four(problem: PlanProblem) -> PlanProblem:
    """The paper's clusters with another PrfaaS cluster of another speed, and another PD cluster of another size."""
    (east,), (home,), (link,) = problem.prfaas, problem.pd, problem.links
    west = replace(east, name="west", instances=2, prefill_s=lambda tokens: 0.7 * east.prefill_s(tokens))
    away = replace(home, name="away", instances=10)
    links = [replace(link, source=s, target=t) for s in ("east", "west") for t in ("home", "away")]
    return replace(
        problem,
        prfaas=(east, west),
        pd=(home, away),
        links=(*links[:3], replace(links[3], bandwidth_bits_per_s=5e9)),
    )


def problem_of(lengths: Empirical, bits_per_s: float) -> PlanProblem:
    return paper_problem(lengths=lengths, bits_per_s=bits_per_s)


def test_given_roles_and_thresholds_divide_too() -> None:
    problem = paper_problem(lengths=fixed(27_000))
    point = best_threshold(problem, 3)
    assert point.threshold_tokens is not None
    assert evaluate(problem, point.threshold_tokens, 3).offloaded_fraction == pytest.approx(
        point.offloaded_fraction
    )
    operation = best_operation(problem, "by length")
    assert {roles.prefill for roles in operation.roles} == {best_point(problem, "by length").n_prefill}


def test_prompts_of_one_length_have_a_plan_and_times() -> None:
    """Where all of them stay, none is lost: what is planned without others' help has a TTFT."""
    plan = make_plan(paper_problem(lengths=fixed(2048)))
    for baseline in (plan.homogeneous, plan.homogeneous_equal_cost):
        assert baseline is not None and baseline.ttft_estimate.mean_s is not None
        assert 0 < baseline.ttft_estimate.mean_s < 60
