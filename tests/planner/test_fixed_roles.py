"""What a running deployment asks: given roles, the best thresholds, and what given thresholds can do."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas.planner import PlanLink, PlanProblem, best_operation
from prfaas.planner.fixed_roles import best_thresholds, even_spread, prefill_rate, rate_with_roles
from prfaas.planner.search import best_point, best_threshold, evaluate
from prfaas.workload import Empirical, LengthDistribution, TruncatedLogNormal, fixed

from .oracle import ManyClusters
from .problems import PAPER_LENGTHS, Quadratic, continuous, paper_problem, two_clusters
from .test_network import Case, halves, many_clusters

ALL = {"home": 1.0}


def sampled(count: int = 5000) -> Empirical:
    drawn = np.random.default_rng(7).lognormal(9.9, 1.0, count)
    return Empirical(drawn[(drawn > 128) & (drawn < 131072)])


@pytest.mark.parametrize("n_prefill", range(1, 8))
@pytest.mark.parametrize("lengths", [PAPER_LENGTHS, sampled()], ids=["formula", "sample"])
def test_two_clusters_get_the_threshold_of_the_exact_search(
    n_prefill: int, lengths: LengthDistribution
) -> None:
    problem = paper_problem(lengths=lengths)
    exact = best_threshold(problem, n_prefill)
    assert exact.threshold_tokens is not None
    (found,) = best_thresholds(problem, {"home": n_prefill}, ALL).values()
    assert lengths.tail(found) == lengths.tail(exact.threshold_tokens)
    assert found == pytest.approx(exact.threshold_tokens, rel=5e-3)


def test_a_threshold_lies_half_way_between_lengths_that_are_known() -> None:
    lengths = Empirical([1000, 64_000])
    (found,) = best_thresholds(paper_problem(lengths=lengths), {"home": 3}, ALL).values()
    assert found == pytest.approx(8000)


@pytest.mark.parametrize(
    "problem",
    [
        paper_problem(prfaas=0),
        replace(paper_problem(), links=()),
        paper_problem(bits_per_s=1.0, lengths=sampled()),
    ],
    ids=["no PrfaaS", "no link", "a link that carries nothing"],
)
def test_never_offloads_what_cannot_go(problem: PlanProblem) -> None:
    assert best_thresholds(problem, {"home": 3}, ALL) == {"home": math.inf}


def test_without_local_prefill_everything_goes() -> None:
    assert best_thresholds(paper_problem(), {"home": 0}, ALL) == {"home": 0.0}
    assert best_thresholds(halves(paper_problem()), {"home": 0}, ALL) == {"home": 0.0}


@pytest.mark.parametrize("n_prefill", [1, 3, 6])
@pytest.mark.parametrize("bits_per_s", [100e9, 6e9])
def test_the_programme_agrees_with_the_exact_search(n_prefill: int, bits_per_s: float) -> None:
    """A PrfaaS cluster in two halves is the same deployment, but goes through the linear programme."""
    whole = paper_problem(bits_per_s=bits_per_s)
    roles = {"home": n_prefill}
    exact = best_thresholds(whole, roles, ALL)
    found = best_thresholds(halves(whole), roles, ALL)
    assert found["home"] == pytest.approx(exact["home"], rel=1e-3)
    for factor in (0.7, 1.0, 1.4):
        moved = {"home": exact["home"] * factor}
        expected = prefill_rate(whole, roles, moved, ALL)
        assert prefill_rate(halves(whole), roles, moved, ALL) == pytest.approx(expected, rel=1e-3)


@settings(deadline=None, max_examples=30)
@given(two_clusters(continuous), st.data())
def test_no_other_threshold_is_better(case: Case, data: st.DataObject) -> None:
    problem, _ = case
    roles = {"near": data.draw(st.integers(1, problem.pd[0].instances))}
    best = best_thresholds(problem, roles, {"near": 1.0})
    rate = prefill_rate(problem, roles, best, {"near": 1.0})
    lengths = problem.workload.lengths
    other = data.draw(st.floats(0, lengths.high * 1.1))
    assert prefill_rate(problem, roles, {"near": other}, {"near": 1.0}) <= rate * (1 + 1e-6)


def test_decode_is_left_out() -> None:
    """Λ_max is what decode allows here; the prefill side's own limit is higher, and moves with the threshold."""
    problem = paper_problem(output_tokens=3000)
    point = best_threshold(problem, 3)
    best = best_thresholds(problem, {"home": 3}, ALL)
    assert best["home"] == pytest.approx(point.threshold_tokens)
    rate = prefill_rate(problem, {"home": 3}, best, ALL)
    assert rate == pytest.approx(best_threshold(paper_problem(), 3).lambda_max)
    assert rate > point.lambda_max * 1.5
    assert prefill_rate(problem, {"home": 3}, {"home": best["home"] * 1.2}, ALL) < rate * 0.9


