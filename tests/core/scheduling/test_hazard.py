"""What a kill takes back of a streamed prefill, and what routing makes of that."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.hazard import at_risk_s, expected_loss_s, streamed_s
from prfaas.core.scheduling.policy import make_policy
from prfaas.core.scheduling.view import View

from .views import NOW_S, board, decoder, linear_s, link, prefiller

LONG = RoutingRequest(40_000)
PREFILL_S = linear_s(40_000)
KILLS_PER_S = 20 / 3600


def test_the_loss_is_that_of_work_that_goes_on_from_its_pieces() -> None:
    """Up for exponential times; what is done of a piece is lost, and the pieces before it are kept."""
    rng, piece_s, pieces, kills_per_s = np.random.default_rng(1), 12.0, 5, 0.02
    taken_s = []
    for _ in range(20_000):
        total_s = 0.0
        for _ in range(pieces):
            while (up_s := rng.exponential(1 / kills_per_s)) < piece_s:
                total_s += up_s
            total_s += piece_s
        taken_s.append(total_s)
    loss_s = expected_loss_s(pieces * piece_s, kills_per_s, piece_s)
    assert np.mean(taken_s) - pieces * piece_s == pytest.approx(loss_s, rel=0.03)


@given(st.floats(0.01, 300), st.floats(0, 300), st.floats(0, 300), st.floats(1e-6, 0.02))
def test_who_keeps_more_loses_less(work_s: float, less_s: float, more_s: float, kills_per_s: float) -> None:
    less, more, all_of_it = (
        expected_loss_s(work_s, kills_per_s, risk_s) for risk_s in (less_s, less_s + more_s, math.inf)
    )
    assert -1e-9 <= less <= more + 1e-9 and more <= all_of_it + 1e-9
    assert expected_loss_s(work_s, kills_per_s, work_s) == all_of_it


def lost_s(at_s: float, prefill_s: float, wait_s: float, link_s: float) -> float:
    """What a kill after so long takes back of full attention, in seconds of the same way: a fluid of the stream."""
    come = min(at_s / prefill_s, max(at_s - wait_s, 0.0) / link_s)
    return at_s - come * max(prefill_s, wait_s + link_s)


@given(st.floats(0.5, 60), st.floats(0, 60), st.floats(0.5, 60))
def test_what_is_at_risk_of_full_attention_is_twice_what_is_lost_on_average(
    prefill_s: float, wait_s: float, link_s: float
) -> None:
    work_s = max(prefill_s, wait_s + link_s)
    moments_s = (np.arange(4000) + 0.5) / 4000 * work_s
    mean_s = float(np.mean([lost_s(at_s, prefill_s, wait_s, link_s) for at_s in moments_s]))
    assert at_risk_s(prefill_s, wait_s, link_s, KILLS_PER_S, 0.0) == pytest.approx(
        2 * mean_s, abs=1e-3 * work_s
    )


@pytest.mark.parametrize("checkpoint_s", [0.02, 0.15])
def test_between_two_checkpoints_half_an_interval_is_lost_on_average(checkpoint_s: float) -> None:
    interval_s = math.sqrt(2 * checkpoint_s / KILLS_PER_S)
    assert at_risk_s(60.0, 0.0, 20.0, KILLS_PER_S, checkpoint_s) == pytest.approx(interval_s)
    # A queue of 10 s on a link that is as fast as the prefill: its bytes are late by 10 s until the end.
    assert at_risk_s(60.0, 10.0, 60.0, KILLS_PER_S, checkpoint_s) == pytest.approx(interval_s + 10.0)


def test_where_no_checkpoint_pays_all_is_at_risk() -> None:
    """As `checkpoint_every_tokens` says: 7.2 s apart in a prefill of less than 10.8 s."""
    assert at_risk_s(10.7, 0.0, 0.0, KILLS_PER_S, 0.144) == math.inf
    assert at_risk_s(10.9, 0.0, 0.0, KILLS_PER_S, 0.144) == pytest.approx(7.2)
    assert at_risk_s(1e9, 0.0, 0.0, KILLS_PER_S, math.inf) == math.inf


@given(st.floats(0, 60), st.floats(0, 60), st.floats(0, 90), st.floats(0, 60), st.floats(0, 1))
def test_kept_work_never_makes_a_way_longer(
    start_s: float, prefill_s: float, link_wait_s: float, link_s: float, checkpoint_s: float
) -> None:
    way = (start_s, prefill_s, link_wait_s, link_s, 0.05)
    without, kept, lost = (
        streamed_s(*way),
        streamed_s(*way, KILLS_PER_S, checkpoint_s),
        streamed_s(*way, KILLS_PER_S, math.inf),
    )
    assert without - 1e-9 <= kept <= lost + 1e-9


@given(st.floats(0, 60), st.floats(0, 90), st.floats(0, 60), st.floats(0, 60))
def test_waiting_is_no_work_at_risk(
    start_s: float, link_wait_s: float, prefill_s: float, link_s: float
) -> None:
    """Nothing is lost of a prefill that has not begun, nor of a link's queue that is over by then."""
    assume(link_wait_s <= start_s)
    found_s = streamed_s(start_s, prefill_s, link_wait_s, link_s, 0.0, KILLS_PER_S, math.inf)
    assert found_s == pytest.approx(
        start_s + streamed_s(0.0, prefill_s, 0.0, link_s, 0.0, KILLS_PER_S, math.inf)
    )
    kept_s = streamed_s(start_s, prefill_s, link_wait_s, link_s, 0.0, KILLS_PER_S, 0.0)
    assert kept_s == pytest.approx(start_s + max(prefill_s, link_s))


