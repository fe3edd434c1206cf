"""What the pools of machines change in a decision, and that nothing changes without them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from prfaas.core.scheduling.decision import NOTHING, Decision, PoolHit, PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.policy import policy_named
from prfaas.core.scheduling.tiers import loading_s, pool_at, reading_s, with_pools
from prfaas.core.scheduling.view import InstanceView, PoolView, View

from .test_routing_properties import decided
from .views import board, cases, decoder, every_policy, kv_bytes, linear_s, pooled_cases, prefiller

PAPER = policy_named("paper")


def in_memory(tokens: int) -> PoolHit:
    return PoolHit(PrefixHit(tokens, tokens), PrefixHit(tokens, tokens))


def on_ssd(tokens: int) -> PoolHit:
    return PoolHit(PrefixHit(tokens, tokens), NOTHING)


def pool(name: str, cluster: str, *instances: str, **speeds: float) -> PoolView:
    return PoolView(name, cluster, instances, **speeds)


def pooled_board(**facts: object) -> View:
    """One machine of each kind of instance, with a pool each but the last."""
    view = board(
        prefiller("remote", "far"), prefiller("prefill"), prefiller("other"), decoder("decode"), **facts
    )  # type: ignore[arg-type]
    pools = [pool("far", "far", "remote"), pool("one", "pd", "prefill", "decode"), pool("two", "pd", "other")]
    return replace(view, pools={each.name: each for each in pools})


# ---- Without pools


@given(cases())
def test_without_pools_it_is_the_plain_request(case: tuple[View, RoutingRequest]) -> None:
    view, request = case
    assert with_pools(request.num_tokens, request.held, {}, view, request.ordinal) == request


@given(cases())
def test_instances_without_pools_are_chosen_as_ever(case: tuple[View, RoutingRequest]) -> None:
    """Whoever looks at loads and copies, but finds none, decides as one who does not look."""
    view, request = case
    looking = structs.replace(request, loads_s={"nobody": 1.0})
    for policy in every_policy().values():
        assert decided(policy, looking, view) == decided(policy, request, view)


@given(pooled_cases())
def test_pools_that_hold_nothing_change_nothing(case: tuple[View, RoutingRequest, RoutingRequest]) -> None:
    view, _, plain = case
    request = with_pools(plain.num_tokens, plain.held, {}, view, plain.ordinal)
    bare = replace(view, pools={})
    for policy in every_policy().values():
        assert decided(policy, request, view) == decided(policy, plain, bare)


# ---- Whatever pools hold


@pytest.mark.slow("a property over many random systems")
@given(pooled_cases())
def test_nothing_is_loaded_where_computing_is_faster(
    case: tuple[View, RoutingRequest, RoutingRequest],
) -> None:
    view, request, plain = case
    for cluster in view.clusters.values():
        for each in cluster.instances:
            own, here = plain.held.get(each.name, NOTHING), request.held.get(each.name, NOTHING)
            at = pool_at(view, each.name)
            there = NOTHING
            if at is not None and at.name in request.pools:
                there = request.pools[at.name].every_tier
            assert here.attention_tokens == max(own.attention_tokens, there.attention_tokens)
            assert here.reusable_tokens in (own.reusable_tokens, there.reusable_tokens)
            load_s = request.loads_s.get(each.name, 0.0)
            prefill_s = cluster.prefill_s(request.num_tokens - request.reusable_at(each.name))
            assert load_s + prefill_s <= cluster.prefill_s(plain.num_tokens - plain.reusable_at(each.name))
            copy = request.copies.get(each.name)
            if copy is not None:
                copied_s = copy.copy_s + copy.load_s + cluster.prefill_s(request.num_tokens - copy.num_tokens)
                assert copied_s < load_s + prefill_s
                assert view.pools[copy.source].cluster == cluster.name and copy.source != at.name  # type: ignore[union-attr]
                assert copy.num_tokens == request.pools[copy.source].every_tier.reusable_tokens


@given(pooled_cases())
def test_every_decision_with_pools_can_be_carried_out(
    case: tuple[View, RoutingRequest, RoutingRequest],
) -> None:
    view, request, _ = case
    for policy in every_policy().values():
        check(decided(policy, request, view), request, view)


def check(decision: Decision, request: RoutingRequest, view: View) -> None:
    assert 0.0 <= decision.load_s <= decision.predicted_ttft_s < math.inf
    assert (decision.pools or {}) == request.pools
    assert decision.skip_tokens <= request.attention_at(decision.decode)
    moved, reused = decision.cache_transfer, request.num_tokens - decision.prefill_tokens
    assert (decision.hit is None) == (not request.pools)
    if decision.hit is not None:
        assert sum(decision.hit) == reused and min(decision.hit) >= 0
        assert moved is not None or decision.hit.moved == 0
        assert decision.load_s > 0 or moved is not None or decision.hit.own == reused
    if moved is None:
        assert reused == request.reusable_at(decision.prefill)
        assert decision.load_s == request.loads_s.get(decision.prefill, 0.0)
        return
    assert decision.transfers
    assert reused == moved.reusable_tokens > request.reusable_at(decision.prefill)
    assert moved.skip_tokens == 0 or view.kv.can_skip
    if not moved.from_pool:
        assert moved.source not in view.pools
        return
    source, target = view.pools[moved.source], pool_at(view, decision.prefill)
    assert target is not None and source.up and source is not target
    assert moved.num_tokens == request.pools[source.name].every_tier.reusable_tokens <= request.num_tokens - 2
    at_target = request.pools.get(target.name)
    assert moved.skip_tokens <= (0 if at_target is None else at_target.every_tier.attention_tokens)
    if source.cluster != target.cluster:
        link = view.links[source.cluster, target.cluster]
        assert link.up and view.now_s - link.seen_s <= view.stale_after_s


@given(pooled_cases(), st.integers(0, 40_000))
def test_loading_takes_longer_from_slower_tiers(
    case: tuple[View, RoutingRequest, RoutingRequest], own: int
) -> None:
    view, request, _ = case
    for name, hit in request.pools.items():
        at, end = view.pools[name], hit.every_tier.reusable_tokens
        everything = PoolHit(hit.every_tier, hit.every_tier)
        least_s, most_s = (loading_s(view.kv, at, each, end, own) for each in (everything, on_ssd(end)))
        assert least_s <= loading_s(view.kv, at, hit, end, own) <= most_s + 1e-12
        assert reading_s(view.kv, at, everything, end, 0) == 0.0


# ---- What it is for


def test_a_repeated_prompt_crosses_with_states_and_tail_only() -> None:
    """16K tokens that the decode side's pool holds: PrfaaS starts from its own pool and sends the rest."""
    view = pooled_board(threshold=1000.0)
    hits = {"far": in_memory(15_872), "one": PoolHit(PrefixHit(0, 15_872), PrefixHit(0, 15_872))}
    request = with_pools(16_000, {}, hits, view)
    decision = policy_named("offload_all").decide(request, view)
    assert (decision.route, decision.prefill, decision.prefill_tokens) == (Route.OFFLOAD, "remote", 128)
    assert (decision.skip_tokens, decision.kv_bytes) == (15_872, kv_bytes(16_000, 15_872))
    assert decision.load_s == pytest.approx(kv_bytes(15_872, 0) / 8e9)
    # Or the states come from pool to pool, and the rest is computed here.
    moved = PAPER.decide(request, view).cache_transfer
    assert moved is not None and moved.from_pool
    assert (moved.skip_tokens, moved.kv_bytes) == (15_872, kv_bytes(15_872, 15_872))


