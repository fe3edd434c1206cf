from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.planner import OperatingPoint, PdCluster, PlanLink, PlanProblem, PrfaasCluster, make_plan
from prfaas.core.planner.network import best_network, naive_network
from prfaas.core.planner.two_clusters import best_point, evaluate
from prfaas.core.workload.empirical import Empirical
from prfaas.core.workload.lengths import TruncatedLogNormal, Workload

from .oracle import ManyClusters, TwoClusters
from .problems import (
    Quadratic,
    atoms,
    bandwidths,
    continuous,
    curves,
    h20_s,
    h200_s,
    kv_bytes_1t,
    paper_problem,
    sizes,
    two_clusters,
)


def by_length(problem: PlanProblem) -> OperatingPoint:
    return best_point(problem, "by length")


Case = tuple[PlanProblem, Callable[[list[tuple[float, float]]], TwoClusters]]


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=30)
@given(two_clusters(continuous, linear=True))
def test_linear_curves_make_both_exact(case: Case) -> None:
    """No other routing beats a threshold unless the far cluster is better at short
    prompts, which the programme may use and a threshold can't."""
    problem, _ = case
    exact, network = by_length(problem).lambda_max, best_network(problem).point.lambda_max
    assert network >= exact * (1 - 1e-4)
    far, near = problem.prfaas[0].prefill_s, problem.pd[0].prefill_s
    low, high = problem.workload.lengths.low, problem.workload.lengths.high
    ratios = [near(length) / far(length) for length in (low, high)]
    per_byte = [near(length) / problem.kv_bytes(length) for length in (low, high)]
    if ratios[0] <= ratios[1] and per_byte[0] <= per_byte[1]:
        assert network == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(
    "problem",
    [
        paper_problem(),
        paper_problem(bits_per_s=5e9),
        paper_problem(bits_per_s=1e9),
        paper_problem(output_tokens=4096),
        paper_problem(output_tokens=100),
        paper_problem(prfaas=1, pd=12),
        paper_problem(prfaas=9, pd=5),
    ],
)
def test_agrees_with_the_exact_search_on_the_papers_case(problem: PlanProblem) -> None:
    exact, network = by_length(problem), best_network(problem).point
    assert network.lambda_max == pytest.approx(exact.lambda_max, rel=1e-4)
    assert network.roles == exact.roles
    fields = "threshold_tokens theta_prfaas theta_pd_p egress_bits_per_s ttft_mean_s ttft_p90_s"
    for field in fields.split():
        ours, expected = getattr(network, field), getattr(exact, field)
        assert ours == (None if expected is None else pytest.approx(expected, rel=1e-3)), field


def test_a_programme_that_presolve_fails_on() -> None:
    """One cluster, one length: HiGHS answers "Solve error" at first."""
    pd = PdCluster("near", "b", 3, 8, Quadratic(0.5, 1e-4), 1.75, 1.0)
    workload = Workload(Empirical([1078]), 1.0)
    point = best_network(PlanProblem("tiny", (), (pd,), (), workload, Quadratic(0.0, 1000.0))).point
    assert point.lambda_max == pytest.approx(1.75) and point.n_prefill == 2


def test_no_prefill_at_home_leaves_no_crumbs_there() -> None:
    """The far cluster does all; improbable bins must not be left to a prefill pool of no instances."""
    lengths = TruncatedLogNormal(7.0, 0.5, 161, 30429)
    problem = PlanProblem(
        "crumbs",
        (PrfaasCluster("far", "a", 1, 8, Quadratic(0.5, 2.18e-4)),),
        (PdCluster("near", "b", 2, 4, Quadratic(0.5, 2.93e-4), 1, 0.03125),),
        (PlanLink("far", "near", 1e8),),
        Workload(lengths, 25),
        Quadratic(0.0, 1000.0),
    )
    assert best_network(problem).point.lambda_max == pytest.approx(by_length(problem).lambda_max, rel=1e-6)


