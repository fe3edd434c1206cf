"""Verdicts on two greedy answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.tools.demo.compare import TIE_BOUND_NATS, Comparison, Equality, compare


def test_equal_answers_are_exact_whatever_the_logprobs() -> None:
    assert compare([1, 2], [1, 2], [{}, {}]) == Comparison(Equality.EXACT)


def test_the_bound_is_what_the_issue_allows() -> None:
    assert 0 < TIE_BOUND_NATS <= 0.1


@pytest.mark.parametrize(
    ("margin_nats", "equality"), [(0.0, "tie"), (0.09, "tie"), (0.11, "no"), (3.0, "no")]
)
def test_only_the_first_difference_counts(margin_nats: float, equality: str) -> None:
    logprobs = [{1: 0.0}, {2: -1.0, 7: -1.0 - margin_nats}, {3: 0.0}]
    comparison = compare([1, 7, 8], [1, 2, 3], logprobs)
    assert comparison.equality == equality
    assert comparison.position == 1
    assert comparison.margin_nats == pytest.approx(margin_nats)


def test_a_token_that_is_not_among_the_likeliest_is_no_tie() -> None:
    assert compare([9], [1], [{1: -0.1, 2: -0.11}]) == Comparison(Equality.NO, 0)


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
    comparison = compare(other, answer, [{token: 0.0, token + 1: -5.0} for token in answer])
    assert comparison.equality is Equality.NO
    assert comparison.position == position
