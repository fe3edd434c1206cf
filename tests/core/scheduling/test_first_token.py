"""The first token comes from the prefill: what that changes of predictions and routes, and what it does not."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from msgspec import structs

from prfaas.core.scheduling.decision import PrefixHit, RoutingRequest
from prfaas.core.scheduling.hazard import expected_loss_s
from prfaas.core.scheduling.options import options
from prfaas.core.scheduling.policy import make_policy, policy_named
from prfaas.core.scheduling.view import NoDecodeInstanceError, View

from .test_routing_properties import check, decided
from .test_tiers import check as check_with_pools
from .views import (
    NOW_S,
    board,
    cases,
    decoder,
    every_policy,
    kv_bytes,
    linear_s,
    link,
    pooled_cases,
    prefiller,
    small,
)

Case = tuple[View, RoutingRequest]
LEAST = policy_named("least_ttft")
TOKENS = 9000
# A prefill of 9000 tokens takes a second, and its KV so long on this link.
PREFILL_S = 1.0


def early(request: RoutingRequest) -> RoutingRequest:
    return structs.replace(request, first_from_prefill=True)


def slow_link(link_s: float, **state: float) -> View:
    return small(links=[link("far", "pd", 8 * kv_bytes(TOKENS, 0) / link_s, rtt_s=0.05, **state)])


@given(cases())
def test_no_way_has_its_first_token_later(case: Case) -> None:
    view, request = case
    try:
        late = options(request, view)
    except NoDecodeInstanceError:
        assume(False)
        raise
    for way, same in zip(options(early(request), view), late, strict=True):
        assert (way.prefill, way.decode, way.link, way.kv_bytes) == (
            same.prefill,
            same.decode,
            same.link,
            same.kv_bytes,
        )
        assert way.ttft_s <= same.ttft_s == same.loaded_s == way.loaded_s
        assert way.ttft_s == same.ttft_s or way.link is not None
        soon, usual = way.decision(), same.decision()
        assert soon.kv_wait_s >= 0 == usual.kv_wait_s
        assert soon.predicted_ttft_s + soon.kv_wait_s == pytest.approx(usual.predicted_ttft_s)
        assert soon.decode_wait_s == pytest.approx(usual.decode_wait_s)


@given(cases())
def test_every_policy_predicts_no_later_token_of_the_same_way(case: Case) -> None:
    view, request = case
    for policy in every_policy().values():
        usual, soon = decided(policy, request, view), decided(policy, early(request), view)
        check(soon, early(request), view)
        ways = [(each.prefill, each.decode, each.cache_transfer) for each in (usual, soon)]
        if ways[0] == ways[1]:
            assert soon.predicted_ttft_s <= usual.predicted_ttft_s
            assert soon.kv_bytes == usual.kv_bytes


@given(cases(cached=False))
def test_the_soonest_way_has_its_token_no_later_than_any_way_was_complete(case: Case) -> None:
    """The mean of both waits is compared: so neither the token nor the rest is given up for the other."""
    view, request = case
    assume(request.num_tokens > 100)
    usual, soon = decided(LEAST, request, view), decided(LEAST, early(request), view)
    complete_s = usual.predicted_ttft_s + usual.decode_wait_s
    assert soon.predicted_ttft_s <= complete_s * (1 + 1e-9)
    assert soon.predicted_ttft_s + soon.kv_wait_s + soon.decode_wait_s <= 2 * complete_s * (1 + 1e-9)


@given(pooled_cases())
def test_pools_change_nothing_of_that(case: tuple[View, RoutingRequest, RoutingRequest]) -> None:
    view, request, _ = case
    for policy in every_policy().values():
        soon = decided(policy, early(request), view)
        check_with_pools(soon, early(request), view)
        assert soon.kv_wait_s >= 0


def test_the_wait_for_the_link_comes_after_the_token() -> None:
    (near, far) = options(early(RoutingRequest(TOKENS)), slow_link(3.0, drained_s=NOW_S + 2.0))
    assert (near.ttft_s, near.loaded_s) == pytest.approx((PREFILL_S, PREFILL_S))
    assert (far.ttft_s, far.loaded_s) == pytest.approx((PREFILL_S + 0.05, 2.0 + 3.0 + 0.05))
    decision = far.decision()
    assert (decision.predicted_ttft_s, decision.kv_wait_s) == pytest.approx((1.05, 4.0))


def test_kills_cost_the_token_the_prefill_and_the_rest_all_until_its_last_byte() -> None:
    view, kills_per_s = slow_link(3.0), 0.1
    view.clusters["far"].kills_per_s = kills_per_s
    (_, far) = options(early(RoutingRequest(TOKENS)), view)
    assert far.ttft_s == pytest.approx(PREFILL_S + expected_loss_s(PREFILL_S, kills_per_s) + 0.05)
    assert far.loaded_s == pytest.approx(3.0 + expected_loss_s(3.0, kills_per_s) + 0.05)


def test_half_of_what_a_prefill_does_not_hide_tilts_the_threshold() -> None:
    """0.2 s more than the prefill, where one of the threshold's length takes 0.2 s: all of it forbids offloading, half
    of it doubles the threshold."""
    view, request = slow_link(1.2), RoutingRequest(TOKENS)
    for each in view.links.values():
        each.rtt_s = 0.0
    tilted = policy_named("tilted")
    usual, soon = tilted.decide(request, view), tilted.decide(early(request), view)
    assert (usual.prefill, usual.reason) == ("prefill", "slow-link")
    assert (soon.prefill, soon.reason) == ("remote", "long")
    assert soon.threshold_tokens == pytest.approx(1000 / (1 - 0.1 / 0.2))
    still = tilted.decide(early(request), slow_link(1.5))
    assert (still.prefill, still.reason) == ("prefill", "slow-link")


def test_a_prompt_that_only_a_queue_keeps_is_told_so() -> None:
    """The same link: too slow for a first token that waits for it, and no reason for one that does not."""
    view = slow_link(1.2)
    view.clusters["far"].instances[0].busy_until_s = NOW_S + 1e6
    view.links["far", "pd"].rtt_s = 0.0
    tilted, request = policy_named("tilted"), RoutingRequest(TOKENS)
    assert tilted.decide(request, view).reason == "slow-link"
    assert tilted.decide(early(request), view).reason == "busy-prfaas"


def test_a_cache_that_moves_first_is_waited_for() -> None:
    """And the round trip after it."""
    held = {"prefill": PrefixHit(20_480, 20_480)}
    links = [link("far", "pd", rtt_s=0.05), link("pd", "far")]
    decision = policy_named("paper").decide(early(RoutingRequest(40_000, held)), small(links=links))
    moved = decision.cache_transfer
    assert moved is not None and decision.prefill == "remote"
    moving_s = 8 * moved.kv_bytes / 1e11
    prefill_s = linear_s(decision.prefill_tokens)
    assert decision.predicted_ttft_s == pytest.approx(moving_s + prefill_s + 0.05)


def test_a_full_link_is_not_free() -> None:
    """The token would be there sooner, but the rest so late that the prompt stays."""
    view = slow_link(1.0, drained_s=NOW_S + 60.0)
    view.clusters["pd"].instances[0].busy_until_s = NOW_S + 2.0
    stays, goes = (LEAST.decide(early(RoutingRequest(TOKENS)), each) for each in (view, slow_link(1.0)))
    assert (stays.prefill, stays.predicted_ttft_s) == ("prefill", pytest.approx(3.0))
    view.links["far", "pd"].drained_s = NOW_S + 2.0
    assert LEAST.decide(RoutingRequest(TOKENS), view).prefill == "prefill"
    assert LEAST.decide(early(RoutingRequest(TOKENS)), view).prefill == "remote"
    assert goes.prefill == "prefill"


@pytest.mark.parametrize("name", ["least_ttft", "tilted", "offload_all"])
def test_of_two_prefills_elsewhere_the_sooner_token_counts_as_much_as_the_kv(name: str) -> None:
    """One is free at once behind a link of 4 s; the other in 2 s, with a link that hides in the prefill."""
    links = [
        link("far1", "pd", 8 * kv_bytes(TOKENS, 0) / 4.0),
        link("far2", "pd", 8 * kv_bytes(TOKENS, 0) / 0.5),
    ]
    view = board(
        prefiller("one", "far1"),
        prefiller("two", "far2", busy_until_s=NOW_S + 2.0),
        prefiller("home", busy_until_s=NOW_S + 60.0),
        decoder("decode"),
        links=links,
    )
    policy = make_policy(name, {})
    assert policy.decide(RoutingRequest(TOKENS), view).prefill == "two"
    assert policy.decide(early(RoutingRequest(TOKENS)), view).prefill == "one"


def slots_or_prefills() -> View:
    """Two PD clusters: in one a slot is to be waited for, 2 s, in the other a prefill."""
    view = board(
        prefiller("p1", "pd1"),
        decoder("d1", "pd1", decoding=18),
        prefiller("p2", "pd2", busy_until_s=NOW_S + 1.5),
        decoder("d2", "pd2"),
        links=[],
    )
    view.clusters["pd1"].slot_s = 3.0 * 16 / 3
    return view


def test_a_pd_cluster_with_full_slots_costs_the_rest_only() -> None:
    """The token need not wait for the slot."""
    view = slots_or_prefills()
    usual, soon = (
        LEAST.decide(each, view) for each in (RoutingRequest(TOKENS), early(RoutingRequest(TOKENS)))
    )
    assert (usual.decode, soon.decode) == ("d2", "d1")
    assert (soon.predicted_ttft_s, soon.decode_wait_s) == pytest.approx((PREFILL_S, 2.0))


def test_where_the_kv_is_read_the_token_waits_for_the_slot_too() -> None:
    """A producer that KV is read from samples nothing that counts: both clusters compare by their last byte."""
    view = slots_or_prefills()
    view.clusters["pd1"].reads_kv = True
    assert LEAST.decide(early(RoutingRequest(TOKENS)), view).decode == "d2"


@pytest.mark.parametrize("name", ["least_ttft", "tilted", "offload_all"])
def test_a_prefill_that_sends_checkpoints_gives_no_token(name: str) -> None:
    """Its transfer is kept when it breaks, so its ticket has no token more than the decode request."""
    view = slow_link(3.0)
    view.clusters["pd"].instances[0].busy_until_s = NOW_S + 60.0
    view.clusters["far"].kills_per_s = 0.5
    policy, request = make_policy(name, {}), early(RoutingRequest(TOKENS))
    soon = policy.decide(request, view)
    assert (soon.prefill, soon.kv_wait_s > 1.0) == ("remote", True)
    view.kv = replace(view.kv, checkpoint_bytes=kv_bytes(TOKENS, 0) // 100)
    kept = policy.decide(request, view)
    usual = policy.decide(RoutingRequest(TOKENS), view)
    assert (kept.prefill, kept.kv_wait_s) == ("remote", 0.0)
    assert kept.predicted_ttft_s == pytest.approx(usual.predicted_ttft_s)
    # Where none pays in so short a prefill, the token comes from it again.
    view.clusters["far"].kills_per_s = 1e-4
    assert policy.decide(request, view).kv_wait_s > 1.0
