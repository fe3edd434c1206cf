"""Which instance prefills, which decodes, and the cases in which there is nothing to choose."""

import math

import pytest

from prfaas.core.scheduling.decision import Decision, PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.policy import Policy, policy_named
from prfaas.core.scheduling.view import UNKNOWN_SLOT_S, LinkView, NoDecodeInstanceError

from .views import NOW_S, board, decoder, every_policy, kv_bytes, link, prefiller, small

LOCAL = policy_named("local_only")
STATIC = policy_named("static_threshold", threshold_tokens=1000)
OFFLOADING = [policy for name, policy in every_policy().items() if name not in ("local_only", "round_robin")]
THRESHOLDS = [policy_named("paper"), policy_named("tilted"), STATIC]


@pytest.mark.parametrize("policy", THRESHOLDS, ids=lambda p: p.name)
def test_longer_than_the_threshold_goes_away_and_the_threshold_itself_stays(policy: Policy) -> None:
    assert policy.decide(RoutingRequest(1001), small()).route is Route.OFFLOAD
    decision = policy.decide(RoutingRequest(1000), small())
    assert (decision.route, decision.prefill, decision.decode) == (Route.LOCAL, "prefill", "decode")
    assert decision.reason == "short"


@pytest.mark.parametrize("policy", THRESHOLDS, ids=lambda p: p.name)
def test_what_the_pd_prefill_instance_holds_is_not_counted(policy: Policy) -> None:
    decision = policy.decide(RoutingRequest(2000, {"prefill": PrefixHit(1536, 1536)}), small())
    assert (decision.route, decision.uncached_tokens, decision.prefill_tokens) == (Route.LOCAL, 464, 464)


@pytest.mark.parametrize("policy", THRESHOLDS, ids=lambda p: p.name)
def test_attention_blocks_of_a_hybrid_decode_instance_spare_bytes_only(policy: Policy) -> None:
    decision = policy.decide(RoutingRequest(2000, {"decode": PrefixHit(0, 1536)}), small())
    assert (decision.route, decision.uncached_tokens, decision.skip_tokens) == (Route.OFFLOAD, 2000, 1536)


def test_with_sliding_windows_nothing_is_skipped() -> None:
    request = RoutingRequest(2000, {"decode": PrefixHit(0, 1536)})
    assert STATIC.decide(request, small(can_skip=False)).skip_tokens == 0


@pytest.mark.parametrize("policy", THRESHOLDS, ids=lambda p: p.name)
def test_a_decode_instance_that_can_reuse_most_prefills_the_rest_itself(policy: Policy) -> None:
    decision = policy.decide(RoutingRequest(2000, {"decode": PrefixHit(1536, 1536)}), small(hybrid=False))
    assert (decision.route, decision.prefill, decision.reason) == (Route.LOCAL, "decode", "held-by-decode")
    assert (decision.uncached_tokens, decision.skip_tokens, decision.transfers) == (464, 0, False)


def test_it_does_not_when_the_answers_there_would_lose_more() -> None:
    """Each token of its answers comes later by what it prefills: here a second of 464 tokens in place of 2,000."""

    def decided(answers: int) -> str | None:
        busy = board(
            prefiller("prefill"), decoder("decode", decoding=answers), prefill_s=lambda tokens: tokens / 1000
        )
        return LOCAL.decide(RoutingRequest(2000, {"decode": PrefixHit(1536, 1536)}), busy).prefill

    assert [decided(answers) for answers in (0, 3, 4)] == ["decode", "decode", "prefill"]


def test_what_new_tokens_attend_to_in_a_cached_prefix_is_counted() -> None:
    """1,000 tokens behind 31,000 take what 32,000 take longer than 31,000, at the instance that holds those."""

    def dense_s(tokens: float) -> float:
        return tokens**2 / 1e8

    def decided(queue_s: float) -> Decision:
        there, idle = prefiller("holds", busy_until_s=NOW_S + queue_s), prefiller("idle")
        view = board(there, idle, decoder("decode"), prefill_s=dense_s)
        return LOCAL.decide(RoutingRequest(32_000, {"holds": PrefixHit(31_000, 31_000)}), view)

    behind_s = dense_s(32_000) - dense_s(31_000)
    assert behind_s == pytest.approx(0.63)
    decision = decided(0.0)
    assert (decision.prefill, decision.prefill_tokens, decision.reused_tokens) == ("holds", 1000, 31_000)
    assert decision.predicted_ttft_s == pytest.approx(behind_s)
    # 10.24 s for the whole prompt elsewhere: it waits for the one that holds most of it as long as that spares.
    assert decided(10.24 - 0.63 - 0.01).prefill == "holds"
    assert decided(10.24 - 0.63 + 0.01).prefill == "idle"


