"""A price of bytes: who is offloaded for it, who no longer, and that nothing changes without one."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.scheduling.decision import PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.egress import is_worth_its_bytes
from prfaas.core.scheduling.policy import Policy, policy_named
from prfaas.core.scheduling.view import LinkView, NoDecodeInstanceError, View

from .views import H20, NOW_S, cases, every_policy, kv_bytes, link, paper_board, prefiller, small

# 8 H20 at 1 per GPU-hour.
C_PER_S = 8 / 3600
TOKENS = 32_768
# What a prefill of so many tokens costs at home, per byte that offloading it sends.
WORTH_PER_BYTE = C_PER_S * H20.seconds(TOKENS) / kv_bytes(TOKENS, 0)


def priced(view: View, per_byte: float, per_s: float = C_PER_S) -> View:
    """The same with a price of all links and of all PD clusters' instances."""
    return replace(
        view,
        clusters={
            name: replace(each, instance_price_per_s=per_s if each.kind == "pd" else 3 * per_s)
            for name, each in view.clusters.items()
        },
        links={pair: replace(each, egress_price_per_byte=per_byte) for pair, each in view.links.items()},
    )


def test_a_byte_that_costs_as_much_as_it_spares_is_sent() -> None:
    wire = LinkView("far", "pd", 1e11, egress_price_per_byte=2.0)
    assert is_worth_its_bytes(wire, 10, spared_s=4.0, price_per_s=5.0)
    assert not is_worth_its_bytes(wire, 11, spared_s=4.0, price_per_s=5.0)
    free = replace(wire, egress_price_per_byte=0.0)
    assert is_worth_its_bytes(free, 10**12, spared_s=0.0, price_per_s=0.0)


@pytest.mark.parametrize("policy", every_policy().values(), ids=every_policy())
def test_a_prompt_goes_away_up_to_the_price_that_its_prefill_at_home_is_worth(policy: Policy) -> None:
    """By hand, 32,768 tokens on idle machines: 5.05 s of 8 H20 at 1 per GPU-hour are 0.0112, 0.749 GB are sent.

    So up to 0.015 per GB it pays.
    """
    assert pytest.approx(0.0150, rel=0.01) == WORTH_PER_BYTE * 1e9
    view = paper_board(19_371.0)
    request = RoutingRequest(TOKENS, ordinal=5)
    before = policy.decide(request, view)
    assert policy.decide(request, priced(view, 0.99 * WORTH_PER_BYTE)) == before
    after = policy.decide(request, priced(view, 1.01 * WORTH_PER_BYTE))
    assert after.route is Route.LOCAL
    if before.route is Route.OFFLOAD and policy.name != "round_robin":
        expected = "soonest" if policy.name == "least_ttft" else "egress-price"
        assert after.reason == expected


def test_what_is_short_stays_for_being_short() -> None:
    view = priced(paper_board(19_371.0), 1.0)
    for name in ("paper", "tilted"):
        assert policy_named(name).decide(RoutingRequest(5_000), view).reason == "short"


def test_a_queue_at_home_outweighs_any_price() -> None:
    """At twice the price that the prefill is worth: a queue as long as the prefill of a prompt of the threshold."""
    threshold = 19_371.0
    view = priced(paper_board(threshold), 2 * WORTH_PER_BYTE)
    policy = policy_named("static_threshold", threshold_tokens=threshold)
    for wait_s, route in ((0.98, Route.LOCAL), (1.02, Route.OFFLOAD)):
        for each in view.clusters["pd"].instances:
            each.busy_until_s = NOW_S + wait_s * H20.seconds(threshold)
        assert policy.decide(RoutingRequest(TOKENS), view).route is route
    # Without a threshold, as long as its own.
    view.threshold_tokens = {}
    assert policy.decide(RoutingRequest(TOKENS), view).route is Route.LOCAL
    for each in view.clusters["pd"].instances:
        each.busy_until_s = NOW_S + 1.02 * H20.seconds(TOKENS)
    assert policy.decide(RoutingRequest(TOKENS), view).route is Route.OFFLOAD
    # Unless it has to wait as long there.
    view.links["far", "pd"].drained_s = NOW_S + 100
    assert policy.decide(RoutingRequest(TOKENS), view).reason == "egress-price"


