import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.planner import PdCluster, PlanError, PlanProblem, PrfaasCluster
from prfaas.core.planner.two_clusters import (
    best_point,
    best_prefill,
    best_rate,
    best_threshold,
    evaluate,
)
from prfaas.core.workload.empirical import Empirical
from prfaas.core.workload.lengths import Uniform, Workload

from .oracle import TwoClusters, lambda_max, theta_pd_d, theta_pd_p, theta_prfaas
from .problems import (
    Quadratic,
    continuous,
    h20_s,
    h200_s,
    kv_bytes_1t,
    paper_problem,
    requests_of,
    two_clusters,
)

Case = tuple[PlanProblem, Callable[[list[tuple[float, float]]], TwoClusters]]


@settings(deadline=None, max_examples=150)
@given(two_clusters(), st.booleans())
@pytest.mark.slow("brute force")
def test_same_optimum_as_plain_loops_over_atoms(case: Case, by_length: bool) -> None:
    problem, make_oracle = case
    oracle = make_oracle(requests_of(problem.workload.lengths, 100))
    point = best_point(problem, "by length" if by_length else "mean length")
    best = oracle.best(by_length=by_length)
    # The planner may be between the thresholds that the loops try.
    assert point.lambda_max >= best.rate * (1 - 2e-3)
    # And the point is what it says: its own threshold and split give its rate in the oracle.
    assert point.threshold_tokens is not None
    rate = oracle.rate(point.threshold_tokens, point.n_prefill, by_length=by_length)
    assert rate == pytest.approx(point.lambda_max, rel=1e-9)


def test_what_is_better_beside_thresholds_that_all_do_the_same_is_found() -> None:
    """No prompt is between 28,446 and 35,888 tokens: a threshold there is good, one that divides the shorter better."""
    lengths = [248, 266, 403, 682, 1603, 1959, 2112, 16_656, 21_651, 28_374, 28_446, 35_888]
    slow = Quadratic(0.25, 4.835724878197023e-4, 9.389875596115216e-9)
    problem = replace(
        paper_problem(
            bits_per_s=10**9.3046875, lengths=Empirical(lengths, [1, 5, 3, 7, 7, 9, 6, 2, 4, 2, 6, 7])
        ),
        prfaas=(PrfaasCluster("east", "h200", 2, 8, Quadratic(0.5, 4.835724878197023e-4)),),
        pd=(PdCluster("home", "h20", 5, 8, slow, 1, 0.014),),
        kv_bytes=Quadratic(123_136_145.0, 66_776.0),
    )
    problem = replace(problem, workload=replace(problem.workload, output_tokens=77))
    least = [evaluate(problem, tokens, 4, "by length").lambda_max for tokens in (29_138.0, 35_012.0)]
    assert least[0] > 1.01 * least[1]
    assert best_point(problem, "by length").lambda_max >= least[0]


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=25)
@given(two_clusters(continuous), st.booleans())
def test_as_good_as_plain_loops_over_a_fine_grid(case: Case, by_length: bool) -> None:
    """The oracle has 200 slices of the lengths: it can't be better, nor worse by more than slices are wide."""
    problem, make_oracle = case
    oracle = make_oracle(requests_of(problem.workload.lengths, 200))
    point = best_point(problem, "by length" if by_length else "mean length")
    best = oracle.best(by_length=by_length).rate
    assert best * (1 - 5e-4) <= point.lambda_max <= best * 1.04


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=40)
@given(two_clusters(continuous), st.floats(0, 1), st.integers(0, 8))
def test_no_other_point_is_better(case: Case, q: float, n_prefill: int) -> None:
    problem, _ = case
    other = evaluate(problem, problem.workload.lengths.quantile(q), min(n_prefill, problem.pd[0].instances))
    assert other.lambda_max <= best_point(problem).lambda_max * (1 + 1e-9)


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=60)
@given(two_clusters(st.one_of(continuous)), st.sampled_from(["bandwidth", "prfaas", "pd", "batch"]))
def test_more_of_anything_never_gives_less(case: Case, what: str) -> None:
    problem, _ = case
    prfaas, pd, link = problem.prfaas[0], problem.pd[0], problem.links[0]
    more = {
        "bandwidth": {"links": (replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s * 1.3),)},
        "prfaas": {"prfaas": (replace(prfaas, instances=prfaas.instances + 1),)},
        "pd": {"pd": (replace(pd, instances=pd.instances + 1),)},
        "batch": {"pd": (replace(pd, decode_batch=pd.decode_batch + 1),)},
    }[what]
    assert best_point(replace(problem, **more)).lambda_max >= best_point(problem).lambda_max * (1 - 1e-7)