def test_it_does_not_when_its_own_queue_would_take_longer() -> None:
    busy = board(prefiller("prefill"), decoder("decode", busy_until_s=NOW_S + 60))
    assert STATIC.decide(RoutingRequest(1200, {"decode": PrefixHit(1024, 1024)}), busy).prefill == "prefill"


def test_a_decode_instance_that_can_reuse_little_only_spares_bytes() -> None:
    decision = STATIC.decide(RoutingRequest(2000, {"decode": PrefixHit(512, 512)}), small(hybrid=False))
    assert (decision.route, decision.skip_tokens, decision.uncached_tokens) == (Route.OFFLOAD, 512, 2000)


@pytest.mark.parametrize("policy", OFFLOADING, ids=lambda p: p.name)
@pytest.mark.parametrize("state", [{"healthy": False}, {"draining": True}, None], ids=str)
def test_without_a_remote_instance_a_long_prompt_stays(policy: Policy, state: dict[str, bool] | None) -> None:
    remote = [prefiller("remote", "far", **state)] if state else []
    decision = policy.decide(RoutingRequest(5000), board(*remote, prefiller("prefill"), decoder("decode")))
    assert decision.prefill == "prefill"
    assert decision.reason in ("no-prfaas-instance", "soonest")


@pytest.mark.parametrize("policy", every_policy().values(), ids=lambda p: p.name)
@pytest.mark.parametrize(
    "links", [[], [link("pd", "far")], [link("far", "pd", up=False)], [link("far", "pd", 0.0)]], ids=str
)
def test_without_a_link_everything_stays(policy: Policy, links: list[LinkView]) -> None:
    decision = policy.decide(RoutingRequest(5000), small(links=links))
    assert decision.route is Route.LOCAL
    assert decision.reason in ("no-link", "always", "soonest", "turn")


@pytest.mark.parametrize("policy", every_policy().values(), ids=lambda p: p.name)
def test_a_single_token_goes_straight_to_the_decode_instance(policy: Policy) -> None:
    for num_tokens in (0, 1):
        decision = policy.decide(RoutingRequest(num_tokens), small(threshold=0))
        assert (decision.prefill, decision.decode, decision.reason) == ("decode", "decode", "single-token")


@pytest.mark.parametrize("policy", every_policy().values(), ids=lambda p: p.name)
def test_without_a_prefill_instance_the_decode_instance_prefills(policy: Policy) -> None:
    decision = policy.decide(RoutingRequest(500), board(decoder("decode")))
    assert (decision.prefill, decision.route) == ("decode", Route.LOCAL)
    assert decision.reason in ("no-prefill-instance", "turn")


@pytest.mark.parametrize("policy", every_policy().values(), ids=lambda p: p.name)
def test_an_instance_with_both_roles_never_sends_to_itself(policy: Policy) -> None:
    both = decoder("both")
    both.prefills = True
    view = board(both, threshold=math.inf)
    assert not policy.decide(RoutingRequest(500), view).transfers


def test_an_idle_instance_with_both_roles_needs_no_other() -> None:
    other, both = prefiller("other"), decoder("both")
    both.prefills = True
    view = board(other, both)
    assert STATIC.decide(RoutingRequest(500), view).prefill == "both"
    both.busy_until_s = NOW_S + 1
    assert STATIC.decide(RoutingRequest(500), view).prefill == "other"


@pytest.mark.parametrize("policy", every_policy().values(), ids=lambda p: p.name)
def test_a_suspect_or_drained_decode_instance_is_used_when_there_is_no_other(policy: Policy) -> None:
    suspect, drained = decoder("suspect", healthy=False), decoder("drained", draining=True)
    assert policy.decide(RoutingRequest(5), board(suspect)).decode == "suspect"
    assert policy.decide(RoutingRequest(5), board(suspect, drained)).decode == "drained"
    assert policy.decide(RoutingRequest(5), board(suspect, drained, decoder("well"))).decode == "well"
    with pytest.raises(NoDecodeInstanceError):
        policy.decide(RoutingRequest(5), board(suspect).without(["suspect"]))
    with pytest.raises(NoDecodeInstanceError):
        policy.decide(RoutingRequest(5), board(prefiller("remote", "far")))


