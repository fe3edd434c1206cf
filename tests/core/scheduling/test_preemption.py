"""Instances that are taken away: what they may still begin, and what kills cost on average."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.scheduling.decision import RoutingRequest
from prfaas.core.scheduling.hazard import expected_loss_s
from prfaas.core.scheduling.options import options
from prfaas.core.scheduling.policy import POLICIES, make_policy
from prfaas.core.scheduling.preemption import ends_in_s, goes_on_at_decode, with_time_left

from .views import NOW_S, board, decoder, kv_bytes, linear_s, link, prefiller

LONG = RoutingRequest(40_000)
PREFILL_S = linear_s(40_000)


@given(st.floats(0, 300), st.floats(0, 300), st.floats(0, 0.02))
def test_longer_work_loses_more(short_s: float, more_s: float, kills_per_s: float) -> None:
    short, long = (expected_loss_s(work_s, kills_per_s) for work_s in (short_s, short_s + more_s))
    assert short + 1e-9 >= 0.0 and short <= long + 1e-9
    assert math.isfinite(expected_loss_s(1e9, kills_per_s))


def test_the_loss_is_that_of_work_that_begins_again() -> None:
    """Up for exponential times, until one is as long as the work."""
    rng, work_s, kills_per_s = np.random.default_rng(1), 60.0, 20 / 3600
    taken_s = []
    for _ in range(40_000):
        total_s = 0.0
        while (up_s := rng.exponential(1 / kills_per_s)) < work_s:
            total_s += up_s
        taken_s.append(total_s + work_s)
    assert np.mean(taken_s) - work_s == pytest.approx(expected_loss_s(work_s, kills_per_s), rel=0.03)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("local_only", "round_robin")])
@pytest.mark.parametrize(("more_s", "expected"), [(0.1, "remote"), (-0.1, "other")])
def test_an_instance_with_notice_gets_what_has_left_it_in_time(
    policy: str, more_s: float, expected: str
) -> None:
    view = board(
        prefiller("remote", "far"),
        prefiller("other", "far", busy_until_s=NOW_S + 1),
        prefiller("prefill", busy_until_s=NOW_S + 1000),
        decoder("decode"),
    )
    parameters = {"threshold_tokens": 1000} if policy == "static_threshold" else {}
    decide = make_policy(policy, parameters).decide
    assert decide(LONG, view).prefill == "remote"
    far = view.clusters["far"]
    view.leaves_s["remote"] = NOW_S + ends_in_s(LONG, view, far, far.instances[0]) + more_s
    assert decide(LONG, view).prefill == expected
    assert options(LONG, view)[1].prefill.name == expected
    # A short one has time in any case.
    assert with_time_left(RoutingRequest(2000), view) is view


def test_the_end_is_when_the_last_byte_has_left() -> None:
    view = board(
        prefiller("remote", "far", busy_until_s=NOW_S + 3),
        prefiller("prefill"),
        decoder("decode"),
        links=[link("far", "pd", 1e8, rtt_s=0.5, drained_s=NOW_S + 2), link("pd", "far")],
    )
    far = view.clusters["far"]
    sent_s = 8 * kv_bytes(40_000, 0) / 1e8
    assert sent_s > PREFILL_S
    assert ends_in_s(LONG, view, far, far.instances[0]) == pytest.approx(3 + sent_s + 0.5)
    view.links["far", "pd"].capacity_bits_per_s = 1e12
    assert ends_in_s(LONG, view, far, far.instances[0]) == pytest.approx(3 + PREFILL_S + 0.5)


@pytest.mark.parametrize("policy", ["tilted", "least_ttft"])
def test_kills_make_long_prefills_stay_where_they_are_safe(policy: str) -> None:
    """The PrfaaS cluster would be done sooner; at some rate of kills it would not."""
    view = board(prefiller("remote", "far"), prefiller("prefill", busy_until_s=NOW_S + 2), decoder("decode"))
    decide = make_policy(policy, {}).decide
    assert decide(LONG, view).prefill == "remote"
    far = view.clusters["far"]
    before_s = decide(LONG, view).predicted_ttft_s
    far.kills_per_s = 1e-3
    assert decide(LONG, view).predicted_ttft_s == pytest.approx(
        before_s + expected_loss_s(PREFILL_S, 1e-3), abs=0.01
    )
    far.kills_per_s = 1.0
    assert decide(LONG, view).prefill == "prefill"


def test_of_two_clusters_the_safe_one_is_taken() -> None:
    view = board(
        prefiller("spot", "far"),
        prefiller("own", "far-b", busy_until_s=NOW_S + 0.5),
        prefiller("prefill", busy_until_s=NOW_S + 1000),
        decoder("decode"),
        links=[link(cluster, "pd") for cluster in ("far", "far-b")],
    )
    for policy in ("tilted", "least_ttft"):
        decide = make_policy(policy, {}).decide
        view.clusters["far"].kills_per_s = 0.0
        assert decide(LONG, view).prefill == "spot"
        view.clusters["far"].kills_per_s = 0.2
        assert decide(LONG, view).prefill == "own"


@pytest.mark.parametrize(
    ("kept_tokens", "is_preempted", "expected"),
    [(0, False, False), (1, False, True), (0, True, False), (4999, True, False), (5000, True, True)],
)
def test_who_goes_on_from_what_has_come(kept_tokens: int, is_preempted: bool, expected: bool) -> None:
    """With notice a neighbour begins again, unless less is left than has come."""
    assert goes_on_at_decode(kept_tokens, 10_000, is_preempted=is_preempted) is expected
