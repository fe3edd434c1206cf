"""Policy `tilted`: its formula, its limits, and that queues stay bounded wherever some rule can keep them so."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.scheduling.decision import Route, RoutingRequest
from prfaas.core.scheduling.policy import policy_named

from .views import H20, H200, NOW_S, board, cases, decoder, kv_bytes, link, paper_board, prefiller, simulate

TILTED = policy_named("tilted")
T = 19_400.0


def test_the_formula() -> None:
    view = paper_board(T)
    far, pd, line = view.clusters["far"], view.clusters["pd"], view.links["far", "pd"]
    for number, each in enumerate(far.instances):
        each.busy_until_s = NOW_S + 4 + number
    for each in pd.instances:
        each.busy_until_s = NOW_S + 4.5
    line.drained_s, line.rtt_s = NOW_S + 6, 0.25
    tokens = 30_000
    t_far, t_pd = far.prefill_s(tokens), pd.prefill_s(tokens)
    link_s = kv_bytes(tokens, 0) * 8 / 1e11
    w_far = max(4 + t_far, 6 + link_s) + 0.25 - t_far
    tilt_s = 4.5 - (w_far * t_far + 6 * link_s) / t_pd

    def threshold(beta: float) -> float:
        return policy_named("tilted", beta=beta).decide(RoutingRequest(tokens), view).threshold_tokens

    assert 0 < tilt_s < pd.prefill_s(T)
    assert threshold(1) == pytest.approx(T * (1 - tilt_s / pd.prefill_s(T)))
    assert threshold(0.5) == pytest.approx(T * (1 - 0.5 * tilt_s / pd.prefill_s(T)))
    assert threshold(100) == 0
    for each in pd.instances:
        each.busy_until_s = NOW_S + 0.5
    tilt_s -= 4
    assert -pd.prefill_s(T) < tilt_s < 0
    assert threshold(1) == pytest.approx(T / (1 + tilt_s / pd.prefill_s(T)))
    assert threshold(100) == math.inf


@given(cases(cached=False, max_pd=1))
def test_with_beta_0_it_is_the_plain_threshold(case) -> None:  # type: ignore[no-untyped-def]
    view, request = case
    for each in view.links.values():
        each.congestion = 0.0
    static = policy_named("static_threshold", threshold_tokens=view.threshold_tokens.get("pd0", math.inf))
    try:
        expected = static.decide(request, view)
    except LookupError:
        return
    decision = policy_named("tilted", beta=0).decide(request, view)
    assert decision.route is expected.route
    assert decision.decode == expected.decode


@given(st.integers(2, 131072))
def test_with_everything_idle_it_is_the_threshold(num_tokens: int) -> None:
    decision = TILTED.decide(RoutingRequest(num_tokens), paper_board(T))
    assert (decision.route is Route.OFFLOAD) == (num_tokens > T)


@given(st.integers(20_000, 131_072), st.floats(1e6, 1e9))
def test_an_idle_deployment_says_when_the_link_is_too_slow(num_tokens: int, bits_per_s: float) -> None:
    view = paper_board(T)
    view.links["far", "pd"].capacity_bits_per_s = bits_per_s
    decision = TILTED.decide(RoutingRequest(num_tokens), view)
    assert decision.reason == ("long" if decision.route is Route.OFFLOAD else "slow-link")
    # A queue changes the reason only where it is what keeps the prompt at home.
    view.links["far", "pd"].capacity_bits_per_s = 1e11
    for each in view.clusters["far"].instances:
        each.busy_until_s = NOW_S + 1e6
    assert TILTED.decide(RoutingRequest(num_tokens), view).reason == "busy-prfaas"


@given(st.sampled_from(["paper", "tilted"]), st.floats(0.25, 1.0), st.integers(2, 131_072))
def test_congestion_makes_offloading_dearer_before_anything_waits(
    policy: str, congestion: float, num_tokens: int
) -> None:
    view = paper_board(T)
    before = policy_named(policy).decide(RoutingRequest(num_tokens), view)
    view.links["far", "pd"].congestion = congestion
    decision = policy_named(policy).decide(RoutingRequest(num_tokens), view)
    assert decision.threshold_tokens == pytest.approx((1 + congestion) * before.threshold_tokens)
    if decision.route is not before.route:
        assert (before.route, decision.route) == (Route.OFFLOAD, Route.LOCAL)
        assert decision.reason == "congested-link"
    else:
        assert decision.reason == before.reason


@given(st.integers(2, 131072), st.integers(2, 131072))
def test_either_side_takes_everything_when_the_other_is_far_enough_behind(first: int, second: int) -> None:
    view = paper_board(T)
    for each in view.clusters["pd"].instances:
        each.busy_until_s = NOW_S + 1e6
    assert TILTED.decide(RoutingRequest(first), view).route is Route.OFFLOAD
    for each in view.clusters["far"].instances:
        each.busy_until_s = NOW_S + 1e8
    assert TILTED.decide(RoutingRequest(second), view).route is Route.LOCAL
    for each in view.clusters["far"].instances:
        each.busy_until_s = 0
    view.links["far", "pd"].drained_s = NOW_S + 1e8
    assert TILTED.decide(RoutingRequest(second), view).route is Route.LOCAL


# 2.94 of these per second is what 4 instances of H200 and 3 of H20 could carry at best.
MIX = [2_000, 8_000, 20_000, 40_000, 80_000] * 600


@pytest.mark.parametrize("threshold", [0.0, 1_000.0, 19_400.0, 80_000.0, 300_000.0])
def test_queues_stay_bounded_whatever_the_threshold(threshold: float) -> None:
    outcome = simulate(TILTED, paper_board(threshold), MIX, 2.5, seed=5)
    # What the policy may let one side fall behind is a prefill of the threshold's length.
    assert max(outcome.waits_s) < 30 + H20.seconds(threshold)
    if threshold != 19_400:
        static = policy_named("static_threshold", threshold_tokens=threshold)
        assert max(simulate(static, paper_board(threshold), MIX, 2.5, seed=5).waits_s) > 100


def test_queues_stay_bounded_when_the_link_is_the_bottleneck() -> None:
    narrow = paper_board(T, bits_per_s=6e9)
    outcome = simulate(TILTED, narrow, MIX, 1.5, seed=6)
    assert narrow.links["far", "pd"].drained_s - narrow.now_s < 60
    assert outcome.mean_ttft_s < 15
    static = policy_named("static_threshold", threshold_tokens=T)
    fixed = paper_board(T, bits_per_s=6e9)
    simulate(static, fixed, MIX, 1.5, seed=6)
    assert fixed.links["far", "pd"].drained_s - fixed.now_s > 300


def test_queues_stay_bounded_over_several_clusters_of_different_speed() -> None:
    far = [prefiller(f"f{i}", f"far{i}") for i in (1, 2)]
    home = [prefiller("p1", "pd"), prefiller("p2", "pd"), decoder("d", "pd", decode_slots=9999)]
    links = [link("far1", "pd", 1e11), link("far2", "pd", 3e9)]
    view = board(*far, *home, links=links, threshold=T, prefill_s=H20.seconds)
    view.clusters["far1"].prefill_s = H200.seconds
    outcome = simulate(TILTED, view, MIX, 0.75, seed=7)
    assert max(outcome.waits_s[len(MIX) // 2 :]) < 90


@pytest.mark.parametrize(("waiting", "route"), [(0, Route.LOCAL), (40, Route.OFFLOAD)])
def test_where_all_instances_decode_a_prefill_there_takes_the_time_of_answers(
    waiting: int, route: Route
) -> None:
    """A link that is 30 s behind is avoided, unless answers wait longer than that for a slot."""
    view = paper_board(0.0, n_prefill=0)
    view.links["far", "pd"].drained_s = NOW_S + 30
    view.clusters["pd"].slot_s = 25.0
    for each in view.clusters["pd"].instances:
        each.decoding = each.decode_slots + waiting if waiting else 0
    assert TILTED.decide(RoutingRequest(27_000), view).route is route


def test_a_beta_out_of_range_is_refused() -> None:
    for beta in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="beta"):
            policy_named("tilted", beta=beta)