@settings(deadline=None, max_examples=60)
@given(two_clusters(continuous))
def test_the_point_follows_the_equations(case: Case) -> None:
    problem, _ = case
    point = best_point(problem, "mean length")
    pd, prfaas, p = problem.pd[0], problem.prfaas[0], point.offloaded_fraction
    decode = theta_pd_d(point.n_decode, pd.decode_batch, pd.decode_step_s, problem.workload.output_tokens)
    assert point.theta_pd_d == pytest.approx(decode)
    if point.mean_long_tokens is not None:
        seconds, size = prfaas.prefill_s(point.mean_long_tokens), problem.kv_bytes(point.mean_long_tokens)
        bandwidth = problem.links[0].bandwidth_bits_per_s
        expected = theta_prfaas(prfaas.instances, seconds, bandwidth, size)
        assert point.theta_prfaas == pytest.approx(expected, rel=1e-6)
        assert point.egress_bits_per_s == pytest.approx(point.lambda_max * p * size * 8, rel=1e-6)
    if point.mean_short_tokens is not None:
        expected = theta_pd_p(point.n_prefill, pd.prefill_s(point.mean_short_tokens))
        assert point.theta_pd_p == pytest.approx(expected, rel=1e-6)
    rate = lambda_max(point.theta_prfaas or 0, point.theta_pd_p or 0, point.theta_pd_d, p)
    assert point.lambda_max == pytest.approx(rate, rel=1e-6)
    assert all(stage.utilisation <= 1 + 1e-9 for stage in point.stages)
    assert point.lambda_max == 0 or point.binding
    assert sum(route.fraction for route in point.routes) == pytest.approx(1)


def test_eq_7_holds_where_prefill_is_the_limit() -> None:
    point = best_point(paper_problem())
    p = point.offloaded_fraction
    assert point.theta_prfaas is not None and point.theta_pd_p is not None
    assert point.theta_prfaas / p == pytest.approx(point.theta_pd_p / (1 - p), rel=1e-6)


def test_eq_7_chooses_the_threshold_where_decode_is_the_limit() -> None:
    """Many thresholds give the same Λ then; the balanced one leaves prefill the most room."""
    point = best_point(paper_problem(output_tokens=1300))
    assert point.lambda_max == point.theta_pd_d
    p = point.offloaded_fraction
    assert point.theta_prfaas is not None and point.theta_pd_p is not None
    assert point.theta_prfaas / p == pytest.approx(point.theta_pd_p / (1 - p), rel=1e-5)


def test_narrow_link_is_the_limit() -> None:
    point = best_point(paper_problem(bits_per_s=5e9))
    assert "east->home link" in point.binding
    assert point.egress_bits_per_s == pytest.approx(5e9, rel=1e-6)
    assert point.threshold_tokens is not None and point.threshold_tokens > 30_000


def test_without_a_link_everything_stays() -> None:
    alone, cut = paper_problem(prfaas=0), replace(paper_problem(), links=())
    point = best_point(cut)
    assert point.lambda_max == best_point(alone).lambda_max
    assert point.offloaded_fraction == 0 and point.theta_prfaas is None and point.threshold_tokens is None


def test_one_pd_instance_can_only_decode() -> None:
    point = best_point(paper_problem(pd=1))
    assert (point.n_prefill, point.n_decode) == (0, 1)
    assert point.threshold_tokens == 0 and point.offloaded_fraction == 1 and point.theta_pd_p is None
    assert best_point(paper_problem(prfaas=0, pd=1)).lambda_max == 0


def test_given_split_and_threshold() -> None:
    point = evaluate(paper_problem(), 19_400, 3, "mean length")
    assert point.theta_prfaas == pytest.approx(1.62, abs=0.005)  # paper/equations.md
    assert best_threshold(paper_problem(), 3) == best_point(paper_problem())
    assert evaluate(paper_problem(), 19_400, 8).lambda_max == 0
    with pytest.raises(PlanError, match="9 prefill instances of 8"):
        evaluate(paper_problem(), 19_400, 9)


