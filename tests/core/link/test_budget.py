"""A link's budget: all of it is used, nobody gets more than it can use while others want, the background is last."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.link.budget import HEADROOM, STANDING_PART, TRICKLE_PART, Claim, max_min, paces

demands = st.lists(st.one_of(st.just(0.0), st.floats(1, 1e12), st.just(math.inf)), min_size=1, max_size=12)
rates = st.one_of(st.just(0.0), st.floats(1, 1e12), st.just(math.inf))
claims = st.lists(
    st.builds(Claim, bits_per_s=rates, background_bits_per_s=rates, is_working=st.just(True)),
    min_size=1,
    max_size=12,
)


@given(st.floats(1, 1e12), demands)
def test_max_min_is_fair_and_leaves_nothing(bandwidth: float, wanted: list[float]) -> None:
    parts = max_min(bandwidth, wanted)
    assert sum(parts) == pytest.approx(min(bandwidth, sum(wanted)))
    for part, demand in zip(parts, wanted, strict=True):
        assert 0 <= part <= demand
        if part < demand * (1 - 1e-9):  # who lacks something has no less than anybody else
            assert part >= max(parts) * (1 - 1e-9)


@given(st.floats(1, 1e12), claims)
def test_all_of_a_link_is_for_those_who_work(bandwidth: float, wanted: list[Claim]) -> None:
    shares = paces(bandwidth, wanted)
    assert bandwidth * (1 - 1e-9) <= sum(shares) <= bandwidth * (HEADROOM + STANDING_PART) * (1 + 1e-9)
    first = max_min(bandwidth * (1 - TRICKLE_PART), [claim.bits_per_s for claim in wanted])
    for share, part in zip(shares, first, strict=True):
        assert share >= part * (1 - 1e-9)  # nothing in the background takes from these
        assert share > 0


def test_the_background_gets_what_is_left() -> None:
    busy, copying = Claim(math.inf, 0.0, True), Claim(0.0, math.inf, True)
    assert paces(100.0, [busy, copying]) == pytest.approx([99.0, 1.0])
    assert paces(100.0, [Claim(70.0, 0.0, True), copying]) == pytest.approx([70.0 * HEADROOM, 30.0])
    assert paces(100.0, [copying, copying]) == pytest.approx([50.0, 50.0])


def test_a_sender_that_wants_little_leaves_the_rest() -> None:
    assert paces(100.0, [Claim(10.0, 0.0, True), Claim(math.inf, 0.0, True)]) == [10.0 * HEADROOM, 90.0]
    assert paces(100.0, [Claim(10.0, 0.0, True), Claim(20.0, 0.0, True)]) == pytest.approx([45.0, 55.0])


def test_who_has_no_work_can_start_at_once() -> None:
    idle, starting, busy = Claim(), Claim(0.0, 0.0, True), Claim(math.inf, 0.0, True)
    assert paces(100.0, [idle, idle]) == [50.0, 50.0]
    assert paces(100.0, [idle]) == [100.0]
    standing = 100.0 * STANDING_PART / 3
    assert paces(100.0, [busy, idle, starting]) == pytest.approx([100.0, standing, standing])
    assert paces(100.0, []) == []
