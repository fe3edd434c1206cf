"""What a running deployment asks: given roles, the best thresholds, and what given thresholds can do."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.workload.laws import mean_above, tail

from prfaas.core.planner import PlanLink, PlanProblem, best_operation
from prfaas.core.planner.fixed_roles import PrefillSide, even_spread, prefill_sides, rate_with_roles
from prfaas.core.planner.two_clusters import best_point, best_threshold, evaluate
from prfaas.core.workload.empirical import Empirical, fixed
from prfaas.core.workload.lengths import LengthDistribution, TruncatedLogNormal

from .oracle import ManyClusters
from .problems import PAPER_LENGTHS, best_of_side, continuous, paper_problem, rate_of, two_clusters
from .test_network import Case, halves, many_clusters

HALF = {"home": 0.5, "home2": 0.5}


def home(problem: PlanProblem, n_prefill: int) -> PrefillSide:
    return prefill_sides(problem, {"home": n_prefill}, {"home": 1.0})["home"]


def thresholds(sides: dict[str, PrefillSide]) -> dict[str, float]:
    return {name: best_of_side(side) for name, side in sides.items()}


def rates(sides: dict[str, PrefillSide]) -> dict[str, float]:
    """By the requests of the whole deployment."""
    return {name: rate_of(side, best_of_side(side)) / side.part for name, side in sides.items()}


def sampled(count: int = 5000) -> Empirical:
    drawn = np.random.default_rng(7).lognormal(9.9, 1.0, count)
    return Empirical(drawn[(drawn > 128) & (drawn < 131072)])


@pytest.mark.parametrize("n_prefill", range(1, 8))
@pytest.mark.parametrize("lengths", [PAPER_LENGTHS, sampled()], ids=["formula", "sample"])
def test_two_clusters_get_the_threshold_of_the_exact_search(
    n_prefill: int, lengths: LengthDistribution
) -> None:
    problem = paper_problem(lengths=lengths)
    exact = best_threshold(problem, n_prefill, "by length")
    assert exact.threshold_tokens is not None
    found = best_of_side(home(problem, n_prefill))
    assert tail(lengths, found) == tail(lengths, exact.threshold_tokens)
    assert found == pytest.approx(exact.threshold_tokens, rel=5e-3)


@pytest.mark.parametrize(
    ("problem", "is_reached"),
    [
        (paper_problem(prfaas=0), False),
        (replace(paper_problem(), links=()), False),
        (replace(paper_problem(), links=(PlanLink("home", "east", 1e9),)), False),
        (paper_problem(bits_per_s=1.0, lengths=sampled()), True),
        (replace(halves(paper_problem()), links=()), False),
    ],
    ids=["no PrfaaS", "no link", "a link the other way", "a link that carries nothing", "two without links"],
)
def test_never_offloads_what_cannot_go(problem: PlanProblem, is_reached: bool) -> None:
    side = home(problem, 3)
    assert best_of_side(side) == math.inf
    assert side.is_reached is is_reached


@pytest.mark.parametrize("problem", [paper_problem(), halves(paper_problem())], ids=["two", "three"])
def test_without_local_prefill_everything_goes(problem: PlanProblem) -> None:
    side = home(problem, 0)
    assert best_of_side(side) == 0.0
    assert rate_of(side, 0.0) == pytest.approx(
        evaluate(paper_problem(), 0.0, 0, "by length").lambda_max, rel=1e-6
    )
    assert rate_of(side, 1000.0) == 0


@pytest.mark.parametrize("n_prefill", [1, 3, 6])
@pytest.mark.parametrize("bits_per_s", [100e9, 6e9])
def test_the_programme_agrees_with_the_exact_search(n_prefill: int, bits_per_s: float) -> None:
    """A PrfaaS cluster in two halves is the same deployment, but goes through the linear programme."""
    whole = home(paper_problem(bits_per_s=bits_per_s), n_prefill)
    split = home(halves(paper_problem(bits_per_s=bits_per_s)), n_prefill)
    assert best_of_side(split) == pytest.approx(best_of_side(whole), rel=1e-5)
    for factor in (0.7, 1.0, 1.4):
        moved = best_of_side(whole) * factor
        assert rate_of(split, moved) == pytest.approx(rate_of(whole, moved), rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(two_clusters(continuous), st.data())
def test_no_other_threshold_is_better(case: Case, data: st.DataObject) -> None:
    problem, _ = case
    n_prefill = data.draw(st.integers(1, problem.pd[0].instances))
    side = prefill_sides(problem, {"near": n_prefill}, {"near": 1.0})["near"]
    other = data.draw(st.floats(0, problem.workload.lengths.high * 1.1))
    assert rate_of(side, other) <= rate_of(side, best_of_side(side)) * (1 + 1e-6)


@pytest.mark.parametrize(
    "problem", [paper_problem(output_tokens=3000), halves(paper_problem(output_tokens=3000))]
)
def test_decode_is_left_out(problem: PlanProblem) -> None:
    """Λ_max is what decode allows here; the prefill side's own limit is higher, and moves with the threshold."""
    point = best_threshold(paper_problem(output_tokens=3000), 3, "by length")
    side = home(problem, 3)
    assert best_of_side(side) == pytest.approx(point.threshold_tokens, rel=1e-5)
    rate = rate_of(side, best_of_side(side))
    assert rate == pytest.approx(best_threshold(paper_problem(), 3, "by length").lambda_max, rel=1e-5)
    assert rate > point.lambda_max * 1.5
    assert rate_of(side, best_of_side(side) * 1.2) < rate * 0.9