@st.composite
def many_clusters(draw: st.DrawFn) -> tuple[PlanProblem, ManyClusters]:
    pairs = draw(atoms)
    size = draw(sizes)
    prfaas = [(draw(st.integers(1, 4)), draw(curves())) for _ in range(draw(st.integers(0, 2)))]
    pd = [
        (draw(st.integers(1, 4)), draw(curves()), draw(st.floats(0.2, 4)))
        for _ in range(draw(st.integers(1, 2)))
    ]
    every = [(i, j) for i in range(len(prfaas)) for j in range(len(pd))]
    chosen = draw(st.sets(st.sampled_from(every))) if every else set()
    links = {pair: draw(bandwidths) for pair in sorted(chosen)}
    problem = PlanProblem(
        "random",
        tuple(PrfaasCluster(f"far{i}", "a", n, 8, curve) for i, (n, curve) in enumerate(prfaas)),
        tuple(PdCluster(f"near{j}", "b", n, 8, curve, rate, 1.0) for j, (n, curve, rate) in enumerate(pd)),
        tuple(PlanLink(f"far{i}", f"near{j}", bandwidth) for (i, j), bandwidth in links.items()),
        Workload(Empirical([a for a, _ in pairs], [w for _, w in pairs]), 1.0),
        size,
    )
    total = sum(weight for _, weight in pairs)
    requests = [(float(length), weight / total) for length, weight in pairs]
    return problem, ManyClusters(requests, prfaas, pd, links, size)


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=40)
@given(many_clusters())
def test_same_optimum_as_every_split_of_roles_one_by_one(case: tuple[PlanProblem, ManyClusters]) -> None:
    problem, oracle = case
    best = oracle.best_by_length()
    if best <= 1e-9:
        return
    found = best_network(problem)
    assert found.point.lambda_max == pytest.approx(best, rel=5e-4)
    for stage in found.point.stages:
        assert stage.utilisation <= 1 + 1e-9


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=20)
@given(many_clusters())
def test_what_the_routes_say_fits_the_resources(case: tuple[PlanProblem, ManyClusters]) -> None:
    problem, oracle = case
    if oracle.best_by_length() <= 1e-9:
        return
    point = best_network(problem).point
    assert sum(route.fraction for route in point.routes) == pytest.approx(1, abs=1e-5)
    mean = sum(route.fraction * route.mean_tokens for route in point.routes)
    assert mean == pytest.approx(problem.workload.lengths.mean(), rel=1e-4)
    prefill = {cluster.name: cluster.instances for cluster in problem.prfaas}
    prefill |= {roles.cluster: roles.prefill for roles in point.roles}
    for cluster in problem.clusters:
        # Curves are convex: prompts of their mean length take the least.
        for part in (route for route in point.routes if route.prefill == cluster.name):
            work = point.lambda_max * part.fraction * cluster.prefill_s(part.mean_tokens)
            assert work <= prefill[cluster.name] * (1 + 1e-3)
    for roles, pd in zip(point.roles, problem.pd, strict=True):
        share = sum(route.fraction for route in point.routes if route.decode == pd.name)
        assert point.lambda_max * share <= roles.decode * pd.decode_rate(1.0) * (1 + 1e-3)