@pytest.mark.parametrize("policy", every_policy().values(), ids=lambda p: p.name)
def test_a_prefill_instance_decodes_when_nothing_else_is_well(policy: Policy) -> None:
    suspect, drained = decoder("suspect", healthy=False), decoder("drained", draining=True)
    lent, remote = prefiller("lent"), prefiller("remote", "far")
    assert policy.decide(RoutingRequest(5), board(remote, suspect, lent)).decode == "lent"
    assert policy.decide(RoutingRequest(5), board(remote, suspect, lent, drained)).decode == "drained"
    assert policy.decide(RoutingRequest(5000), board(remote, suspect, lent)).decode == "lent"
    lent.healthy = False
    assert policy.decide(RoutingRequest(5), board(remote, suspect, lent)).decode == "suspect"


def test_decode_is_cache_affine_until_the_load_outweighs_the_share_it_holds() -> None:
    a, b, c = decoder("a", decoding=2), decoder("b", decoding=1), decoder("c", decoding=1)
    view = board(a, b, c)
    assert STATIC.decide(RoutingRequest(900, {"a": PrefixHit(0, 256)}), view).decode == "a"
    assert STATIC.decide(RoutingRequest(900), view).decode == "b"
    b.in_flight = 1
    assert STATIC.decide(RoutingRequest(900), view).decode == "c"
    # a holds 256/900 of the prompt: worth 4.5 of 16 slots more than the others.
    a.decoding = 6
    assert STATIC.decide(RoutingRequest(900, {"a": PrefixHit(0, 256)}), view).decode == "c"


def test_a_decode_instance_without_a_free_slot_comes_last() -> None:
    full, light = decoder("full", decoding=16), decoder("light", decoding=15)
    request = RoutingRequest(900, {"full": PrefixHit(0, 768)})
    assert STATIC.decide(request, board(full, light)).decode == "light"
    light.decoding = 17
    assert STATIC.decide(request, board(full, light)).decode == "full"


def test_prefill_is_cache_affine_until_its_queue_costs_more_than_it_saves() -> None:
    affine, idle = prefiller("affine"), prefiller("idle")
    view = board(idle, affine, decoder("decode"), threshold=math.inf)
    request = RoutingRequest(12_000, {"affine": PrefixHit(10_000, 10_000)})
    assert policy_named("paper").decide(request, view).prefill == "affine"
    affine.busy_until_s = NOW_S + 0.99  # 10,000 tokens take 1 s
    assert policy_named("paper").decide(request, view).prefill == "affine"
    affine.busy_until_s = NOW_S + 1.01
    decision = policy_named("paper").decide(request, view)
    assert (decision.prefill, decision.prefill_tokens, decision.uncached_tokens) == ("idle", 12_000, 2_000)


def test_equal_prefill_instances_take_turns_by_what_is_open_there() -> None:
    first, second = prefiller("first", in_flight=1), prefiller("second")
    view = board(first, second, decoder("decode"))
    assert STATIC.decide(RoutingRequest(200), view).prefill == "second"
    second.in_flight = 1
    assert STATIC.decide(RoutingRequest(200), view).prefill == "first"


@pytest.mark.parametrize("policy", OFFLOADING, ids=lambda p: p.name)
def test_of_two_prfaas_clusters_the_one_that_delivers_sooner(policy: Policy) -> None:
    links = [link("far1", "pd", 1e8), link("far2", "pd", 1e11)]
    instances = [prefiller("slow-line", "far1"), prefiller("fast-line", "far2")]
    view = board(
        *instances, prefiller("p", busy_until_s=NOW_S + 900), decoder("d"), links=links, threshold=50
    )
    assert policy.decide(RoutingRequest(20_000), view).prefill == "fast-line"


