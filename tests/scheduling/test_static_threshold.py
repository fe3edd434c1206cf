"""The routing policy, case by case and by property."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.scheduling import (
    InstanceView,
    NoDecodeInstanceError,
    Route,
    RoutingRequest,
    View,
    static_threshold,
)

REMOTE = InstanceView("remote", "far", prefills=True, decodes=False)
PREFILL = InstanceView("prefill", "pd", prefills=True, decodes=False)
DECODE = InstanceView("decode", "pd", prefills=False, decodes=True)
LINKS = frozenset({("far", "pd")})


def view(*instances: InstanceView, hybrid: bool = True, links: frozenset[tuple[str, str]] = LINKS) -> View:
    return View(instances or (REMOTE, PREFILL, DECODE), links, hybrid)


def down(instance: InstanceView) -> InstanceView:
    return InstanceView(
        instance.name, instance.cluster, prefills=instance.prefills, decodes=instance.decodes, healthy=False
    )


def test_longer_than_the_threshold_goes_away_and_the_threshold_itself_stays() -> None:
    assert static_threshold(RoutingRequest(1001), view(), 1000).route is Route.OFFLOAD
    decision = static_threshold(RoutingRequest(1000), view(), 1000)
    assert (decision.route, decision.prefill, decision.decode) == (Route.LOCAL, "prefill", "decode")


def test_what_the_pd_prefill_instance_holds_is_not_counted() -> None:
    decision = static_threshold(RoutingRequest(2000, {"prefill": 1536}), view(), 1000)
    assert (decision.route, decision.uncached_tokens) == (Route.LOCAL, 464)


def test_what_a_hybrid_decode_instance_holds_spares_bytes_only() -> None:
    decision = static_threshold(RoutingRequest(2000, {"decode": 1536}), view(), 1000)
    assert (decision.route, decision.uncached_tokens, decision.skip_tokens) == (Route.OFFLOAD, 2000, 1536)


def test_with_sliding_windows_nothing_is_skipped() -> None:
    windows = View((REMOTE, PREFILL, DECODE), LINKS, is_hybrid=True, can_skip=False)
    assert static_threshold(RoutingRequest(2000, {"decode": 1536}), windows, 1000).skip_tokens == 0


def test_a_dense_decode_instance_that_holds_most_prefills_the_rest_itself() -> None:
    decision = static_threshold(RoutingRequest(2000, {"decode": 1536}), view(hybrid=False), 1000)
    assert (decision.route, decision.prefill, decision.uncached_tokens) == (Route.LOCAL, "decode", 464)
    assert not decision.transfers and decision.skip_tokens == 0


def test_a_dense_decode_instance_that_holds_little_only_spares_bytes() -> None:
    decision = static_threshold(RoutingRequest(2000, {"decode": 512}), view(hybrid=False), 1000)
    assert (decision.route, decision.skip_tokens, decision.uncached_tokens) == (Route.OFFLOAD, 512, 1488)


@pytest.mark.parametrize(
    "instances",
    [(PREFILL, DECODE), (down(REMOTE), PREFILL, DECODE)],
    ids=["none", "unhealthy"],
)
def test_without_a_remote_instance_a_long_prompt_stays(instances: tuple[InstanceView, ...]) -> None:
    decision = static_threshold(RoutingRequest(5000), view(*instances), 1000)
    assert (decision.prefill, decision.reason) == ("prefill", "no-prfaas-instance")


def test_without_a_link_a_long_prompt_stays() -> None:
    assert static_threshold(RoutingRequest(5000), view(links=frozenset()), 1000).route is Route.LOCAL


def test_a_single_token_or_no_prefill_instance_goes_straight_to_the_decode_instance() -> None:
    assert static_threshold(RoutingRequest(1), view(), 0).prefill == "decode"
    assert static_threshold(RoutingRequest(500), view(REMOTE, DECODE), 1000).prefill == "decode"


def test_an_instance_with_both_roles_never_sends_to_itself() -> None:
    both = InstanceView("both", "pd", prefills=True, decodes=True)
    assert not static_threshold(RoutingRequest(500), view(both), math.inf).transfers


def test_a_decode_instance_is_used_even_when_it_is_suspect_and_alone() -> None:
    assert static_threshold(RoutingRequest(5), view(down(DECODE)), 10).decode == "decode"
    with pytest.raises(NoDecodeInstanceError):
        static_threshold(RoutingRequest(5), view(REMOTE, PREFILL), 10)


def test_the_longest_prefix_then_the_least_load_then_the_name() -> None:
    a, b, c = (
        InstanceView(n, "pd", prefills=False, decodes=True, in_flight=f)
        for n, f in (("a", 2), ("b", 1), ("c", 1))
    )
    assert static_threshold(RoutingRequest(900, {"a": 256}), view(a, b, c), 1000).decode == "a"
    assert static_threshold(RoutingRequest(900), view(a, b, c), 1000).decode == "b"


INSTANCES = st.lists(
    st.builds(
        InstanceView,
        name=st.sampled_from("abcdef"),
        cluster=st.sampled_from(("far", "pd", "other")),
        prefills=st.booleans(),
        decodes=st.booleans(),
        in_flight=st.integers(0, 5),
        healthy=st.booleans(),
    ),
    unique_by=lambda i: i.name,
    max_size=6,
)


@settings(deadline=None)
@given(
    INSTANCES,
    st.integers(0, 4000),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 16).map(lambda n: 256 * n)),
    st.integers(0, 4000),
    st.booleans(),
)
def test_every_decision_can_be_carried_out(
    instances: list[InstanceView], num_tokens: int, prefixes: dict[str, int], threshold: int, hybrid: bool
) -> None:
    by_name = {i.name: i for i in instances}
    if not any(i.decodes for i in instances):
        return
    decision = static_threshold(
        RoutingRequest(num_tokens, prefixes), view(*instances, hybrid=hybrid), threshold
    )
    decode, prefill = by_name[decision.decode], by_name[decision.prefill]
    assert decode.decodes
    assert 0 <= decision.skip_tokens <= max(num_tokens - 1, 0)
    assert 0 <= decision.uncached_tokens <= num_tokens
    if decision.transfers:
        assert prefill.prefills and prefill.healthy and num_tokens > 1
    else:
        assert decision.skip_tokens == 0
    if decision.route is Route.OFFLOAD:
        assert decision.uncached_tokens > threshold and (prefill.cluster, decode.cluster) in LINKS
    else:
        assert prefill.cluster == decode.cluster
