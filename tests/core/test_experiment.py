"""Slices of an experiment: balanced, in an order that nobody foresees; what they show, and when they must end."""

import math
import random
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.experiment import Guard, Slice, SliceMean, Slices, effect

SLICES = Slices(slice_s=600.0, washout_s=60.0, secret=b"secret")


@given(st.integers(0, 1 << 32), st.binary(min_size=1, max_size=64), st.floats(1.0, 86400.0))
def test_each_pair_has_both_arms(pair: int, secret: bytes, slice_s: float) -> None:
    slices = Slices(slice_s, slice_s / 10, secret)
    one, other = (slices.at((2 * pair + half + 0.5) * slice_s) for half in (0, 1))
    assert {one.arm, other.arm} == {"as-is", "other"}
    assert one.number // 2 == other.number // 2


def test_the_order_is_drawn_and_the_same_everywhere() -> None:
    def order(slices: Slices) -> list[str]:
        return [slices.at(2 * pair * 600.0).arm for pair in range(2000)]

    assert order(SLICES) == order(Slices(600.0, 60.0, b"secret"))
    assert order(SLICES) != order(Slices(600.0, 60.0, b"another"))
    # Three standard deviations of a fair coin, of the arms and of their changes.
    arms = order(SLICES)
    assert abs(arms.count("other") - 1000) < 3 * math.sqrt(500)
    assert abs(sum(a != b for a, b in pairwise(arms)) - 1000) < 3 * math.sqrt(500)


def test_a_slice_begins_with_its_washout() -> None:
    begin = 2000 * 600.0
    assert [SLICES.at(begin + s).counts for s in (0.0, 59.9, 60.0, 599.9)] == [False, False, True, True]
    assert SLICES.at(begin + 599.9).number == 2000 and SLICES.at(begin + 600.0).number == 2001


def slices_of(pairs: int, saved_s: float, rng: random.Random) -> list[SliceMean]:
    """Slices of a load that drifts, with what two of a pair have in common."""
    found = []
    for pair in range(pairs):
        shared_s = 3.0 + math.sin(pair / 5.0) + rng.gauss(0.0, 0.3)
        arms = ["as-is", "other"] if rng.random() < 0.5 else ["other", "as-is"]
        for half, arm in enumerate(arms):
            mean_s = shared_s + (saved_s if arm == "other" else 0.0) + rng.gauss(0.0, 0.5)
            found.append(SliceMean(2 * pair + half, arm, 100, mean_s))
    return found


def test_the_interval_holds_what_is_true_as_often_as_it_says() -> None:
    rng, hits, found = random.Random(7), 0, []
    for _ in range(2000):
        seen = effect(slices_of(20, 0.4, rng))
        assert seen is not None and seen.pairs == 20
        hits += abs(seen.saved_s - 0.4) <= seen.half_s
        found.append(seen.saved_s)
    assert 0.93 < hits / 2000 < 0.97
    assert mean(found) == pytest.approx(0.4, abs=0.02)


def test_what_is_no_pair_says_nothing() -> None:
    slices = slices_of(3, 1.0, random.Random(1))
    assert effect(slices) is not None
    assert effect(slices[:-1]) is None
    few = [*slices[:-1], SliceMean(slices[-1].number, slices[-1].arm, 4, 9.0)]
    assert effect(few) is None


def judged(guard: Guard, slices: int, mean_s: tuple[float, float], rng: random.Random) -> int | None:
    """Requests of a slow queue; the number of the slice in which the guard speaks."""
    level = 0.0
    for number in range(slices):
        at = Slice(number, "other" if number % 2 else "as-is", counts=True)
        for _ in range(400):
            # What one waits, the next one waits for the most part.
            level = 0.9 * level + rng.gauss(0.0, 0.2)
            if guard.harm(at, mean_s[number % 2] * max(1.0 + level + rng.gauss(0.0, 0.2), 0.01)) is not None:
                return number
    return None


def test_a_guard_ends_what_hurts_at_once() -> None:
    ends = [judged(Guard(0.5), 20, (1.0, 3.0), random.Random(seed)) for seed in range(50)]
    assert ends.count(1) >= 45 and set(ends) <= {1, 3}


def test_a_guard_lets_alone_what_does_not() -> None:
    harmless = [judged(Guard(0.5), 20, (1.0, 1.1), random.Random(seed)) for seed in range(50)]
    assert harmless.count(None) >= 49


def test_a_guard_ends_what_fails() -> None:
    guard, rng = Guard(0.5), random.Random(3)
    for _ in range(200):
        assert guard.harm(Slice(0, "as-is", counts=True), 1.0 + rng.random()) is None
    said = [guard.harm(Slice(1, "other", counts=False), None) for _ in range(50)]
    assert said[-1] == "100% of the requests failed, 0% as it is"
    assert said[:-1] == [None] * 49


def test_a_slice_that_is_over_excuses_nothing() -> None:
    """A scheduler that did well for hours is ended by one bad slice."""
    guard = Guard(0.5)
    for number in range(60):
        at = Slice(number, "other" if number % 2 else "as-is", counts=True)
        assert all(guard.harm(at, 1.0 + n % 3 / 10) is None for n in range(200))
    assert any(guard.harm(Slice(61, "other", counts=True), 4.0 + n % 3) for n in range(80))