@pytest.mark.parametrize("policy", every_policy().values(), ids=lambda p: p.name)
def test_of_two_pd_clusters_the_one_with_the_sooner_first_token(policy: Policy) -> None:
    if policy.name == "round_robin":
        return
    view = board(
        prefiller("p1", "pd1", busy_until_s=NOW_S + 5),
        decoder("d1", "pd1"),
        prefiller("p2", "pd2"),
        decoder("d2", "pd2"),
        links=[],
    )
    assert policy.decide(RoutingRequest(2000), view).decode == "d2"
    view.clusters["pd2"].instances[1].decoding = 16
    # A slot is free sooner there than the other cluster's prefill can begin.
    assert policy.decide(RoutingRequest(2000), view).decode == "d2"
    view.clusters["pd2"].instances[1].decoding = 20
    assert policy.decide(RoutingRequest(2000), view).decode == "d1"
    view.clusters["pd1"].instances[1].decoding = 21
    decision = policy.decide(RoutingRequest(2000), view)
    assert (decision.decode, decision.predicted_ttft_s) == ("d2", pytest.approx(0.3))
    assert decision.decode_wait_s == pytest.approx(5 * UNKNOWN_SLOT_S / 16 - 0.3)


def test_a_cached_prefix_draws_a_request_to_its_pd_cluster() -> None:
    view = board(
        prefiller("p1", "pd1"), decoder("d1", "pd1"), prefiller("p2", "pd2"), decoder("d2", "pd2"), links=[]
    )
    decision = policy_named("paper").decide(RoutingRequest(9000, {"p2": PrefixHit(8192, 8192)}), view)
    assert (decision.prefill, decision.decode, decision.prefill_tokens) == ("p2", "d2", 808)


def test_the_predicted_ttft_is_wait_prefill_and_what_of_the_transfer_is_not_hidden() -> None:
    view = small(links=[link("far", "pd", 1e9, rtt_s=0.05)])
    line = view.links["far", "pd"]
    decision = STATIC.decide(RoutingRequest(10_000), view)
    kv = kv_bytes(10_000, 0) * 8 / 1e9
    assert kv > 1.1  # the transfer is the slower of the two
    assert decision.predicted_ttft_s == pytest.approx(kv + 0.05)
    line.drained_s = NOW_S + 3
    assert STATIC.decide(RoutingRequest(10_000), view).predicted_ttft_s == pytest.approx(3 + kv + 0.05)
    line.capacity_bits_per_s, line.drained_s = 1e11, NOW_S - 3
    view.clusters["far"].instances[0].busy_until_s = NOW_S + 2
    assert STATIC.decide(RoutingRequest(10_000), view).predicted_ttft_s == pytest.approx(2 + 1.1 + 0.05)
    assert STATIC.decide(RoutingRequest(900), view).predicted_ttft_s == pytest.approx(0.19)


def test_bytes_that_are_skipped_take_no_time() -> None:
    links = [link("far", "pd", 1e8)]
    request = RoutingRequest(10_000, {"decode": PrefixHit(0, 8_192)})

    def predicted(can_skip: bool) -> float:
        return STATIC.decide(request, small(links=links, can_skip=can_skip)).predicted_ttft_s

    assert predicted(False) == pytest.approx(kv_bytes(10_000, 0) * 8 / 1e8)
    assert predicted(True) == pytest.approx(kv_bytes(10_000, 8_192) * 8 / 1e8)


@pytest.mark.parametrize("policy", [*OFFLOADING, STATIC], ids=lambda p: p.name)
@pytest.mark.parametrize(("tokens", "reason"), [(5, "tiny"), (100, "tiny"), (101, None)])
def test_a_prompt_so_short_that_its_states_weigh_more_stays_where_it_decodes(
    policy: Policy, tokens: int, reason: str | None
) -> None:
    view = board(prefiller("remote", "far"), prefiller("near"), decoder("decode"))
    decision = policy.decide(RoutingRequest(tokens), view)
    assert (decision.reason == "tiny") is (reason == "tiny")
    assert (decision.prefill == "decode", decision.kv_bytes == 0) == (reason == "tiny",) * 2


def test_a_tiny_prompt_moves_when_its_decode_instance_is_busy_prefilling() -> None:
    view = board(prefiller("near"), decoder("decode", busy_until_s=NOW_S + 5))
    assert STATIC.decide(RoutingRequest(5), view).prefill == "near"
