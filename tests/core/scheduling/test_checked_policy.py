"""Decisions that can't be carried out are found before anything follows them."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from msgspec import structs

from prfaas.core.scheduling.checked_policy import CheckedPolicy, UnsoundDecisionError, fault_of, instances_of
from prfaas.core.scheduling.decision import Decision, Route, RoutingRequest
from prfaas.core.scheduling.policy import make_policy
from prfaas.core.scheduling.view import View

from .test_routing_properties import Case, decided
from .views import cases, every_policy, small


class Changed:
    """Decides as offload_all, but for some fields."""

    def __init__(self, **changes: object) -> None:
        self.changes: dict[str, Any] = changes

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        return structs.replace(make_policy("offload_all").decide(request, view), **self.changes)


@given(cases())
def test_our_own_decisions_have_no_fault(case: Case) -> None:
    view, request = case
    for policy in every_policy().values():
        assert fault_of(decided(policy, request, view), request, view, instances_of(view)) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prefill": "nobody"}, 'there is no instance "nobody"'),
        ({"decode": "nobody"}, 'there is no instance "nobody"'),
        ({"decode": "remote"}, "remote is in no pd cluster"),
        ({"prefill": "decode"}, "route offload does not fit decode and decode"),
        ({"route": Route.LOCAL}, "route local does not fit remote and decode"),
        ({"skip_tokens": 1}, "skip_tokens must be a whole number from 0 to 0, not 1"),
        ({"prefill_tokens": 9001}, "prefill_tokens must be a whole number from 0 to 9000"),
        ({"uncached_tokens": 0.5}, "uncached_tokens must be a whole number"),
        ({"kv_bytes": -1}, "kv_bytes must be"),
        ({"predicted_ttft_s": math.nan}, "predicted_ttft_s must be a number from 0 on, not nan"),
        ({"threshold_tokens": None}, "threshold_tokens must be a number"),
        ({"reason": "Two words"}, "is no lower-case word"),
        ({"reason": None}, "reason None is no lower-case word"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UnsoundDecisionError, match="the decision for a prompt of 9000 tokens: ") as caught:
        CheckedPolicy(Changed(**changes)).decide(RoutingRequest(9000), small())
    assert sentence in str(caught.value)


def test_who_must_not_be_used_is_refused() -> None:
    policy = CheckedPolicy(make_policy("offload_all"))
    view, request = small(), RoutingRequest(9000)
    as_before = policy.decide(request, view)
    always = CheckedPolicy(Fixed(as_before))
    assert always.decide(request, view) == as_before
    for change, sentence in (
        ({"avoid": frozenset(["remote"])}, "remote must not be used now"),
        ({"blocked": frozenset([("remote", "decode")])}, "decode takes no KVCache from remote"),
        ({"links": {}}, "no usable link leads from far to pd"),
    ):
        with pytest.raises(UnsoundDecisionError, match=sentence):
            always.decide(request, replace(view, **change))
    view.clusters["far"].instances[0].healthy = False
    with pytest.raises(UnsoundDecisionError, match="remote takes no prefills now"):
        always.decide(request, view)


def test_no_decision_at_all_is_refused() -> None:
    with pytest.raises(UnsoundDecisionError, match="it is a NoneType, not a Decision"):
        CheckedPolicy(Fixed(None)).decide(RoutingRequest(9000), small())


def test_reasons_stay_few() -> None:
    policy, request, view = Changed(), RoutingRequest(9000), small()
    checked = CheckedPolicy(policy)
    for number in range(32):
        policy.changes = {"reason": f"reason-{number}"}
        checked.decide(request, view)
    policy.changes = {"reason": "reason-32"}
    with pytest.raises(UnsoundDecisionError, match="more than 32"):
        checked.decide(request, view)
    policy.changes = {"reason": "reason-3"}
    checked.decide(request, view)


class Fixed:
    def __init__(self, decision: Any) -> None:
        self.decision = decision

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        return self.decision  # type: ignore[no-any-return]
