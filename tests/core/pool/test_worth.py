"""Loads are made where they are quicker than computing, by what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.pool.worth import LinearCost, LoadWorth

SIZES = st.lists(st.floats(1, 1e6), min_size=1, max_size=40)


@given(sizes=SIZES, fixed_s=st.floats(0, 10), per_unit_s=st.floats(1e-6, 1))
def test_a_straight_line_is_found_again(sizes: list[float], fixed_s: float, per_unit_s: float) -> None:
    cost = LinearCost()
    for size in sizes:
        cost.add(size, fixed_s + per_unit_s * size)
    if max(sizes) < 2 * min(sizes):
        # Too much alike to tell the parts apart, but what was seen is known.
        assert cost.seconds(sizes[-1]) == pytest.approx(fixed_s + per_unit_s * sizes[-1], rel=1.0)
    else:
        assert cost.seconds(sizes[-1]) == pytest.approx(fixed_s + per_unit_s * sizes[-1], rel=1e-3)


@given(samples=st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 100)), max_size=60))
def test_no_part_is_negative(samples: list[tuple[float, float]]) -> None:
    cost = LinearCost()
    for size, seconds in samples:
        cost.add(size, seconds)
    assert cost.fixed_s >= 0
    assert cost.per_unit_s >= 0
    assert cost.is_known == bool(samples)


def test_an_engine_that_becomes_slower_is_noticed() -> None:
    cost = LinearCost()
    for _ in range(200):
        cost.add(1000, 0.1)
        cost.add(2000, 0.2)
    for _ in range(100):
        cost.add(1000, 0.3)
        cost.add(2000, 0.6)
    assert cost.per_unit_s == pytest.approx(3e-4, rel=0.1)


def measured() -> LoadWorth:
    """10,000 tokens a second; a load takes 20 ms and 1 ms per megabyte, from SSD 10 ms per megabyte more."""
    worth = LoadWorth()
    for tokens in (512, 1024, 2048, 2048):
        worth.prefill.add(tokens, 0.005 + tokens / 10_000)
    for megabytes in (1, 10, 50):
        size = megabytes * 1_000_000
        worth.load_took(size, size, 0.020 + megabytes * 0.001, megabytes * 0.010)
    return worth


def test_what_is_not_measured_is_tried() -> None:
    worth = LoadWorth()
    assert worth.pays(16, 1 << 30, 1 << 30)
    worth.prefill.add(1000, 0.1)
    assert worth.pays(16, 1 << 30, 1 << 30)


def test_ends_of_prompts_say_nothing_of_long_prefills() -> None:
    worth = LoadWorth()
    worth.load_took(6_000_000, 0, 0.020, 0.0)
    # A first step takes longer than the second, whatever they compute.
    worth.prefill.add(56, 0.031)
    worth.prefill.add(104, 0.030)
    assert worth.prefill_s(5888) == 0
    assert worth.pays(5888, 6_000_000, 0)
    worth.prefill.add(1024, 0.040)
    assert not worth.pays(1000, 6_000_000, 0)
    # What was long ago counts for less.
    for _ in range(200):
        worth.prefill.add(64, 0.030)
    assert worth.pays(1000, 6_000_000, 0)


def test_short_prefixes_are_computed_and_long_ones_loaded() -> None:
    worth = measured()
    assert worth.load_s(2_000_000, 0) == pytest.approx(0.022, rel=1e-3)
    assert not worth.pays(200, 2_000_000, 0)
    assert worth.pays(240, 2_000_000, 0)
    # The same from SSD takes 20 ms longer.
    assert not worth.pays(240, 2_000_000, 2_000_000)
    assert worth.pays(440, 2_000_000, 2_000_000)


def test_a_refused_load_is_tried_again_now_and_then() -> None:
    worth = measured()
    answers = [worth.pays(16, 2_000_000, 0) for _ in range(32)]
    assert answers.count(True) == 2