def test_rates_with_roles() -> None:
    problem = paper_problem()
    found = [rate_with_roles(problem, {"home": n}) for n in range(9)]
    assert found.index(max(found)) == best_point(problem, "by length").n_prefill == 3
    assert found[8] == 0
    for n, rate in enumerate(found):
        assert rate_with_roles(halves(problem), {"home": n}) == pytest.approx(rate, rel=2e-3)
    assert best_operation(halves(problem)).lambda_max == pytest.approx(max(found), rel=1e-3)


def two_homes(bits_per_s: float = 100e9) -> PlanProblem:
    one = paper_problem(prfaas=8)
    first = one.pd[0]
    links = (PlanLink("east", "home", bits_per_s), PlanLink("east", "home2", 100e9))
    return replace(one, pd=(first, replace(first, name="home2")), links=links)


def test_two_equal_pd_clusters_share_what_helps_them() -> None:
    spread = even_spread(two_homes(), {"home": 3, "home2": 3})
    assert spread == HALF
    sides = prefill_sides(two_homes(), {"home": 3, "home2": 3}, spread)
    alone = home(paper_problem(), 3)
    expected = pytest.approx(best_of_side(alone), rel=1e-5)
    assert thresholds(sides) == {"home": expected, "home2": expected}
    # Twice as much as one with half of everything.
    twice = pytest.approx(2 * rate_of(alone, best_of_side(alone)), rel=1e-5)
    assert rates(sides) == {"home": twice, "home2": twice}


def test_where_one_cluster_is_the_limit_the_other_is_balanced_all_the_same() -> None:
    """Home has a narrow link; the other one gets more than half of the PrfaaS cluster's 8 instances."""
    sides = prefill_sides(two_homes(bits_per_s=4e9), {"home": 3, "home2": 3}, HALF)
    found, reached = thresholds(sides), rates(sides)
    even = best_of_side(home(paper_problem(), 3))
    assert found["home"] > 1.5 * even
    assert 0.75 * even < found["home2"] < even
    assert reached["home"] < reached["home2"]
    (remote,) = (cluster.prefill_s for cluster in sides["home2"].problem.prfaas)
    mean = mean_above(PAPER_LENGTHS, found["home2"])
    assert mean is not None
    granted = two_homes().prfaas[0].prefill_s(np.array([mean])) / remote(np.array([mean]))
    assert 4 <= granted[0] <= 8


def test_what_the_limit_leaves_free_is_used_even_if_nobody_needs_it() -> None:
    """Home can hardly do anything; home2's own instances would do for what Λ that leaves, but it is balanced."""
    one = paper_problem(prfaas=2)
    first = one.pd[0]
    links = (PlanLink("east", "home", 4e8), PlanLink("east", "home2", 100e9))
    problem = replace(one, pd=(first, replace(first, name="home2")), links=links)
    sides = prefill_sides(problem, {"home": 1, "home2": 7}, HALF)
    assert best_of_side(sides["home2"]) < 100_000
    reached = rates(sides)
    assert reached["home2"] > 5 * reached["home"]
    assert reached["home2"] * 0.5 > 1.2 * rate_of(sides["home2"], math.inf)


def test_a_cluster_that_gets_more_requests_keeps_fewer_of_them() -> None:
    roles = {"home": 3, "home2": 3}
    sides = prefill_sides(two_homes(), roles, {"home": 0.65, "home2": 0.35})
    found, reached = thresholds(sides), rates(sides)
    assert found["home"] < found["home2"] * 0.8
    assert reached["home"] == pytest.approx(reached["home2"], rel=0.02)
    nobody = thresholds(prefill_sides(two_homes(), roles, {"home": 1.0, "home2": 0.0}))
    assert 0 < nobody["home"] < nobody["home2"]


