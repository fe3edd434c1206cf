"""What a policy of one's own chooses from."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prfaas.core.scheduling.decision import PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.options import options
from prfaas.core.scheduling.policy import make_policy
from prfaas.core.scheduling.view import NoDecodeInstanceError, View

from .test_routing_properties import check
from .views import NOW_S, board, cases, decoder, kv_bytes, prefiller, small

Case = tuple[View, RoutingRequest]


def test_the_ways_of_a_prompt() -> None:
    view = board(
        prefiller("remote", "far"),
        prefiller("prefill", busy_until_s=NOW_S + 3.0),
        decoder("decode", decoding=4),
        threshold=700.0,
    )
    near, far = options(RoutingRequest(10_000, {"decode": PrefixHit(1000, 1000)}), view)
    assert (near.route, near.prefill.name, near.decode.name, near.link) == (
        Route.LOCAL,
        "prefill",
        "decode",
        None,
    )
    assert (near.wait_s, near.prefill_s, near.ttft_s) == pytest.approx((3.0, 1.1, 4.1))
    assert (near.kv_bytes, near.link_s, near.link_wait_s, near.decode_load) == (0, 0.0, 0.0, 0.25)
    assert (far.route, far.prefill.name) == (Route.OFFLOAD, "remote") and far.link is view.links["far", "pd"]
    assert far.kv_bytes == kv_bytes(10_000, 1000) and far.link_s == pytest.approx(8 * far.kv_bytes / 100e9)
    assert (far.prefill_tokens, far.uncached_tokens, far.threshold_tokens) == (10_000, 9000, 700.0)
    decision = far.decision("cheap")
    assert (decision.reason, decision.prefill, decision.skip_tokens) == ("cheap", "remote", 1000)
    assert decision.predicted_ttft_s == far.ttft_s


def test_the_wait_for_a_slot_comes_after_the_prefill() -> None:
    view = board(prefiller("prefill", busy_until_s=NOW_S + 3.0), decoder("decode", decoding=18))
    view.clusters["pd"].slot_s = 32.0
    (way,) = options(RoutingRequest(10_000), view)
    assert (way.ttft_s, way.decode_wait_s) == pytest.approx((4.1, 3 * 2.0 - 4.1))
    assert way.decision().decode_wait_s == way.decode_wait_s
    view.clusters["pd"].instances[1].decoding = 17
    (way,) = options(RoutingRequest(10_000), view)
    assert way.decode_wait_s == way.decision().decode_wait_s == 0.0


def test_a_single_token_has_one_way() -> None:
    (only,) = options(RoutingRequest(1), small())
    assert only.prefill is only.decode and not only.decision().transfers


def test_who_cannot_send_to_the_decode_instance_is_left_out() -> None:
    blocked = replace(small(), blocked=frozenset([("remote", "decode")]))
    (only,) = options(RoutingRequest(9000), blocked)
    assert (only.prefill.name, only.route) == ("prefill", Route.LOCAL)


def test_nobody_left_to_decode_is_an_error() -> None:
    with pytest.raises(NoDecodeInstanceError):
        options(RoutingRequest(9), small().without(["decode", "prefill"]))


@given(cases(), st.data())
def test_every_option_can_be_carried_out(case: Case, data: st.DataObject) -> None:
    view, request = case
    try:
        ways = options(request, view)
    except NoDecodeInstanceError:
        assume(False)
    decision = data.draw(st.sampled_from(ways)).decision()
    check(decision, request, view)
    assert max(Counter((each.prefill.name, each.decode.name) for each in ways).values()) == 1


@given(cases(max_pd=1, cached=False))
def test_the_soonest_option_is_what_least_ttft_takes(case: Case) -> None:
    view, request = case
    try:
        ways = options(request, view)
    except NoDecodeInstanceError:
        assume(False)
    soonest = min(ways, key=lambda each: each.ttft_s).decision("soonest")
    other = make_policy("least_ttft").decide(request, view)
    assert soonest.predicted_ttft_s == other.predicted_ttft_s
    assert (soonest.decode, soonest.uncached_tokens) == (other.decode, other.uncached_tokens)
