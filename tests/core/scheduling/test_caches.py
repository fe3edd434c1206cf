"""Caches of other clusters (section 3.4.3), and links whose facts are old."""

import pytest

from prfaas.core.scheduling.decision import PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.policy import Policy, policy_named
from prfaas.core.scheduling.view import View

from .views import NOW_S, every_policy, kv_bytes, link, small

PAPER = policy_named("paper")
CACHING = [policy_named(name) for name in ("paper", "tilted", "least_ttft")]
AT_REMOTE = RoutingRequest(40_000, {"remote": PrefixHit(39_424, 39_424)})
AT_PREFILL = RoutingRequest(40_000, {"prefill": PrefixHit(20_480, 20_480)})


def scarce(view, source: str, target: str):  # type: ignore[no-untyped-def]
    line = view.links[source, target]
    line.egress_bits_per_s = 0.51 * line.capacity_bits_per_s
    return view


def slow_at_home(view: View) -> View:
    """Any policy offloads there."""
    home = view.clusters["pd"]
    home.prefill_s = lambda tokens: tokens / 100
    return view


def test_scarce_bandwidth_each_cluster_by_its_own_cache() -> None:
    decision = PAPER.decide(AT_REMOTE, scarce(small(), "far", "pd"))
    assert (decision.route, decision.uncached_tokens, decision.prefill_tokens) == (Route.OFFLOAD, 40_000, 576)
    decision = PAPER.decide(AT_PREFILL, scarce(small(), "pd", "far"))
    assert (decision.route, decision.uncached_tokens, decision.prefill_tokens) == (
        Route.OFFLOAD,
        19_520,
        40_000,
    )
    assert decision.cache_transfer is None


def test_abundant_bandwidth_the_best_cache_counts_and_moves() -> None:
    decision = PAPER.decide(AT_REMOTE, small())
    assert (decision.route, decision.uncached_tokens, decision.prefill_tokens) == (Route.LOCAL, 576, 576)
    moved = decision.cache_transfer
    assert moved is not None
    assert (moved.source, moved.num_tokens, moved.skip_tokens) == ("remote", 39_425, 0)
    moving_s = kv_bytes(39_425, 0) * 8 / 1e11
    assert decision.predicted_ttft_s == pytest.approx(moving_s + 0.1 + 0.0576)

    decision = PAPER.decide(AT_PREFILL, small())
    assert (decision.route, decision.uncached_tokens, decision.prefill_tokens) == (
        Route.OFFLOAD,
        19_520,
        19_520,
    )
    assert decision.cache_transfer is not None and decision.cache_transfer.source == "prefill"


