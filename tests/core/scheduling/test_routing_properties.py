"""What holds of every policy on every board."""

import copy
import math
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from prfaas.core.scheduling.candidates import LONGEST_TINY_TOKENS
from prfaas.core.scheduling.decision import Decision, KvFacts, PrefixHit, Route, RoutingRequest
from prfaas.core.scheduling.policy import Policy, policy_named
from prfaas.core.scheduling.view import ClusterView, InstanceView, NoDecodeInstanceError, View

from .views import Curve, cases, curves, every_policy, relabelled, renamed

Case = tuple[View, RoutingRequest]


def decided(policy: Policy, request: RoutingRequest, view: View) -> Decision:
    try:
        return policy.decide(request, view)
    except NoDecodeInstanceError:
        decoders = [i for c in view.clusters.values() if c.kind == "pd" for i in c.instances if i.decodes]
        assert all(each.name in view.avoid for each in decoders)
        assume(False)
        raise


def frozen(view: View) -> object:
    facts = (view.clusters, view.links, view.threshold_tokens, view.now_s, view.avoid, view.blocked)
    return copy.deepcopy(facts)


@given(cases())
def test_a_decision_depends_on_nothing_else_and_changes_nothing(case: Case) -> None:
    view, request = case
    before = frozen(view)
    twin_view, twin_request = copy.deepcopy(case)
    for policy, twin in zip(every_policy().values(), every_policy().values(), strict=True):
        first = decided(policy, request, view)
        assert frozen(view) == before
        assert decided(twin, twin_request, twin_view) == first == decided(policy, request, view)


@given(cases())
def test_other_names_give_the_same_decision_by_other_names(case: Case) -> None:
    view, request = case
    other_view, other_request = relabelled(view, request, "z")
    for policy in every_policy().values():
        decision = decided(policy, request, view)
        assert policy.decide(other_request, other_view) == renamed(decision, "z")


@given(cases())
def test_every_decision_can_be_carried_out(case: Case) -> None:
    view, request = case
    for policy in every_policy().values():
        check(decided(policy, request, view), request, view)


@given(cases(), st.data())
def test_an_instance_that_an_operator_has_closed_gets_nothing(case: Case, data: st.DataObject) -> None:
    """Not even as a last resort."""
    view, request = case
    instances = [each for cluster in view.clusters.values() for each in cluster.instances]
    for each in data.draw(st.lists(st.sampled_from(instances), max_size=len(instances))):
        each.closed = True
        assert not (each.takes_prefills or each.takes_decodes or each.available)
    closed = {each.name for each in instances if each.closed}
    for policy in every_policy().values():
        try:
            decision = policy.decide(request, view)
        except NoDecodeInstanceError:
            pd = {each.name for c in view.clusters.values() if c.kind == "pd" for each in c.instances}
            assert pd <= closed | view.avoid
        else:
            source = decision.cache_transfer.source if decision.cache_transfer is not None else None
            assert not {decision.prefill, decision.decode, source} & closed


@given(cases())
def test_nothing_is_called_busy_where_nothing_is(case: Case) -> None:
    view, request = case
    for cluster in view.clusters.values():
        for each in cluster.instances:
            each.busy_until_s, each.decoding = view.now_s, 0
    for link in view.links.values():
        link.drained_s = link.seen_s = view.now_s
        link.egress_bits_per_s = link.congestion = 0.0
    for policy in every_policy().values():
        assert "busy" not in decided(policy, request, view).reason


def check(decision: Decision, request: RoutingRequest, view: View) -> None:
    instances = {each.name: (each, c) for c in view.clusters.values() for each in c.instances}
    (decode, pd), (prefill, at) = instances[decision.decode], instances[decision.prefill]
    last = max(request.num_tokens - 1, 0)
    nothing = PrefixHit(0, 0)

    assert pd.kind == "pd" and decode.name not in view.avoid
    if not decode.healthy or decode.draining or not decode.decodes:
        others = [each for each, c in instances.values() if c.kind == "pd" and each.decodes]
        assert not any(is_well(each, view) for each in others)
    if decision.transfers:
        # Whatever else there is to choose from, the decode instance can always prefill.
        assert (prefill.name, decode.name) not in view.blocked
        assert prefill.prefills and is_well(prefill, view) and request.num_tokens > 1
    if decision.route is Route.OFFLOAD:
        assert at.kind == "prfaas"
        check_link(view, at, pd)
    else:
        assert at is pd

    assert 0 <= decision.skip_tokens <= min(request.held.get(decode.name, nothing).attention_tokens, last)
    assert decision.skip_tokens == 0 or (decision.transfers and view.kv.can_skip)
    assert min(request.num_tokens, 1) <= decision.prefill_tokens <= request.num_tokens
    assert min(request.num_tokens, 1) <= decision.uncached_tokens <= request.num_tokens
    assert 0 <= decision.predicted_ttft_s < math.inf
    assert decision.threshold_tokens >= 0
    assert decision.reason

    moved, at_target = decision.cache_transfer, request.held.get(prefill.name, nothing)
    reused = request.num_tokens - decision.prefill_tokens
    if moved is None:
        assert reused == min(at_target.reusable_tokens, last)
        return
    source, origin = instances[moved.source]
    assert (source.name, prefill.name) not in view.blocked
    assert decision.transfers and source is not prefill
    assert is_well(source, view) or source is decode
    assert moved.num_tokens - 1 <= request.held[source.name].reusable_tokens
    assert moved.num_tokens <= request.num_tokens - 2
    assert at_target.reusable_tokens < reused == moved.num_tokens - 1
    assert 0 <= moved.skip_tokens <= min(at_target.attention_tokens, moved.num_tokens - 1)
    assert moved.skip_tokens == 0 or view.kv.can_skip
    check_link(view, origin, at)
    assert view.now_s - view.links[origin.name, at.name].seen_s <= view.stale_after_s