@given(st.floats(0.5, 20), st.floats(0.1, 60), st.integers(2_000, 120_000), st.integers(2_000, 120_000))
def test_what_takes_more_computing_per_byte_goes_first(
    price: float, wait_s: float, one: int, other: int
) -> None:
    """Whatever the queue: no prompt is worth its bytes while a longer one is not."""
    view = priced(paper_board(0.0), price * WORTH_PER_BYTE)
    for each in view.clusters["pd"].instances:
        each.busy_until_s = NOW_S + wait_s
    policy = policy_named("offload_all")
    short, long = (policy.decide(RoutingRequest(tokens), view).route for tokens in sorted((one, other)))
    assert short is Route.LOCAL or long is Route.OFFLOAD


def test_what_is_held_at_home_need_not_be_paid_for() -> None:
    """Of a prompt whose first half is cached at home, half of the work and half of the bytes are left."""
    view = paper_board(1_000.0)
    decode = next(each.name for each in view.clusters["pd"].instances if each.decodes)
    prefill = next(each.name for each in view.clusters["pd"].instances if each.prefills)
    half = TOKENS // 2
    held = {prefill: PrefixHit(half, half), decode: PrefixHit(0, half)}
    worth = C_PER_S * H20.seconds(half) / kv_bytes(TOKENS, half)
    policy = policy_named("static_threshold", threshold_tokens=1_000.0)
    request = RoutingRequest(TOKENS, held)
    assert policy.decide(request, priced(view, 0.99 * worth)).route is Route.OFFLOAD
    assert policy.decide(request, priced(view, 1.01 * worth)).reason == "egress-price"


def test_a_cached_prefix_moves_only_if_it_is_worth_its_bytes() -> None:
    view = small(links=[link("far", "pd")], threshold=1e9)
    request = RoutingRequest(40_000, {"remote": PrefixHit(30_000, 30_000)})
    policy = policy_named("paper")
    moved = policy.decide(request, view).cache_transfer
    assert moved is not None
    spared_s = view.clusters["pd"].prefill_s(40_000) - view.clusters["pd"].prefill_s(
        40_000 - moved.reusable_tokens
    )
    worth = C_PER_S * spared_s / moved.kv_bytes
    assert policy.decide(request, priced(view, 0.99 * worth)).cache_transfer == moved
    assert policy.decide(request, priced(view, 1.01 * worth)).cache_transfer is None


def test_the_cheaper_link_stays_open() -> None:
    view = priced(paper_board(19_371.0), 2 * WORTH_PER_BYTE)
    far = view.clusters["far"]
    instances = [prefiller(f"{each.name}-too", "far2") for each in far.instances]
    view.clusters["far2"] = replace(far, name="far2", instances=instances)
    view.links["far2", "pd"] = link("far2", "pd", 1e10)
    decision = policy_named("paper").decide(RoutingRequest(TOKENS), view)
    assert decision.route is Route.OFFLOAD and decision.prefill.endswith("-too")


@given(cases(), st.floats(0, 10))
def test_without_a_price_of_bytes_nothing_changes(case: tuple[View, RoutingRequest], per_s: float) -> None:
    view, request = case
    for policy in every_policy().values():
        try:
            before = policy.decide(request, view)
        except NoDecodeInstanceError:
            continue
        assert policy.decide(request, priced(view, 0.0, per_s)) == before
        assert before.reason != "egress-price"


@given(cases(), st.floats(1e-15, 1e-6), st.floats(1e-6, 1.0))
def test_what_crosses_a_link_is_worth_its_price(
    case: tuple[View, RoutingRequest], per_byte: float, per_s: float
) -> None:
    """No policy offloads what costs more than the whole prompt's prefill, by the longest queue of its cluster."""
    view, request = case
    view = priced(view, per_byte, per_s)
    cluster_of = {each.name: each.cluster for cluster in view.clusters.values() for each in cluster.instances}
    for policy in every_policy().values():
        try:
            decision = policy.decide(request, view)
        except NoDecodeInstanceError:
            continue
        if decision.route is not Route.OFFLOAD:
            continue
        home = view.clusters[cluster_of[decision.decode]]
        longest_s = max(max(each.busy_until_s - NOW_S, 0.0) for each in home.instances)
        threshold = view.threshold_tokens.get(home.name, math.inf)
        whole_s = home.prefill_s(request.num_tokens)
        if threshold < math.inf:
            most = per_s * whole_s * (1 + longest_s / home.prefill_s(threshold))
        else:
            most = per_s * (whole_s + longest_s)
        assert per_byte * decision.kv_bytes <= most * (1 + 1e-9)
