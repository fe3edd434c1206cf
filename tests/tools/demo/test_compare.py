"""Verdicts on two greedy answers."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.tools.demo.compare import Comparison, Equality, compare, tie_bound_nats


def bf16(value: float) -> float:
    """The nearest bf16 number, ties to even; worked out apart from what is under test."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def test_equal_answers_are_exact_whatever_the_logits() -> None:
    assert compare([1, 2], [1, 2], [{}, {}]) == Comparison(Equality.EXACT)


@pytest.mark.parametrize(
    ("magnitude", "step"), [(7.97, 1 / 32), (8.0, 1 / 16), (15.94, 1 / 16), (16.0, 1 / 8), (31.875, 1 / 8)]
)
def test_the_bound_is_two_steps_of_bf16(magnitude: float, step: float) -> None:
    assert tie_bound_nats(magnitude) == 2 * step
    assert bf16(bf16(magnitude) + step) - bf16(magnitude) == step


@pytest.mark.slow("imports vLLM or torch")
def test_the_bound_is_that_of_torchs_bf16() -> None:
    torch = pytest.importorskip("torch")
    for magnitude in (0.3, 1.0, 5.5, 8.0, 12.3, 16.0, 20.9, 100.0):
        number = torch.tensor(magnitude, dtype=torch.bfloat16)
        above = (number.view(torch.int16) + 1).view(torch.bfloat16)
        assert tie_bound_nats(number.item()) == 2 * (above - number).item()


@pytest.mark.parametrize("magnitude", [-1.0, math.nan, math.inf])
def test_a_magnitude_must_be_one(magnitude: float) -> None:
    with pytest.raises(ValueError, match="finite number from 0 on"):
        tie_bound_nats(magnitude)


@given(st.floats(0.01, 60), st.floats(0, 1), st.floats(-0.99, 0.99), st.floats(-0.99, 0.99))
def test_rounding_alone_never_exceeds_the_bound(
    greater: float, share: float, first_error: float, second_error: float
) -> None:
    """Two computations of two logits, each with an error of less than a step, half of it before the rounding."""
    step = tie_bound_nats(greater) / 2
    less = greater - 4 * step * share
    reference = (bf16(greater), bf16(less))
    ours = (bf16(greater + first_error / 2 * step), bf16(less + second_error / 2 * step))
    if (reference[0] - reference[1]) * (ours[0] - ours[1]) <= 0:
        magnitude = max(abs(reference[0]), abs(reference[1]))
        assert abs(reference[0] - reference[1]) <= tie_bound_nats(magnitude)


@pytest.mark.parametrize(
    ("top", "margin_nats", "equality"),
    [
        (12.0, 0.0, "tie"),
        (12.0, 0.125, "tie"),  # both one step off, towards each other
        (12.0, 0.1875, "no"),
        (20.0, 0.125, "tie"),
        (20.0, 0.25, "tie"),
        (20.0, 0.375, "no"),
        (16.0, 0.25, "tie"),
        (4.0, 0.125, "no"),
        (12.0, 3.0, "no"),
    ],
)
def test_only_the_first_difference_counts(top: float, margin_nats: float, equality: str) -> None:
    logits = [{1: 0.0}, {2: top, 7: top - margin_nats}, {3: 0.0}]
    comparison = compare([1, 7, 8], [1, 2, 3], logits)
    assert comparison == Comparison(Equality(equality), 1, margin_nats, tie_bound_nats(top))


def test_a_forced_token_of_the_reference_may_be_the_less_likely_one() -> None:
    assert compare([7], [2], [{2: 12.0, 7: 14.0}]).equality is Equality.NO


def test_a_token_that_is_not_among_the_likeliest_is_no_tie() -> None:
    assert compare([9], [1], [{1: 12.0, 2: 11.9}]) == Comparison(Equality.NO, 0)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="can't be compared"):
        compare([1], [1, 2], [{}, {}])
    with pytest.raises(ValueError, match="can't be compared"):
        compare([1], [1], [])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.data())
def test_a_difference_is_never_overlooked(answer: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(answer) - 1))
    other = [*answer]
    other[position] += 1
    comparison = compare(other, answer, [{token: 15.0, token + 1: 10.0} for token in answer])
    assert comparison.equality is Equality.NO
    assert comparison.position == position


def greedy(logits: list[list[float]]) -> tuple[list[int], list[dict[int, float]]]:
    """An answer and its rounded logits; each place stands for itself, as if every token were forced."""
    rounded = [[bf16(value) for value in place] for place in logits]
    return [place.index(max(place)) for place in rounded], [dict(enumerate(place)) for place in rounded]


def test_the_bound_tells_rounding_from_wrong_state() -> None:
    """Logits spread as the tiny models' are. Errors below half a step always pass; of answers of 24 tokens with errors
    of 0.4 nat, which a router that picks another expert exceeds, two in three don't."""
    rng = random.Random(7)
    caught = 0
    for _ in range(200):
        exact = [[rng.gauss(0, 5) for _ in range(96)] for _ in range(24)]
        reference, logits = greedy(exact)
        rounding = [[x + rng.uniform(-0.49, 0.49) * tie_bound_nats(abs(x)) / 2 for x in p] for p in exact]
        assert compare(greedy(rounding)[0], reference, logits).equality is not Equality.NO
        wrong = [[x + rng.gauss(0, 0.4) for x in p] for p in exact]
        caught += compare(greedy(wrong)[0], reference, logits).equality is Equality.NO
    assert caught > 100