def cached(prfaas: float, pd: float, *, back: bool = False, **more: float) -> PlanProblem:
    lengths = Uniform(8_000, 80_000)
    return paper_problem(lengths=lengths, prfaas_ratio=prfaas, pd_ratio=pd, back=back, **more)  # type: ignore[arg-type]


def test_cached_prefixes_are_neither_computed_nor_sent() -> None:
    """With half of every prompt cached everywhere the plan is that of prompts of half the length."""
    half = best_point(cached(0.5, 0.5))
    plain = best_point(paper_problem(lengths=Uniform(4_000, 40_000)))
    assert half.lambda_max == pytest.approx(plain.lambda_max, rel=1e-9)
    assert half.threshold_tokens == pytest.approx(plain.threshold_tokens, rel=1e-6)
    workload = Workload(Uniform(8_000, 80_000), 1024, 0.5)
    by_workload = replace(paper_problem(), workload=workload)
    assert best_point(by_workload).lambda_max == pytest.approx(plain.lambda_max, rel=1e-9)


def test_own_caches_by_hand() -> None:
    """PrfaaS holds nothing, the PD cluster half: PrfaaS computes whole prompts but only what is missing moves."""
    t = 20_000.0
    point = evaluate(cached(0.0, 0.5), t, 4, "mean length")
    long = (2 * t + 80_000) / 2
    p = (80_000 - 2 * t) / 72_000
    assert point.offloaded_fraction == pytest.approx(p)
    # The threshold's edge mixes a few of both.
    assert point.mean_long_tokens == pytest.approx(long / 2, rel=1e-3)
    assert point.theta_prfaas == pytest.approx(4 / h200_s(long), rel=1e-3)
    assert point.theta_pd_p == pytest.approx(4 / h20_s((8_000 + 2 * t) / 4), rel=1e-3)
    egress = point.lambda_max * p * 8 * kv_bytes_1t(long / 2)
    assert point.egress_bits_per_s == pytest.approx(egress, rel=1e-3)


def test_with_bandwidth_to_spare_the_longest_cache_counts() -> None:
    """Section 3.4.3: prefixes cross the link first where that saves computing; where it is narrow they don't."""
    wide = best_point(cached(0.0, 0.6, back=True))
    assert wide.cache_policy == "best"
    own = max(
        evaluate(cached(0.0, 0.6), t, n).lambda_max for t in np.linspace(3_200, 32_000, 40) for n in range(9)
    )
    assert wide.lambda_max > own
    assert best_point(cached(0.0, 0.6, back=True, bits_per_s=2e9)).cache_policy == "own"
    # Without a link back the PD cluster's prefixes can't go to PrfaaS.
    assert best_point(cached(0.0, 0.6)).cache_policy == "own"


def test_the_other_way_prefixes_of_the_far_cluster_help_at_home() -> None:
    point = best_point(cached(0.6, 0.0))
    assert point.cache_policy == "best"
    # Everything crosses the link: what is offloaded, and the prefixes of what is not.
    p, long, short = point.offloaded_fraction, point.mean_long_tokens, point.mean_short_tokens
    assert long is not None and short is not None
    bits = p * 8 * kv_bytes_1t(long / 0.4) + (1 - p) * 8 * kv_bytes_1t(short / 0.4 * 0.6)
    assert point.egress_bits_per_s == pytest.approx(point.lambda_max * bits, rel=1e-6)


def test_trace_with_many_lengths() -> None:
    lengths = Empirical(np.random.default_rng(1).lognormal(9, 1, 20_000).clip(128, 131072).round())
    point = best_point(paper_problem(lengths=lengths))
    assert math.isfinite(point.ttft_p90_s) and point.lambda_max > 4.5


def test_exact_search_is_for_two_clusters() -> None:
    problem = paper_problem()
    two = replace(problem, pd=(problem.pd[0], replace(problem.pd[0], name="other")))
    with pytest.raises(PlanError, match="one PrfaaS cluster and one PD cluster"):
        best_point(two)


@settings(deadline=None, max_examples=60)
@given(two_clusters(), st.integers(0, 8))
def test_single_numbers_are_those_of_whole_points(case: Case, n: int) -> None:
    problem, _ = case
    n_prefill = min(n, problem.pd[0].instances)
    best = best_threshold(problem, n_prefill, "by length")
    assert best_rate(problem, n_prefill) == best.lambda_max
    assert best_prefill(problem) == best_point(problem, "by length").n_prefill