def test_what_the_machine_holds_is_loaded_and_counts_as_held() -> None:
    view = pooled_board()
    decision = PAPER.decide(with_pools(20_000, {}, {"one": in_memory(19_456)}, view), view)
    # Both instances of the machine hold it; the one that decodes needs no transfer.
    assert (decision.route, decision.uncached_tokens) == (Route.LOCAL, 544)
    assert decision.prefill == decision.decode == "decode" and decision.reason == "held-by-decode"
    assert decision.predicted_ttft_s == pytest.approx(decision.load_s + linear_s(544))


def test_a_tier_that_is_slower_than_computing_is_not_loaded_from() -> None:
    view = pooled_board()
    view.pools["one"].ssd_bits_per_s = 1e8
    request = with_pools(20_000, {}, {"one": on_ssd(19_456)}, view)
    assert request.reusable_at("prefill") == 0 and request.attention_at("decode") == 19_456
    assert not request.loads_s
    view.pools["one"].ssd_bits_per_s = 12e9
    assert with_pools(20_000, {}, {"one": on_ssd(19_456)}, view).reusable_at("prefill") == 19_456


def test_a_machine_reads_what_another_one_of_its_cluster_holds() -> None:
    view = pooled_board(threshold=math.inf)
    view.clusters["pd"].instances[1].busy_until_s = view.now_s + 100.0
    decision = PAPER.decide(with_pools(20_000, {}, {"two": in_memory(19_456)}, view), view)
    moved = decision.cache_transfer
    assert moved is not None and (moved.source, moved.from_pool) == ("two", True)
    assert (decision.prefill, decision.prefill_tokens, moved.num_tokens) == ("prefill", 544, 19_456)
    assert moved.kv_bytes == kv_bytes(19_456, 0)
    copy_s = 0.005 + moved.kv_bytes * 8 / 10e9
    assert decision.predicted_ttft_s == pytest.approx(copy_s + decision.load_s + linear_s(544))
    # Over a slow network computing is faster.
    view.pools["two"].network_bits_per_s = 1e8
    decision = PAPER.decide(with_pools(20_000, {}, {"two": in_memory(19_456)}, view), view)
    assert decision.cache_transfer is None and decision.prefill_tokens == 20_000


