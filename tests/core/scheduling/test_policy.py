"""Policies by name or class, and their parameters."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.scheduling.views import small
from prfaas.core.scheduling.decision import Decision, Route, RoutingRequest
from prfaas.core.scheduling.parameters import Bounds, PolicyError, parameters_of
from prfaas.core.scheduling.policy import POLICIES, make_policy, policy_class
from prfaas.core.scheduling.view import View

HERE = "core.scheduling.test_policy"
NEEDED: dict[str, dict[str, object]] = {"static_threshold": {"threshold_tokens": 1000}}


@dataclass(frozen=True)
class Marks:
    queue_s: Annotated[float, Bounds("a queue", unit="s", least=0)] = 2.0


@dataclass(frozen=True)
class Own:
    marks: Marks
    least: int
    share: Annotated[float, Bounds("a share", above=0, most=1)] = 0.5
    eager: bool = False
    order: Literal["fifo", "sjf"] = "fifo"

    def decide(self, request: RoutingRequest, view: View) -> Decision:
        return make_policy("offload_all").decide(request, view)


class Plain:
    def decide(self, request: RoutingRequest, view: View) -> Decision:
        return make_policy("local_only").decide(request, view)


class Stubborn(Plain):
    def __init__(self) -> None:
        raise RuntimeError("not today")


class NoPolicy:
    pass


def test_a_class_of_a_module_is_a_policy() -> None:
    assert make_policy(f"{HERE}:Plain").decide(RoutingRequest(9000), small()).route is Route.LOCAL
    own = make_policy(f"{HERE}:Own", {"least": 3, "marks_queue_s": 1, "eager": True, "order": "sjf"})
    assert own == Own(Marks(1.0), 3, 0.5, True, "sjf")
    assert policy_class(f"{HERE}:Plain") is Plain


def test_what_a_policy_takes() -> None:
    described = [each.described for each in parameters_of(Own).values()]
    assert described == [
        "marks_queue_s: a number in s, at least 0 (2)",
        "least: a whole number (must be given)",
        "share: a number, above 0 and at most 1 (0.5)",
        "eager: true or false (false)",
        "order: one of fifo, sjf (fifo)",
    ]
    assert parameters_of(Plain) == {}
    assert {name: each.default for name, each in parameters_of(policy_class("paper")).items()} == {
        "queue_mark": 0.5,
        "utilisation_mark": 0.85,
        "abundance_utilisation": 0.5,
        "abundance_queue_s": 0.25,
    }


@pytest.mark.parametrize(
    ("params", "parameter", "sentence"),
    [
        (
            {},
            "least",
            "needs the parameter least; its parameters are marks_queue_s: a number in s, at least 0 (2);",
        ),
        ({"least": 1, "lest": 2}, "lest", 'has no parameter "lest"; its parameters are marks_queue_s'),
        ({"least": 1.5}, "least", "takes for least a whole number, not 1.5;"),
        ({"least": True}, "least", "takes for least a whole number, not true;"),
        ({"least": 1, "share": 0}, "share", "takes for share a number, above 0 and at most 1, not 0;"),
        ({"least": 1, "share": math.nan}, "share", "not nan;"),
        ({"least": 1, "eager": 1}, "eager", "takes for eager true or false, not 1;"),
        ({"least": 1, "order": "lifo"}, "order", "takes for order one of fifo, sjf, not lifo;"),
        ({"least": 1, "marks_queue_s": -1}, "marks_queue_s", "at least 0, not -1;"),
    ],
)
def test_a_bad_parameter_is_refused(params: dict[str, Any], parameter: str, sentence: str) -> None:
    with pytest.raises(PolicyError) as caught:
        make_policy(f"{HERE}:Own", params)
    assert caught.value.parameter == parameter
    assert str(caught.value).startswith(f"policy {HERE}:Own ") and sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("papre", 'there is no policy "papre"; there are paper, tilted, '),
        ("no.such:Policy", 'module "no.such" can\'t be imported: No module named'),
        (f"{HERE}:Missing", f'module "{HERE}" has no class "Missing"'),
        (f"{HERE}:NoPolicy", "is no policy: it must be a class with a method decide"),
        (f"{HERE}:make_policy", "is no policy: it must be a class"),
        (f"{HERE}:Stubborn", "can't be made: not today (RuntimeError)"),
    ],
)
def test_a_name_without_a_policy_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(PolicyError) as caught:
        make_policy(name)
    assert sentence in str(caught.value) and caught.value.parameter is None


@given(st.data())
def test_bounds_are_kept_by_every_policy(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(POLICIES))
    known = parameters_of(policy_class(name))
    number = data.draw(st.one_of(st.floats(), st.integers(-5, 5)))
    for parameter in known.values():
        params = NEEDED.get(name, {}) | {parameter.name: number}
        if parameter.bounds.hold(number):
            make_policy(name, params)
        else:
            with pytest.raises(PolicyError, match=parameter.name):
                make_policy(name, params)


def test_every_parameter_says_what_it_is() -> None:
    for name in POLICIES:
        for parameter in parameters_of(policy_class(name)).values():
            assert parameter.bounds.text and parameter.bounds.in_words, (name, parameter.name)
