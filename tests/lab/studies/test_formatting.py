"""What is said of numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.lab.studies.figures import difference, listed, mean_and_p90, more_or_less, percent, seconds


def test_a_difference_of_pairs() -> None:
    found = difference([1.1, 1.3], [1.0, 1.0])
    assert found.mean == pytest.approx(0.2)
    # sd √2 × 0.1, divided by √2; Student's t of one degree of freedom: 12.706.
    assert found.half == pytest.approx(1.2706, rel=1e-4)
    assert not found.is_clear and str(found) == "+20 ± 127 %"


def test_the_same_pair_again_leaves_no_doubt() -> None:
    found = difference([0.5, 1.0, 1.5], [1.0, 2.0, 3.0])
    assert found.is_clear and str(found) == "−50 ± 0 %"


def test_one_pair_proves_nothing() -> None:
    found = difference([2.0], [1.0])
    assert not found.is_clear and str(found) == "+100 %"


def test_no_number_is_no_difference() -> None:
    assert not difference([math.nan, 1.0], [1.0, 1.0]).is_clear
    assert str(difference([math.nan, 1.0], [1.0, 1.0])) == "–"


def test_much_more_is_a_factor() -> None:
    assert str(difference([76.0, 76.0], [1.0, 1.0])) == "76 times"
    assert more_or_less(5.0) == "5.0 times as much"


@given(st.floats(0.01, 10.0))
def test_more_and_less(ratio: float) -> None:
    text = more_or_less(ratio)
    assert ("more" in text) == (1.005 < ratio < 3) or abs(ratio - 1.005) < 1e-6
    assert ("less" in text) == (ratio < 0.995) or abs(ratio - 0.995) < 1e-6


def test_lists_and_units() -> None:
    assert [listed(["a", "b", "c"][:count]) for count in range(4)] == ["none", "a", "a and b", "a, b and c"]
    assert [seconds(value) for value in (0.123, 12.34, 1234.5, math.nan)] == ["0.12", "12.3", "1,234", "–"]
    assert percent(0.126) == "13 %"
    assert mean_and_p90(1.0, 2.0, is_stable=False) == "grows: 1.00 (2.00)"