@given(cases(), st.integers(2, 2 * LONGEST_TINY_TOKENS), st.integers(0, 2**30))
def test_prompts_stay_where_they_decode_exactly_where_a_hop_costs_more_than_it_spares(
    case: Case, tokens: int, state_bytes: int
) -> None:
    view, _ = case
    request = RoutingRequest(tokens)
    for each in view.links.values():
        each.rtt_s = 0.02
    view = replace(view, kv=KvFacts(True, True, lambda *_: state_bytes, lambda *_: state_bytes))
    for policy in every_policy().values():
        decision = decided(policy, request, view)
        for cluster in view.clusters.values():
            for each in cluster.instances:
                if each.name == decision.decode:
                    decode, home = each, cluster
                if each.name == decision.prefill:
                    source = cluster
        there_s = max(decode.busy_until_s - view.now_s, 0.0) + home.prefill_s(tokens) - home.prefill_s(1)
        if decision.reason == "tiny":
            assert tokens <= LONGEST_TINY_TOKENS and decision.prefill == decision.decode
            assert (decision.kv_bytes, decision.cache_transfer, decision.urgency_s) == (0, None, None)
        elif decision.transfers and tokens <= LONGEST_TINY_TOKENS:
            hop_s = 0.005 + 8 * state_bytes / 1e10
            if source is not home:
                link = view.links[source.name, home.name]
                hop_s = link.rtt_s + 8 * state_bytes / link.capacity_bits_per_s
            assert there_s >= hop_s


def is_well(instance: InstanceView, view: View) -> bool:
    return instance.healthy and not instance.draining and instance.name not in view.avoid


def check_link(view: View, source: ClusterView, target: ClusterView) -> None:
    link = view.links[source.name, target.name]
    assert link.up and link.capacity_bits_per_s > 0
    assert view.now_s - link.seen_s <= 6 * view.stale_after_s


@given(cases(cached=False))
def test_without_caches_it_does_not_matter_whether_bandwidth_is_scarce(case: Case) -> None:
    view, request = case
    scarce = copy.deepcopy(view)
    for each in view.links.values():
        # Below every mark of queues and utilisation, on both sides of the marks of abundance.
        each.egress_bits_per_s, each.drained_s = 0.0, 0.0
    for each in scarce.links.values():
        each.egress_bits_per_s, each.drained_s = 0.7 * each.capacity_bits_per_s, 0.0
    for policy in every_policy().values():
        assert decided(policy, request, scarce) == decided(policy, request, view)


@given(case=cases(max_pd=1), longer=st.integers(1, 60_000))
def test_what_is_longer_is_offloaded_too_by_paper(case: Case, longer: int) -> None:
    view, request = case
    # All else equal: one decode instance, so that a longer prompt does not change what is spared where.
    assume(sum(i.decodes for c in view.clusters.values() if c.kind == "pd" for i in c.instances) == 1)
    policy = policy_named("paper")
    if decided(policy, request, view).route is Route.OFFLOAD:
        request = structs.replace(request, num_tokens=request.num_tokens + longer)
        assert decided(policy, request, view).route is Route.OFFLOAD


@given(
    case=cases(cached=False, max_pd=1),
    slow=curves,
    share=st.floats(0.05, 1),
    overhead=st.floats(0, 0.5),
    longer=st.integers(1, 60_000),
)
def test_what_is_longer_is_offloaded_too_by_tilted(
    case: Case, slow: Curve, share: float, overhead: float, longer: int
) -> None:
    """Where T_pd / T_prfaas and T_pd / S_kv rise with length, which is what makes a threshold right at all."""
    view, request = case
    fast = Curve(slow.c0 * share + overhead, slow.c1 * share, slow.c2 * share)
    for cluster in view.clusters.values():
        cluster.prefill_s = slow if cluster.kind == "pd" else fast
    bytes_per_s = kv_slope(slow)
    view.kv = replace(view.kv, bytes_to_move=lambda num, skip: int(bytes_per_s * (slow(num) + 0.5)))
    policy = policy_named("tilted")
    if decided(policy, request, view).route is Route.OFFLOAD:
        request = structs.replace(request, num_tokens=request.num_tokens + longer)
        assert decided(policy, request, view).route is Route.OFFLOAD


def kv_slope(curve: Curve) -> float:
    """Bytes per second of prefill, about 4 GB for 128K tokens."""
    return 4e9 / curve(131072)