def halves(problem: PlanProblem) -> PlanProblem:
    """The PrfaaS cluster as two of half the size with half the bandwidth each."""
    east, link = problem.prfaas[0], problem.links[0]
    parts = tuple(replace(east, name=f"east{i}", instances=east.instances // 2) for i in (0, 1))
    links = tuple(PlanLink(f"east{i}", link.target, link.bandwidth_bits_per_s / 2) for i in (0, 1))
    return replace(problem, prfaas=parts, links=links)


@pytest.mark.parametrize("bits_per_s", [100e9, 5e9])
def test_a_cluster_in_two_halves_does_the_same(bits_per_s: float) -> None:
    whole = paper_problem(bits_per_s=bits_per_s)
    assert best_network(halves(whole)).point.lambda_max == pytest.approx(
        by_length(whole).lambda_max, rel=2e-3
    )


def test_two_copies_do_as_much_as_one_of_twice_the_size() -> None:
    one = paper_problem()
    east, home = one.prfaas[0], one.pd[0]
    two = replace(
        one,
        prfaas=(east, replace(east, name="east2")),
        pd=(home, replace(home, name="home2")),
        links=(*one.links, PlanLink("east2", "home2", 100e9)),
    )
    found = best_network(two)
    twice = by_length(paper_problem(prfaas=8, pd=16, bits_per_s=200e9))
    # More than twice as much as one: with 16 instances 7 can prefill, with 8 only 3 or 4.
    assert twice.lambda_max > 2.05 * by_length(one).lambda_max
    assert found.point.lambda_max == pytest.approx(twice.lambda_max, rel=2e-3)
    assert found.point.n_prefill == twice.n_prefill == 7


def test_uneven_links_are_used_as_far_as_they_go() -> None:
    problem = replace(
        halves(paper_problem()), links=(PlanLink("east0", "home", 1e9), PlanLink("east1", "home", 100e9))
    )
    point = best_network(problem).point
    links = {link.name: link for link in point.links}
    assert links["east0->home"].egress_bits_per_s <= 1e9 * (1 + 1e-6)
    assert links["east0->home"].utilisation == pytest.approx(1, abs=1e-3)
    assert (
        by_length(paper_problem(prfaas=2)).lambda_max
        < point.lambda_max
        < by_length(paper_problem()).lambda_max
    )


def test_prefill_of_one_pd_cluster_for_another() -> None:
    """A PD cluster that can hardly decode prefills for its neighbour over a link between them."""
    helper = PdCluster("helper", "h20", 3, 8, h20_s, 0, 0.025)
    home = PdCluster("home", "h20", 5, 8, h20_s, 20, 0.025)
    problem = replace(
        paper_problem(), prfaas=(), pd=(home, helper), links=(PlanLink("helper", "home", 100e9),)
    )
    point = best_network(problem).point
    assert {(route.prefill, route.decode) for route in point.routes} >= {("helper", "home")}
    assert {roles.cluster: roles.prefill for roles in point.roles}["helper"] == 3
    alone = replace(problem, pd=(home,), links=())
    assert point.lambda_max > 1.5 * by_length(alone).lambda_max


def test_naive_routes_without_regard_to_length() -> None:
    found = naive_network(paper_problem())
    assert found is not None
    assert found[0].lambda_max == pytest.approx(
        evaluate(paper_problem(), 0, 0, "by length").lambda_max, rel=1e-6
    )
    assert naive_network(replace(paper_problem(), links=())) is None


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=10)
@given(st.sampled_from([0, 1]), st.floats(1.1, 10))
def test_more_bandwidth_never_gives_less(index: int, factor: float) -> None:
    problem = replace(halves(paper_problem(bits_per_s=8e9)))
    links = list(problem.links)
    links[index] = replace(links[index], bandwidth_bits_per_s=links[index].bandwidth_bits_per_s * factor)
    before, after = (
        best_network(each).point.lambda_max for each in (problem, replace(problem, links=tuple(links)))
    )
    assert after >= before * (1 - 1e-5)


def test_duals_say_what_a_little_more_buys() -> None:
    """At fixed roles a tenth of a Gbit/s more on the full link gives a tenth of its shadow price."""
    problem = halves(paper_problem(bits_per_s=8e9))
    plan = make_plan(problem, "by length")
    prices = {price.resource: price for price in plan.shadow_prices}
    link = problem.links[0]
    faster = replace(link, bandwidth_bits_per_s=link.bandwidth_bits_per_s + 1e8)
    more = best_network(replace(problem, links=(faster, problem.links[1]))).point
    gain = more.lambda_max - plan.optimum.lambda_max
    assert prices[link.name].unit == "Gbit/s" and prices[link.name].method == "dual"
    assert 0.1 * prices[link.name].gain_req_per_s == pytest.approx(gain, rel=0.05)


def test_a_whole_plan_of_many_clusters() -> None:
    plan = make_plan(halves(paper_problem()))
    assert plan.method == "linear programme"
    assert plan.bound_gap < 1e-3
    assert plan.ratio_to_homogeneous == pytest.approx(1.58, rel=0.02)
    assert plan.naive is not None and plan.naive.point.n_prefill == 0
    assert plan.ttft_estimate.mean_s is not None and plan.ttft_estimate.mean_s > plan.optimum.ttft_mean_s


@pytest.mark.parametrize("curve", [h200_s, h20_s, kv_bytes_1t])
def test_bins_keep_expectations(curve: Callable[..., object]) -> None:
    from prfaas.core.planner.linear_programs import BinnedLengths

    lengths = paper_problem().workload.lengths
    binned = BinnedLengths.of(lengths, lengths.bins(20))
    means = binned.means(curve, 0.7)  # type: ignore[arg-type]
    whole = lengths.expect(lambda x: curve(0.7 * x))  # type: ignore[arg-type, return-value]
    assert (means * binned.bins.weights).sum() == pytest.approx(whole, rel=1e-6)
