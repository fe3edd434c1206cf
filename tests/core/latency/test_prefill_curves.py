import pytest

from prfaas.core.latency.prefill_curves import PrefillCurves
from prfaas.core.latency.service_curve import ServiceCurve

TOKENS, PREFIX_TOKENS = 2000, 100_000


def learnt(slower: float) -> PrefillCurves:
    """Of instances that take so many times what was predicted, for turns of long conversations."""
    curves = PrefillCurves(ServiceCurve)
    seconds = slower * ServiceCurve().after_prefix_s(TOKENS, PREFIX_TOKENS)
    for number in range(60):
        curves.add(TOKENS, PREFIX_TOKENS, seconds, float(number))
    return curves


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_decision_learns_how_far_the_prediction_was_off(slower: float) -> None:
    alone, before = learnt(slower).alone, ServiceCurve()
    for tokens in (500, TOKENS, 32_000):
        assert alone.seconds(tokens) == pytest.approx(slower * before.seconds(tokens), rel=0.05)
    rest_s = before.after_prefix_s(TOKENS, PREFIX_TOKENS)
    assert alone.after_prefix_s(TOKENS, PREFIX_TOKENS) == pytest.approx(slower * rest_s, rel=0.05)


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_plan_learns_what_such_prompts_take(slower: float) -> None:
    rest_s = ServiceCurve().after_prefix_s(TOKENS, PREFIX_TOKENS)
    assert rest_s > 1.5 * ServiceCurve().seconds(TOKENS)
    assert learnt(slower).usual.seconds(TOKENS) == pytest.approx(slower * rest_s, rel=0.05)


def test_it_says_how_far_the_prediction_was_off() -> None:
    curves = PrefillCurves(ServiceCurve)
    predicted_s = ServiceCurve().after_prefix_s(TOKENS, PREFIX_TOKENS)
    assert curves.add(TOKENS, PREFIX_TOKENS, 3 * predicted_s, 0.0) == pytest.approx(3.0)