def test_one_cluster_without_prefill_instances_leaves_the_other_its_own() -> None:
    sides = prefill_sides(two_homes(), {"home": 0, "home2": 5}, HALF)
    found = thresholds(sides)
    assert found["home"] == 0 and 25_000 < found["home2"] < 35_000
    # Nothing prefills for home at all: the other one goes on.
    cut = replace(two_homes(), links=two_homes().links[1:])
    found = thresholds(prefill_sides(cut, {"home": 0, "home2": 5}, HALF))
    assert found["home"] == math.inf and 0 < found["home2"] < math.inf


def test_a_pd_cluster_that_prefills_for_another() -> None:
    one = paper_problem(prfaas=0)
    first = one.pd[0]
    problem = replace(
        one, pd=(first, replace(first, name="helper")), links=(PlanLink("helper", "home", 100e9),)
    )
    sides = prefill_sides(problem, {"home": 1, "helper": 7}, {"home": 0.8, "helper": 0.2})
    assert sides["home"].is_reached and not sides["helper"].is_reached
    assert 0 < best_of_side(sides["home"]) < math.inf
    assert best_of_side(sides["helper"]) == math.inf
    reached = rates(sides)
    assert reached["home"] == pytest.approx(reached["helper"], rel=0.05)
    alone = home(replace(one, pd=(first,)), 1)
    assert reached["home"] * 0.8 > 4 * rate_of(alone, math.inf)


@settings(deadline=None, max_examples=25)
@given(many_clusters())
def test_sides_never_do_more_than_free_routes_with_all_instances(
    case: tuple[PlanProblem, ManyClusters],
) -> None:
    problem, _ = case
    roles = {pd.name: max(pd.instances - 1, 1) for pd in problem.pd}
    spread = even_spread(problem, roles)
    assert sum(spread.values()) == pytest.approx(1)
    free = replace(
        problem,
        pd=tuple(replace(pd, instances=roles[pd.name] + 1, decode_batch=1e9) for pd in problem.pd),
    )
    sides = prefill_sides(problem, roles, spread).values()
    least = min(side.best_beside(None, 0.0)[1] / side.part for side in sides)
    assert least <= rate_with_roles(free, roles) * (1 + 1e-3)


@pytest.mark.parametrize("split", [False, True])
def test_thresholds_are_uncached_lengths(split: bool) -> None:
    """Half of every prompt is cached: the uncached length that divides them is the same as without."""
    wide = TruncatedLogNormal(9.9 + math.log(2), 1.0, 256, 262144)
    cached = paper_problem(lengths=wide, prfaas_ratio=0.5, pd_ratio=0.5)
    side = home(halves(cached) if split else cached, 3)
    expected = best_of_side(home(paper_problem(), 3))
    assert best_of_side(side) == pytest.approx(expected, rel=1e-3)


@settings(deadline=None, max_examples=20)
@given(st.integers(100, 100_000), st.integers(1, 8))
def test_one_length(tokens: int, n_prefill: int) -> None:
    side = home(paper_problem(lengths=fixed(tokens)), n_prefill)
    assert rate_of(side, best_of_side(side)) >= max(rate_of(side, 0.0), rate_of(side, math.inf))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 7), st.floats(1e9, 1e11), st.floats(24_000, 30_000), st.floats(0, 0.1))
def test_a_search_that_ends_early_overlooks_nothing(
    n_prefill: int, bits_per_s: float, now: float, margin: float
) -> None:
    """Where the present threshold is given back, none of a fine grid carries more by the margin."""
    # Most prompts have one length: what is best lies within the threshold's edge there, between candidates.
    drawn = sampled(300)
    lengths = Empirical([*drawn.lengths, 27_000.0], [*drawn.probabilities, 2.0])
    side = home(paper_problem(lengths=lengths, bits_per_s=bits_per_s), n_prefill)
    best, after, before = side.best_beside(now, margin)
    assert before == pytest.approx(rate_of(side, now), rel=1e-9)
    assert after == pytest.approx(rate_of(side, best), rel=1e-9)
    highest = max(rate_of(side, tokens) for tokens in np.linspace(26_000, 28_000, 40))
    assert highest <= (before * (1 + margin) if best == now else after) * (1 + 2e-3)