@pytest.mark.parametrize("policy", CACHING, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "change",
    [
        {"egress_bits_per_s": 0.51e11},
        {"drained_s": NOW_S + 0.26},
        {"seen_s": NOW_S - 5.1},
        {"up": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_cache_moves_over_a_link_that_is_scarce_stale_or_down(
    policy: Policy, change: dict[str, float]
) -> None:
    links = [link("far", "pd"), link("pd", "far", **change)]
    view = slow_at_home(small(links=links))
    assert policy.decide(AT_PREFILL, small()).cache_transfer is not None or policy.name != "paper"
    decision = policy.decide(AT_PREFILL, view)
    assert (decision.route, decision.cache_transfer) == (Route.OFFLOAD, None)
    assert decision.cache_stays == "no-bandwidth"


@pytest.mark.parametrize("policy", CACHING, ids=lambda p: p.name)
def test_no_cache_moves_where_computing_is_sooner(policy: Policy) -> None:
    # 19.6K tokens take 2 s to compute; their KV takes 4.2 s on 1 Gbit/s and 0.04 s on 100.
    slow = small(links=[link("far", "pd"), link("pd", "far", 1e9)])
    fast = small()
    for view in (slow, fast):
        slow_at_home(view)
    stays, moves = policy.decide(AT_PREFILL, slow), policy.decide(AT_PREFILL, fast)
    assert stays.cache_transfer is None and stays.cache_stays == "slower"
    assert moves.cache_transfer is not None and not moves.cache_stays


@pytest.mark.parametrize("policy", CACHING, ids=lambda p: p.name)
def test_no_cache_moves_from_an_instance_whose_queue_is_longer_than_the_prefill(policy: Policy) -> None:
    """It computes the last token of what it sends, in its turn. 19.6K tokens take 2 s to compute."""

    def moves(queue_s: float) -> bool:
        view = slow_at_home(small())
        view.clusters["pd"].instances[0].busy_until_s = NOW_S + queue_s
        decision = policy.decide(AT_PREFILL, view)
        assert decision.prefill == "remote"
        return decision.cache_transfer is not None

    assert moves(0.0) and moves(1.9) and not moves(2.1) and not moves(600.0)


def test_no_cache_moves_for_less_than_a_tenth_of_the_prefill() -> None:
    def stays(tokens: int) -> str:
        request = RoutingRequest(40_000, {"prefill": PrefixHit(tokens, tokens)})
        return PAPER.decide(request, small()).cache_stays

    assert stays(4_096) == "" and stays(3_840) == "spares-little"


def test_what_the_target_holds_is_not_moved_again() -> None:
    held = {"remote": PrefixHit(39_424, 39_424), "prefill": PrefixHit(0, 8_192)}
    moved = PAPER.decide(RoutingRequest(40_000, held), small()).cache_transfer
    assert moved is not None and moved.skip_tokens == 8_192
    moved = PAPER.decide(RoutingRequest(40_000, held), small(can_skip=False)).cache_transfer
    assert moved is not None and moved.skip_tokens == 0


def test_a_cache_of_the_whole_prompt_leaves_a_token_to_each_engine() -> None:
    decision = PAPER.decide(RoutingRequest(40_000, {"remote": PrefixHit(39_999, 39_999)}), small())
    assert decision.cache_transfer is not None
    assert decision.cache_transfer.num_tokens == 39_998
    assert decision.prefill_tokens == 3


def test_the_marks_of_abundance_are_parameters() -> None:
    never = policy_named("paper", abundance_queue_s=0.1, abundance_utilisation=0.0)
    view = small()
    view.links["far", "pd"].egress_bits_per_s = 1.0
    assert never.decide(AT_REMOTE, view).uncached_tokens == 40_000
    assert PAPER.decide(AT_REMOTE, view).uncached_tokens == 576
    for marks in ({"utilisation": 1.0}, {"utilisation": -0.1}, {"queue_s": -1.0}):
        with pytest.raises(ValueError, match="abundance_"):
            policy_named("paper", **{f"abundance_{name}": value for name, value in marks.items()})


@pytest.mark.parametrize("policy", [policy_named("paper"), policy_named("tilted")], ids=lambda p: p.name)
def test_stale_facts_of_a_link_only_make_offloading_rarer(policy: Policy) -> None:
    view = small()
    line, home, remote = (
        view.links["far", "pd"],
        *(view.clusters[name].instances[0] for name in ("pd", "far")),
    )
    home.busy_until_s = NOW_S + 30
    assert policy.decide(RoutingRequest(900), view).route is Route.OFFLOAD
    line.seen_s = NOW_S - 5.1
    assert policy.decide(RoutingRequest(900), view).route is Route.LOCAL
    assert policy.decide(RoutingRequest(1001), view).route is Route.OFFLOAD
    home.busy_until_s, remote.busy_until_s = 0, NOW_S + 30
    assert policy.decide(RoutingRequest(1001), view).route is Route.LOCAL


@pytest.mark.parametrize("policy", every_policy().values(), ids=lambda p: p.name)
def test_a_link_not_heard_of_for_six_times_that_is_down(policy: Policy) -> None:
    request = RoutingRequest(50_000, {}, 1)
    view = small(links=[link("far", "pd", seen_s=NOW_S - 29.9)])
    view.clusters["pd"].instances[0].busy_until_s = NOW_S + 100
    if policy.name != "local_only":
        assert policy.decide(request, view).route is Route.OFFLOAD
    view.links["far", "pd"].seen_s = NOW_S - 30.1
    assert policy.decide(request, view).route is Route.LOCAL


@pytest.mark.parametrize("policy", [policy_named("paper"), policy_named("tilted")], ids=lambda p: p.name)
def test_a_prompt_goes_where_it_is_cached_if_only_the_increment_crosses(policy: Policy) -> None:
    """Sent a second time: PrfaaS can reuse it, the decode instance has its attention blocks but not the states."""
    held = {"remote": PrefixHit(39_424, 39_424), "decode": PrefixHit(0, 39_936)}
    decision = policy.decide(RoutingRequest(40_000, held), small())
    assert (decision.route, decision.prefill, decision.reason) == (Route.OFFLOAD, "remote", "cached-there")
    assert (decision.prefill_tokens, decision.skip_tokens, decision.cache_transfer) == (576, 39_936, None)
    # Where nothing of it can move, the rest is computed there as well.
    apart = small(links=[link("far", "pd", 1e9), link("pd", "far", 1e9)])
    decision = PAPER.decide(AT_REMOTE, apart)
    assert (decision.route, decision.prefill_tokens, decision.cache_transfer) == (Route.OFFLOAD, 576, None)
    # What is short by the PD cluster's own cache stays.
    own = {"remote": PrefixHit(39_424, 39_424), "prefill": PrefixHit(39_424, 39_424)}
    assert PAPER.decide(RoutingRequest(40_000, own), small()).route is Route.LOCAL
