"""The policies to compare with."""

import math

import pytest
from hypothesis import given

from prfaas.core.scheduling.candidates import LONGEST_TINY_TOKENS
from prfaas.core.scheduling.decision import PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.policy import POLICIES, policy_named

from .views import NOW_S, board, cases, decoder, every_policy, link, prefiller, small


def test_local_only_never_offloads_and_offload_all_always_does() -> None:
    for num_tokens in (LONGEST_TINY_TOKENS + 1, 1000, 100_000):
        request = RoutingRequest(num_tokens)
        assert policy_named("local_only").decide(request, small(threshold=0)).route is Route.LOCAL
        assert policy_named("offload_all").decide(request, small(threshold=math.inf)).route is Route.OFFLOAD


def test_the_static_threshold_is_its_parameter_whatever_the_board_says() -> None:
    view = small(threshold=math.inf)
    for each in view.clusters["far"].instances:
        each.busy_until_s = NOW_S + 1000
    decision = policy_named("static_threshold", threshold_tokens=700).decide(RoutingRequest(701), view)
    assert (decision.route, decision.threshold_tokens) == (Route.OFFLOAD, 700)


@pytest.mark.slow("a property over many random systems")
@given(cases())
def test_least_ttft_is_never_later_than_the_others_predict(case) -> None:  # type: ignore[no-untyped-def]
    view, request = case
    try:
        soonest = policy_named("least_ttft").decide(request, view)
    except LookupError:
        return
    slots = {
        each.name: each.decoding < each.decode_slots
        for cluster in view.clusters.values()
        for each in cluster.instances
    }
    for name in ("paper", "local_only", "offload_all"):
        other = policy_named(name).decide(request, view)
        if request.num_tokens > 1 and slots[other.decode] == slots[soonest.decode]:
            # A cache is looked for only at the soonest of the PrfaaS clusters, and that may be another one there.
            assert soonest.predicted_ttft_s <= other.predicted_ttft_s or other.cache_transfer is not None


def test_round_robin_takes_every_way_in_turn() -> None:
    view = board(
        prefiller("r1", "far"),
        prefiller("r2", "far"),
        prefiller("gone", "far", healthy=False),
        prefiller("p1", "pd1"),
        decoder("d1", "pd1"),
        prefiller("p2", "pd2"),
        prefiller("p3", "pd2"),
        decoder("d2", "pd2"),
        links=[link("far", "pd1")],
    )
    policy = policy_named("round_robin")
    turns = [policy.decide(RoutingRequest(500, {}, ordinal), view) for ordinal in range(10)]
    pairs = [(each.prefill, each.decode) for each in turns]
    assert pairs[:5] == pairs[5:] == [
        ("p1", "d1"), ("r1", "d1"), ("r2", "d1"), ("p2", "d2"), ("p3", "d2"),
    ]  # fmt: skip
    assert [each.route for each in turns[:3]] == [Route.LOCAL, Route.OFFLOAD, Route.OFFLOAD]


def test_round_robin_tells_what_the_instance_of_the_turn_computes() -> None:
    view = board(prefiller("p1"), prefiller("p2", busy_until_s=NOW_S + 2), decoder("d"))
    request = RoutingRequest(1000, {"p1": PrefixHit(768, 768)}, 1)
    decision = policy_named("round_robin").decide(request, view)
    assert (decision.prefill, decision.prefill_tokens, decision.uncached_tokens) == ("p2", 1000, 232)
    assert decision.predicted_ttft_s == pytest.approx(2.2)


def test_policies_by_name() -> None:
    assert POLICIES == (
        "paper", "tilted", "local_only", "offload_all", "static_threshold", "least_ttft", "round_robin",
    )  # fmt: skip
    assert [policy.name for policy in every_policy().values()] == list(POLICIES)
    with pytest.raises(ValueError, match="there are paper, tilted"):
        policy_named("threshold")
    with pytest.raises(ValueError, match="static_threshold"):
        policy_named("static_threshold")
    with pytest.raises(ValueError, match="local_only"):
        policy_named("local_only", threshold_tokens=3)
    for tokens in (-1, math.nan):
        with pytest.raises(ValueError, match="threshold"):
            policy_named("static_threshold", threshold_tokens=tokens)
