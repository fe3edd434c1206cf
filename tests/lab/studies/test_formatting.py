"""What is said of numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies._figures import (
    difference,
    listed,
    more_or_less,
    percent,
    seconds,
    seed_mean,
)


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


def test_a_small_difference_keeps_a_decimal_and_none_has_no_sign() -> None:
    assert str(difference([1.003, 1.003], [1.0, 1.0])) == "+0.3 ± 0.0 %"
    assert str(difference([2.0, 2.0], [2.0, 2.0])) == "0 %"


def test_a_difference_in_words() -> None:
    assert difference([1.169, 1.171], [1.0, 1.0]).more_or_less == "17 ± 1 % more"
    assert difference([0.899, 0.901], [1.0, 1.0]).more_or_less == "10 ± 1 % less"
    assert difference([4.0, 4.2], [1.0, 1.0]).more_or_less == "4.1 ± 1.3 times as much"
    assert "as far as seeds can tell (+20 ± 127 %)" in difference([1.1, 1.3], [1.0, 1.0]).more_or_less
    assert difference([0.5, 0.52], [1.0, 1.0]).times == "0.51 ± 0.13 times"


def test_a_mean_over_seeds_by_hand() -> None:
    # Two values 1 ± 0.1: sd √2 × 0.1, divided by √2, times 12.706.
    found = seed_mean([0.9, 1.1])
    assert found.mean == pytest.approx(1.0) and found.half == pytest.approx(1.2706, rel=1e-4)
    assert found.seconds == "1.00 ± 1.27" and found.percent() == "100 ± 127 %"
    assert seed_mean([1.0]).seconds == "1.00" and seed_mean([math.nan, 1.0]).seconds == "–"
    assert seed_mean([1e10, 1.02e10]).gigabits == "10.1 ± 1.3 Gbit/s"
    assert seed_mean([150.0, 150.0]).seconds == "150 ± 0"


@given(st.lists(st.floats(0.1, 100.0), min_size=2, max_size=8), st.floats(0.1, 10.0))
def test_a_mean_over_seeds_moves_with_its_values(values: list[float], factor: float) -> None:
    one, other = seed_mean(values), seed_mean([value * factor for value in values])
    assert min(values) <= one.mean * (1 + 1e-12) and one.mean <= max(values) * (1 + 1e-12)
    assert other.mean == pytest.approx(one.mean * factor)
    assert other.half == pytest.approx(one.half * factor, abs=1e-9)


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [seed_mean(list(rng.normal(3.0, 0.5, 5))) for _ in range(1000)]
    assert sum(abs(each.mean - 3.0) <= each.half for each in found) / 1000 == pytest.approx(0.95, abs=0.02)


def test_no_number_is_no_difference() -> None:
    assert not difference([math.nan, 1.0], [1.0, 1.0]).is_clear
    assert str(difference([math.nan, 1.0], [1.0, 1.0])) == "–"


def test_much_more_is_a_factor() -> None:
    assert str(difference([76.0, 76.0], [1.0, 1.0])) == "76 ± 0 times"
    assert str(difference([4.0, 4.2], [1.0, 1.0])) == "4.1 ± 1.3 times"
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
