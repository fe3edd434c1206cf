"""The order of waiting prefills: what moves forward, what moves back, and how far at most."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.scheduling.decision import PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.policy import policy_named
from prfaas.core.scheduling.prefill_order import PrefillWaits, place_in_line_s
from prfaas.core.scheduling.prefill_pool import PrefillPool

from .views import NOW_S, board, decoder, paper_board, prefiller

lengths_s = st.floats(1e-3, 1e3)
fairnesses = st.floats(0, 1)


def waits_of(*pairs: tuple[float, float]) -> PrefillWaits:
    waits = PrefillWaits()
    for wait_s, prefill_s in pairs:
        waits.add(wait_s, prefill_s)
    return waits


def spread_s(waits: PrefillWaits, fairness: float) -> float:
    """As documented."""
    spread = min(1.4 * waits.mean_wait_s, 4.5 * waits.mean_prefill_s)
    return (1 - fairness) / fairness * spread


def test_the_mean_wait_is_weighted_with_work_and_leaves_out_who_did_not_wait() -> None:
    waits = waits_of((10.0, 1.0), (4.0, 3.0), (0.0, 100.0))
    assert waits.mean_prefill_s == pytest.approx(2.0)
    assert waits.mean_wait_s == pytest.approx((10 * 1 + 4 * 3) / (1 + 3))
    assert waits_of((0.0, 1.0)).mean_wait_s == 0.0


def test_what_is_long_ago_is_forgotten() -> None:
    waits = waits_of(*[(100.0, 1.0)] * 600, *[(1.0, 2.0)] * 5000)
    assert waits.mean_wait_s == pytest.approx(1.0, rel=0.05)
    assert waits.mean_prefill_s == pytest.approx(2.0, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 5)), min_size=2, max_size=40))
def test_on_one_server_no_order_changes_the_weighted_mean_wait(jobs: list[tuple[float, float]]) -> None:
    means = []
    for sign in (-1, 0, 1):
        waits = PrefillWaits()
        pool: PrefillPool[int] = PrefillPool(waits=waits)
        # All of them come while the first is at work.
        free_s = 10.0
        for number, (gap_s, work_s) in enumerate(jobs):
            pool.offer(number, sign * work_s, work_s, now_s=gap_s)
        while (job := pool.take("a", now_s=free_s)) is not None:
            free_s += jobs[job][1]
        means.append(waits.mean_wait_s)
    assert means == pytest.approx([means[0]] * 3)


def test_while_nobody_has_waited_the_order_is_that_of_arrival() -> None:
    assert {place_in_line_s(7.0, each, PrefillWaits(), 0.5) for each in (0.1, 1.0, 50.0)} == {7.0}


@given(lengths_s, lengths_s, lengths_s)
def test_with_fairness_1_the_order_is_that_of_arrival(wait_s: float, mean_s: float, prefill_s: float) -> None:
    assert place_in_line_s(7.0, prefill_s, waits_of((wait_s, mean_s)), 1.0) == 7.0


@given(lengths_s, lengths_s, fairnesses)
def test_a_prefill_of_mean_length_keeps_its_place(wait_s: float, mean_s: float, fairness: float) -> None:
    assert place_in_line_s(7.0, mean_s, waits_of((wait_s, mean_s)), fairness) == 7.0


@given(lengths_s, lengths_s, lengths_s, lengths_s, fairnesses)
def test_longer_ones_are_never_before_shorter_ones_that_came_with_them(
    wait_s: float, mean_s: float, one_s: float, other_s: float, fairness: float
) -> None:
    waits = waits_of((wait_s, mean_s))
    shorter, longer = sorted((one_s, other_s))
    assert place_in_line_s(0.0, shorter, waits, fairness) <= place_in_line_s(0.0, longer, waits, fairness)


@given(lengths_s, lengths_s, lengths_s, st.floats(0.05, 1))
def test_how_far_back_a_prefill_moves_has_a_bound_whatever_its_length(
    wait_s: float, mean_s: float, prefill_s: float, fairness: float
) -> None:
    waits = waits_of((wait_s, mean_s))
    spread = spread_s(waits, fairness)
    bound_s = -spread * math.log(-math.expm1(-mean_s / spread)) if spread > 1e-6 else 0.0
    assert place_in_line_s(0.0, prefill_s, waits, fairness) <= bound_s * (1 + 1e-9) + 1e-9
    assert place_in_line_s(0.0, prefill_s, waits, 0.5) <= 7.26 * mean_s


@given(lengths_s, lengths_s, lengths_s, st.floats(0.05, 0.95), st.floats(0.01, 100))
def test_it_does_not_depend_on_the_unit_of_time(
    wait_s: float, mean_s: float, prefill_s: float, fairness: float, scale: float
) -> None:
    place_s = place_in_line_s(0.0, prefill_s, waits_of((wait_s, mean_s)), fairness)
    scaled = waits_of((wait_s * scale, mean_s * scale))
    assert place_in_line_s(0.0, prefill_s * scale, scaled, fairness) == pytest.approx(
        place_s * scale, rel=1e-6, abs=1e-4
    )


def test_with_fairness_0_the_shortest_is_next_however_long_others_wait() -> None:
    waits = waits_of((10.0, 2.0))
    assert place_in_line_s(5000.0, 1.9, waits, 0.0) < place_in_line_s(0.0, 2.0, waits, 0.0)


def test_the_less_fair_the_further_forward_a_short_one_moves() -> None:
    waits = waits_of((10.0, 2.0))
    places = [place_in_line_s(0.0, 0.5, waits, fairness) for fairness in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert places == sorted(places)
    assert places[-1] < 0.0


def test_tilted_orders_by_what_waited_in_the_cluster_that_prefills() -> None:
    view = paper_board(19_400.0)
    view.clusters["far"].waits.add(30.0, 2.5)
    request = RoutingRequest(120_000)
    for fairness in (0.3, 0.5, 1.0):
        decision = policy_named("tilted", fairness=fairness).decide(request, view)
        far = view.clusters["far"]
        assert decision.route is Route.OFFLOAD
        assert decision.urgency_s == place_in_line_s(NOW_S, far.prefill_s(120_000), far.waits, fairness)
    # The same where instances hold prefixes, and every PD cluster is looked at.
    cached = RoutingRequest(121_000, {"east-0": PrefixHit(1000, 1000)})
    decision = policy_named("tilted").decide(cached, view)
    assert decision.urgency_s == place_in_line_s(NOW_S, far.prefill_s(120_000), far.waits, 0.5)
    # Nobody has waited in the PD cluster.
    assert policy_named("tilted").decide(RoutingRequest(5000), view).urgency_s == NOW_S


@pytest.mark.parametrize(
    ("held", "is_bound"),
    [
        ({"one": 8000}, True),
        ({"one": 8000, "two": 7000}, True),
        ({"one": 8000, "two": 7900}, False),
        ({"one": 1100}, True),
        ({"one": 900}, False),
        ({"two": 8000}, True),
        ({}, False),
    ],
)
def test_a_prefill_waits_for_the_instance_that_spares_a_tenth_more_than_any_other(
    held: dict[str, int], is_bound: bool
) -> None:
    view = board(prefiller("one"), prefiller("two"), decoder("decode"), links=[], threshold=1e6)
    request = RoutingRequest(10_000, {name: PrefixHit(tokens, tokens) for name, tokens in held.items()})
    decision = policy_named("tilted").decide(request, view)
    assert decision.prefill == max(held, key=held.__getitem__, default="one")
    assert decision.is_bound is is_bound