def test_rates_with_roles() -> None:
    problem = paper_problem()
    rates = [rate_with_roles(problem, {"home": n}) for n in range(9)]
    assert rates.index(max(rates)) == best_point(problem).n_prefill == 3
    assert rates[8] == 0
    for n, rate in enumerate(rates):
        assert rate_with_roles(halves(problem), {"home": n}) == pytest.approx(rate, rel=2e-3)


def two_homes(bits_per_s: float = 100e9) -> PlanProblem:
    one = paper_problem(prfaas=8)
    home = one.pd[0]
    links = (PlanLink("east", "home", bits_per_s), PlanLink("east", "home2", 100e9))
    return replace(one, pd=(home, replace(home, name="home2")), links=links)


def test_two_equal_pd_clusters_share_what_helps_them() -> None:
    spread = even_spread(two_homes(), {"home": 3, "home2": 3})
    assert spread == {"home": 0.5, "home2": 0.5}
    found = best_thresholds(two_homes(), {"home": 3, "home2": 3}, spread)
    alone = best_thresholds(paper_problem(), {"home": 3}, ALL)["home"]
    # How equal clusters divide the prompts at the edge between them is arbitrary within a bin.
    assert found == {"home": pytest.approx(alone, rel=0.02), "home2": pytest.approx(alone, rel=0.02)}


def test_the_cluster_with_the_narrow_link_keeps_more() -> None:
    roles = {"home": 3, "home2": 3}
    narrow = two_homes(bits_per_s=2e9)
    found = best_thresholds(narrow, roles, {"home": 0.5, "home2": 0.5})
    assert found["home"] > found["home2"] * 1.3
    rate = prefill_rate(narrow, roles, found, {"home": 0.5, "home2": 0.5})
    even = best_thresholds(two_homes(), roles, {"home": 0.5, "home2": 0.5})
    assert rate > prefill_rate(narrow, roles, even, {"home": 0.5, "home2": 0.5}) * 1.05


def test_a_cluster_that_gets_more_requests_keeps_fewer_of_them() -> None:
    roles = {"home": 3, "home2": 3}
    found = best_thresholds(two_homes(), roles, {"home": 0.65, "home2": 0.35})
    assert found["home"] < found["home2"] * 0.8
    nobody = best_thresholds(two_homes(), roles, {"home": 1.0, "home2": 0.0})
    assert 0 < nobody["home"] < nobody["home2"]


@settings(deadline=None, max_examples=25)
@given(many_clusters())
def test_fixed_spread_and_thresholds_never_beat_free_routes(
    case: tuple[PlanProblem, ManyClusters],
) -> None:
    problem, _ = case
    roles = {pd.name: max(pd.instances - 1, 1) for pd in problem.pd}
    spread = even_spread(problem, roles)
    assert sum(spread.values()) == pytest.approx(1)
    found = best_thresholds(problem, roles, spread, "by length")
    rate = prefill_rate(problem, roles, found, spread, "by length")
    free = replace(
        problem,
        pd=tuple(replace(pd, instances=roles[pd.name] + 1, decode_batch=1e9) for pd in problem.pd),
    )
    assert rate <= rate_with_roles(free, roles, "by length") * (1 + 1e-3)


def test_best_operation_is_the_best_of_all_roles() -> None:
    problem = halves(paper_problem())
    best = best_operation(problem)
    rates = [rate_with_roles(problem, {"home": n}) for n in range(9)]
    assert best.lambda_max == pytest.approx(max(rates), rel=1e-3)


def test_thresholds_are_uncached_lengths() -> None:
    """Half of every prompt is cached: the uncached length that divides them is the same as without."""
    wide = TruncatedLogNormal(9.9 + math.log(2), 1.0, 256, 262144)
    cached = paper_problem(lengths=wide, prfaas_ratio=0.5, pd_ratio=0.5)
    plain = paper_problem()
    found = best_thresholds(cached, {"home": 3}, ALL)["home"]
    assert found == pytest.approx(best_thresholds(plain, {"home": 3}, ALL)["home"], rel=1e-3)
    split = best_thresholds(halves(cached), {"home": 3}, ALL)["home"]
    assert split == pytest.approx(found, rel=1e-3)
    rate = prefill_rate(halves(cached), {"home": 3}, {"home": found}, ALL)
    assert rate == pytest.approx(evaluate(cached, found, 3).lambda_max, rel=2e-3)


@settings(deadline=None, max_examples=20)
@given(st.integers(100, 100_000), st.integers(1, 8))
def test_one_length(tokens: int, n_prefill: int) -> None:
    problem = paper_problem(lengths=fixed(tokens))
    assume(n_prefill >= 1)
    (found,) = best_thresholds(problem, {"home": n_prefill}, ALL).values()
    assert found in (0.0, math.inf)


def test_curves_without_a_constant_part() -> None:
    problem = replace(paper_problem(), kv_bytes=Quadratic(0.0, 1e4))
    assert 0 < best_thresholds(problem, {"home": 3}, ALL)["home"] < math.inf