def test_the_holder_itself_is_taken_where_it_is_free() -> None:
    view = pooled_board(threshold=math.inf)
    decision = PAPER.decide(with_pools(20_000, {}, {"two": in_memory(19_456)}, view), view)
    assert (decision.prefill, decision.cache_transfer) == ("other", None)


def test_only_what_is_missing_is_copied() -> None:
    view = pooled_board(threshold=math.inf)
    view.clusters["pd"].instances[1].busy_until_s = view.now_s + 100.0
    hits = {"one": in_memory(4096), "two": in_memory(19_456)}
    moved = PAPER.decide(with_pools(20_000, {}, hits, view), view).cache_transfer
    assert moved is not None and (moved.skip_tokens, moved.kv_bytes) == (4096, kv_bytes(19_456, 4096))


def test_caches_cross_from_pool_to_pool_where_bandwidth_is_abundant() -> None:
    view = pooled_board(threshold=1000.0)
    decision = PAPER.decide(with_pools(20_000, {}, {"far": in_memory(19_456)}, view), view)
    moved = decision.cache_transfer
    assert decision.route is Route.LOCAL and decision.uncached_tokens == 544
    assert moved is not None and (moved.source, moved.from_pool) == ("far", True)
    assert (moved.num_tokens, moved.reusable_tokens, decision.prefill_tokens) == (19_456, 19_456, 544)
    # An instance without a pool behind it gets it from an instance that loads it first.
    view = replace(view, pools={"far": view.pools["far"]})
    moved = PAPER.decide(with_pools(20_000, {}, {"far": in_memory(19_456)}, view), view).cache_transfer
    assert moved is not None and (moved.source, moved.from_pool) == ("remote", False)


def test_between_unlike_dtypes_only_engines_send() -> None:
    view = pooled_board(threshold=1000.0)
    for link in view.links.values():
        link.joins_pools = False
    moved = PAPER.decide(with_pools(20_000, {}, {"far": in_memory(19_456)}, view), view).cache_transfer
    assert moved is not None and (moved.source, moved.from_pool) == ("remote", False)


def test_a_pool_that_does_not_answer_holds_nothing() -> None:
    view = pooled_board()
    view.pools["one"].up = False
    assert with_pools(20_000, {}, {"one": in_memory(19_456)}, view) == RoutingRequest(20_000)


def test_an_engines_own_blocks_spare_no_bytes_between_pools() -> None:
    view = pooled_board(threshold=1000.0)
    own = {"prefill": PrefixHit(0, 8192)}
    moved = PAPER.decide(with_pools(20_000, own, {"far": in_memory(19_456)}, view), view).cache_transfer
    assert moved is not None and moved.from_pool and moved.skip_tokens == 0


def test_an_instance_that_prefills_what_it_decodes_has_nothing_copied() -> None:
    both = InstanceView("both", "pd", prefills=True, decodes=True)
    view = board(both, prefiller("other", busy_until_s=1e6), threshold=math.inf)
    view.pools = {"one": pool("one", "pd", "both"), "two": pool("two", "pd", "other")}
    request = with_pools(20_000, {}, {"two": in_memory(19_456)}, view)
    assert "both" in request.copies
    decision = PAPER.decide(request, view)
    assert (decision.prefill, decision.prefill_tokens) == ("both", 20_000)
    assert decision.cache_transfer is None and not decision.transfers


def test_of_two_that_are_done_together_the_longer_prefix_is_taken() -> None:
    view = pooled_board(threshold=math.inf)
    tokens, length = 10_000, 20_000
    view.clusters["pd"].prefill_s = lambda tokens: 1.0 if tokens else 0.0
    view.pools["one"].memory_bits_per_s = math.inf
    held = {"prefill": PrefixHit(0, 0), "other": PrefixHit(tokens, tokens)}
    request = structs.replace(with_pools(length, held, {}, view), loads_s={"nobody": 1.0})
    assert PAPER.decide(request, view).prefill == "other"
