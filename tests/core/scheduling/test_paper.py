"""Policy `paper`: the planner's threshold in steady state, and its adjustment when something surges."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.planner.two_clusters import best_threshold
from prfaas.core.scheduling.decision import Route, RoutingRequest
from prfaas.core.scheduling.policy import policy_named
from prfaas.core.scheduling.view import View

from .case_study import draw, problem_of
from .views import NOW_S, board, decoder, link, paper_board, prefiller, simulate, small

PAPER = policy_named("paper")
OPTIMUM = best_threshold(problem_of(), 3)
assert OPTIMUM.threshold_tokens is not None
T = OPTIMUM.threshold_tokens


def wait(view: View, cluster: str, seconds: float) -> None:
    for each in view.clusters[cluster].instances:
        each.busy_until_s = view.now_s + seconds


@given(st.integers(2, 131072), st.one_of(st.just(0.0), st.floats(0, 500)))
def test_with_idle_or_equal_queues_it_is_the_planners_threshold(num_tokens: int, queue_s: float) -> None:
    view = paper_board(T)
    wait(view, "far", queue_s)
    wait(view, "pd", queue_s)
    decision = PAPER.decide(RoutingRequest(num_tokens), view)
    assert (decision.route is Route.OFFLOAD) == (num_tokens > T)
    assert decision.threshold_tokens == T


def test_in_steady_state_it_offloads_what_the_planner_says() -> None:
    lengths = draw(np.random.default_rng(1), 4000).astype(int).tolist()
    outcome = simulate(PAPER, paper_board(T), lengths, 0.6 * OPTIMUM.lambda_max, seed=2)
    assert outcome.offloaded == pytest.approx(OPTIMUM.offloaded_fraction, abs=0.03)


def test_the_formula_of_the_adjustment() -> None:
    view = paper_board(T)
    mark_s = 0.5 * view.clusters["pd"].prefill_s(T)
    request = RoutingRequest(9_000)

    def threshold() -> float:
        return PAPER.decide(request, view).threshold_tokens

    wait(view, "far", mark_s)
    wait(view, "pd", mark_s)
    assert threshold() == T
    wait(view, "far", 3 * mark_s)
    assert threshold() == pytest.approx(3 * T)
    wait(view, "pd", 2 * mark_s)
    assert threshold() == pytest.approx(1.5 * T)
    wait(view, "far", 0)
    assert threshold() == pytest.approx(T / 2)
    line = view.links["far", "pd"]
    line.drained_s = NOW_S + 4 * mark_s
    assert threshold() == pytest.approx(2 * T)
    line.drained_s = NOW_S
    line.egress_bits_per_s = 0.85 * line.capacity_bits_per_s
    assert threshold() == pytest.approx(T / 2)
    line.egress_bits_per_s = 1.7 * line.capacity_bits_per_s
    assert threshold() == pytest.approx(T)


def test_why_is_in_the_reason() -> None:
    view = paper_board(T)
    wait(view, "far", 30)
    assert PAPER.decide(RoutingRequest(int(T) + 500), view).reason == "busy-prfaas"
    wait(view, "far", 0)
    wait(view, "pd", 30)
    decision = PAPER.decide(RoutingRequest(int(T) - 500), view)
    assert (decision.route, decision.reason) == (Route.OFFLOAD, "busy-pd")


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.floats(0, 3))
def test_the_threshold_moves_without_jumps_and_the_right_way(
    far_s: float, near_s: float, queue_s: float, utilisation: float
) -> None:
    def threshold(far: float, near: float, queue: float, used: float) -> float:
        view = paper_board(T)
        wait(view, "far", far)
        wait(view, "pd", near)
        line = view.links["far", "pd"]
        line.drained_s, line.egress_bits_per_s = NOW_S + queue, used * line.capacity_bits_per_s
        return PAPER.decide(RoutingRequest(9_000), view).threshold_tokens

    here = threshold(far_s, near_s, queue_s, utilisation)
    step = 1e-6
    moved = [
        threshold(far_s + step, near_s, queue_s, utilisation),
        threshold(far_s, near_s, queue_s + step, utilisation),
        threshold(far_s, near_s, queue_s, utilisation + step),
    ]
    nearer = threshold(far_s, near_s + step, queue_s, utilisation)
    for each in [*moved, nearer]:
        assert each == pytest.approx(here, rel=1e-4)
    assert all(each >= here * (1 - 1e-12) for each in moved) and nearer <= here * (1 + 1e-12)


def test_a_route_with_a_congested_link_gives_way_to_another() -> None:
    view = board(
        prefiller("r1", "far1"),
        prefiller("r2", "far2"),
        prefiller("p"),
        decoder("d"),
        links=[link("far1", "pd", drained_s=NOW_S + 60), link("far2", "pd")],
    )
    assert PAPER.decide(RoutingRequest(2000), view).prefill == "r2"
    view.links["far2", "pd"].drained_s = NOW_S + 60
    assert PAPER.decide(RoutingRequest(2000), view).route is Route.LOCAL


def test_without_a_threshold_nothing_is_offloaded() -> None:
    view = small()
    view.threshold_tokens.clear()
    decision = PAPER.decide(RoutingRequest(100_000), view)
    assert (decision.route, decision.threshold_tokens) == (Route.LOCAL, math.inf)


@pytest.mark.parametrize("threshold", [3_000.0, 80_000.0])
def test_a_wrong_threshold_does_not_let_queues_grow(threshold: float) -> None:
    rng = random.Random(3)
    lengths = [int(rng.choice([2_000, 8_000, 20_000, 40_000, 80_000])) for _ in range(3000)]
    static = policy_named("static_threshold", threshold_tokens=threshold)
    moved = simulate(PAPER, paper_board(threshold), lengths, 2.7, seed=4)
    fixed = simulate(static, paper_board(threshold), lengths, 2.7, seed=4)
    assert max(moved.waits_s) < 60 and max(fixed.waits_s) > 100


@pytest.mark.parametrize("params", [{"queue_mark": 0}, {"utilisation_mark": 0}, {"queue_mark": math.nan}])
def test_marks_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="mark"):
        policy_named("paper", **params)
