import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.scheduling.length_window import LengthWindow

from .case_study import LENGTHS, NOW_S, draw, window_of

RATIO = 2 ** (1 / 64)


def test_nothing_is_said_about_too_few_requests() -> None:
    window = LengthWindow(60, min_count=3)
    assert window.lengths(0) is None and window.count(0) == 0 and window.rate_per_s(0) == 0
    window.add(100, 0)
    window.add(200, 1)
    assert window.lengths(1) is None
    window.add(300, 2)
    lengths = window.lengths(2)
    assert lengths is not None and lengths.mean() == pytest.approx(200)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 1 << 21), min_size=1, max_size=200))
def test_lengths_are_known_to_a_bin_and_their_mean_exactly(lengths: list[int]) -> None:
    window = LengthWindow(60, min_count=1)
    for length in lengths:
        window.add(length, 5.0)
    seen = window.lengths(5.0)
    assert seen is not None and window.count(5.0) == len(lengths)
    assert seen.mean() == pytest.approx(sum(lengths) / len(lengths))
    for q in (0.1, 0.5, 0.9):
        exact = sorted(lengths)[max(math.ceil(q * len(lengths) - 1e-9) - 1, 0)]
        assert exact / RATIO <= seen.quantile(q) <= exact * RATIO


def test_the_distribution_is_kept_until_the_window_changes() -> None:
    window = LengthWindow(60, slots=6, min_count=1)
    window.add(100, 0.0)
    first = window.lengths(1.0)
    assert first is not None and window.lengths(9.0) is first
    window.add(300, 9.0)
    second = window.lengths(9.0)
    assert second is not None and second.mean() == 200
    window.add(500, 55.0)
    # The first part of the window is over.
    third = window.lengths(61.0)
    assert third is not None and third.mean() == 500


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 1000)), max_size=80),
    st.floats(0, 100),
    st.integers(1, 15),
)
def test_counts_what_is_young_and_nothing_that_is_old(
    arrivals: list[tuple[float, int]], wait_s: float, slots: int
) -> None:
    window, now_s = LengthWindow(60, slots=slots, min_count=1), 0.0
    times = []
    for gap_s, tokens in arrivals:
        now_s += gap_s
        window.add(tokens, now_s)
        times.append(now_s)
    now_s += wait_s
    young = sum(now_s - time_s < 60 * (slots - 1) / slots - 1e-6 for time_s in times)
    not_old = sum(now_s - time_s <= 60 + 1e-6 for time_s in times)
    assert young <= window.count(now_s) <= not_old
    seen = window.lengths(now_s)
    assert (seen is None) == (window.count(now_s) == 0)


def test_a_length_seen_late_counts_where_it_belongs() -> None:
    window = LengthWindow(60, slots=6, min_count=1)
    window.add(1, 100)
    window.add(1, 95)
    window.add(1, 40)  # its slot is taken
    assert window.count(100) == 2
    assert window.count(150) == 1


@pytest.mark.parametrize("start_s", [0.0, -500.0, 1e9])
def test_rate(start_s: float) -> None:
    window = LengthWindow(60)
    for second in range(30):
        for _ in range(5):
            window.add(10, start_s + second)
    # The first of 30 seconds is when counting starts.
    assert window.rate_per_s(start_s + 30) == pytest.approx(5)
    for second in range(30, 300):
        for _ in range(8):
            window.add(10, start_s + second)
    assert window.rate_per_s(start_s + 299.99) == pytest.approx(8, rel=0.02)
    assert window.rate_per_s(start_s + 1000) == 0


def test_memory_does_not_grow() -> None:
    window = LengthWindow(60)

    def held_bytes() -> int:
        return sum(8 * len(slot.counts) + 8 * len(slot.tokens) for slot in window._ring)

    before = held_bytes()
    for i in range(20_000):
        window.add(1 + i * 7919 % 5_000_000, i * 0.05)
    assert held_bytes() == before <= 12 * 92_000
    seen = window.lengths(1000)
    assert seen is not None and len(seen.atoms()) <= 22 * 64


def test_lengths_out_of_range_count_at_its_ends() -> None:
    window = LengthWindow(60, min_count=1)
    for tokens in (0, -5, 1, 1e9):
        window.add(tokens, 0)
    seen = window.lengths(0)
    assert seen is not None and seen.low == 1 and seen.high == 1e9


def test_what_the_planner_asks_is_close_to_the_true_distribution() -> None:
    seen = window_of(draw(np.random.default_rng(1), 40_000)).lengths(NOW_S)
    assert seen is not None
    thresholds = np.array([5_000.0, 19_400.0, 60_000.0])
    for ours, true in zip(seen.above(thresholds), LENGTHS.above(thresholds), strict=True):
        assert ours == pytest.approx(true, rel=0.06)


def test_a_window_without_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="above 0"):
        LengthWindow(0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 1 << 21), max_size=100))
def test_the_histogram_counts_each_length_in_its_half_octave(lengths: list[int]) -> None:
    window = LengthWindow(60)
    for length in lengths:
        window.add(length, 5.0)
    counts = window.histogram(5.0)
    assert len(counts) == 44 and sum(counts) == len(lengths)
    for place in range(0, 44, 2):
        # Whole octaves begin at powers of two, which floating point knows exactly.
        low, high = 2 ** (place // 2), 2 ** (place // 2 + 1)
        assert counts[place] + counts[place + 1] == sum(low <= length < high for length in lengths)
    assert window.histogram(500.0) == [0] * 44