def spot(
    *,
    checkpoint_bytes: int = 0,
    keeps: bool = True,
    hybrid: bool = False,
    drained_s: float = 0.0,
    queue_s: float = 10.0,
) -> View:
    """A PrfaaS instance that may be taken away once a minute, and a PD instance with a queue."""
    view = board(
        prefiller("remote", "far"),
        prefiller("prefill", busy_until_s=NOW_S + queue_s),
        decoder("decode"),
        links=[link("far", "pd", 1e11, drained_s=NOW_S + drained_s), link("pd", "far")],
        hybrid=hybrid,
    )
    view.clusters["far"].kills_per_s = 1 / 60
    view.clusters["far"].prefill_s = lambda tokens: 10 * linear_s(tokens)
    view.clusters["pd"].prefill_s = lambda tokens: 10 * linear_s(tokens)
    view.kv = replace(view.kv, checkpoint_bytes=checkpoint_bytes)
    view.keeps_transfers = keeps
    return view


@pytest.mark.parametrize("policy", ["tilted", "least_ttft"])
def test_what_is_kept_is_not_counted_as_lost(policy: str) -> None:
    decide = make_policy(policy, {}).decide

    def predicted_s(view: View, *, early: bool = False) -> float:
        far = decide(structs.replace(LONG, first_from_prefill=early), view)
        assert far.prefill == "remote"
        return far.predicted_ttft_s

    work_s = 10 * PREFILL_S
    all_s = expected_loss_s(work_s, 1 / 60)
    assert 1.0 < all_s < 20.0
    plain_s = predicted_s(spot(queue_s=60.0))
    assert predicted_s(spot(queue_s=60.0, keeps=False)) - plain_s == pytest.approx(all_s)
    # Hybrid without a word on checkpoints: nobody could go on.
    assert predicted_s(spot(queue_s=60.0, hybrid=True)) - plain_s == pytest.approx(all_s)
    # A token more than the decode request has.
    assert predicted_s(spot(queue_s=60.0), early=True) - plain_s == pytest.approx(all_s)
    # 0.08 s on the link: 3.1 s apart.
    apart_s = math.sqrt(2 * 0.08 * 60)
    checkpoints = spot(queue_s=60.0, checkpoint_bytes=10**9, hybrid=True)
    assert predicted_s(checkpoints) - plain_s == pytest.approx(expected_loss_s(work_s, 1 / 60, apart_s))


def test_the_prefill_goes_where_what_it_loses_is_kept() -> None:
    """What a kill would cost is more than the other queue, unless what has come is kept."""
    for policy in ("tilted", "least_ttft"):
        decide = make_policy(policy, {}).decide
        for keeps, expected in ((True, "remote"), (False, "prefill")):
            view = spot(keeps=keeps)
            view.clusters["far"].kills_per_s = 0.2
            assert decide(LONG, view).prefill == expected, policy
