"""When a decode instance has a slot, how long answers keep theirs, and what follows from that for routes."""

import copy
import heapq
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from prfaas.core.scheduling.candidates import LONGEST_TINY_TOKENS
from prfaas.core.scheduling.decision import PrefixHit, RoutingRequest
from prfaas.core.scheduling.decoders import decode_choices, learnt_slot_s, slot_free_s
from prfaas.core.scheduling.policy import Policy
from prfaas.core.scheduling.view import NoDecodeInstanceError, View

from .views import board, cases, decoder, every_policy, prefiller


@given(st.integers(1, 40), st.integers(0, 60), st.floats(0.1, 100))
def test_a_slot_is_free_when_those_ahead_have_theirs(slots: int, waiting: int, slot_s: float) -> None:
    """Against slots of which one ends every `slot_s` / `slots` seconds."""
    ends_s = [(number + 1) * slot_s / slots for number in range(slots)]
    for _ in range(waiting):
        heapq.heapreplace(ends_s, ends_s[0] + slot_s)
    full = decoder("full", decoding=slots + waiting, decode_slots=slots)
    assert slot_free_s(full, slot_s) == pytest.approx(ends_s[0])
    assert slot_free_s(decoder("free", decoding=slots - 1, decode_slots=slots), slot_s) == 0.0


@given(st.floats(0, 100), st.floats(0.01, 100), st.integers(1, 50))
def test_what_is_learnt_goes_from_what_it_began_with_to_what_was_seen(
    prior_s: float, seen_s: float, answers: int
) -> None:
    slot_s = prior_s
    for _ in range(answers):
        slot_s = learnt_slot_s(slot_s, 1, seen_s)
        assert min(prior_s, seen_s) - 1e-9 <= slot_s <= max(prior_s, seen_s) + 1e-9
    together_s = learnt_slot_s(prior_s, answers, answers * seen_s)
    # A hundred answers weigh as much as what it began with, told one by one or together.
    assert abs(slot_s - together_s) <= 0.15 * abs(prior_s - seen_s) + 1e-9
    assert together_s == pytest.approx(prior_s + (seen_s - prior_s) * answers / (answers + 100))
    assert learnt_slot_s(seen_s, answers, answers * seen_s) == pytest.approx(seen_s)


def test_a_full_instance_keeps_a_long_prompt_that_it_holds_and_no_short_one() -> None:
    """Its slot is free in 1.6 s; the whole prefill takes 5.1 s or 0.2 s."""
    holder, other = decoder("holder", decoding=16), decoder("other", decoding=15)
    view = board(prefiller("prefill"), holder, other)
    for num_tokens, decode in ((50_000, holder), (1_000, other)):
        request = RoutingRequest(num_tokens, {"holder": PrefixHit(0, num_tokens // 2)})
        assert decode_choices(request, view) == [(view.clusters["pd"], decode)]
    # Without anything held, the soonest slot.
    assert decode_choices(RoutingRequest(50_000), view) == [(view.clusters["pd"], other)]


@given(cases(cached=False))
def test_without_caches_the_soonest_slot_decodes(case: tuple[View, RoutingRequest]) -> None:
    view, request = case
    try:
        chosen = {cluster.name: decode for cluster, decode in decode_choices(request, view)}
    except NoDecodeInstanceError:
        chosen = {}
    for cluster in view.clusters.values():
        able = [each for each in cluster.instances if each.takes_decodes and each.name not in view.avoid]
        if cluster.kind == "pd" and able:
            soonest_s = min(slot_free_s(each, cluster.slot_s) for each in able)
            assert slot_free_s(chosen[cluster.name], cluster.slot_s) == pytest.approx(soonest_s)


@pytest.mark.parametrize(
    "policy",
    # A round goes its own way.
    [policy for name, policy in every_policy().items() if name != "round_robin"],
    ids=lambda p: p.name,
)
@given(case=cases(cached=False), slot_s=st.sampled_from([0.0, 1.0, 25.6]))
def test_the_pd_cluster_with_the_soonest_first_token_is_taken(
    policy: Policy, case: tuple[View, RoutingRequest], slot_s: float
) -> None:
    """Against the decisions of the same policy for each PD cluster alone."""
    view, request = case
    # Of tiny prompts more is decided after the cluster.
    request = structs.replace(request, num_tokens=max(request.num_tokens, LONGEST_TINY_TOKENS + 1))
    for cluster in view.clusters.values():
        cluster.slot_s = slot_s
    try:
        decision = policy.decide(request, view)
        names = {cluster.name for cluster, _ in decode_choices(request, view)}
    except NoDecodeInstanceError:
        assume(False)
    alone = []
    for name in names:
        clusters = {
            other.name: other
            for other in view.clusters.values()
            if other.kind == "prfaas" or other.name == name
        }
        alone.append(policy.decide(request, replace(copy.copy(view), clusters=clusters)))
    first_s = decision.predicted_ttft_s + decision.decode_wait_s
    assert first_s == pytest.approx(min(each.predicted_ttft_s + each.decode_wait_s for each in alone))
