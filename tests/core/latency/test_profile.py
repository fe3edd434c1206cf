"""Profiles: batch limits and ranges, in sentences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.latency.profile import Curve, DecodeCurve, LatencyProfile, ProfileError, ProfileRangeError


def profile(*steps: tuple[float, float]) -> LatencyProfile:
    decode = DecodeCurve(Curve.through_points(steps, "linear")) if steps else None
    prefill = Curve.through_points(((100.0, 0.1), (1000.0, 1.0)), "linear")
    return LatencyProfile("mine", "h20", "any", 8, prefill, decode, "a test")


@settings(deadline=None)  # the first call imports NumPy or reads data files
@given(st.lists(st.floats(0.001, 0.1), min_size=2, max_size=6), st.floats(0.0005, 0.2))
def test_the_largest_batch_within_the_limit(steps: list[float], limit: float) -> None:
    mine = profile(*((float(1 + 3 * index), step) for index, step in enumerate(steps)))
    largest = mine.max_batch(limit)
    low, high = mine.range_batch
    assert all(mine.decode_step_s(batch) <= limit * (1 + 1e-6) for batch in range(1, largest + 1))
    if largest < high:
        assert mine.decode_step_s(largest + 1) > limit
    assert low == 1


@given(st.floats(0.01, 1000), st.floats(100, 1000), st.floats(1, 4))
def test_a_faster_instance_takes_less_of_everything(factor: float, tokens: float, batch: float) -> None:
    mine = profile((1, 0.025), (4, 0.03))
    faster = mine.sped_up(factor)
    assert faster.prefill_s(tokens) * factor == pytest.approx(mine.prefill_s(tokens))
    assert faster.decode_step_s(batch) * factor == pytest.approx(mine.decode_step_s(batch))
    assert (faster.range_tokens, faster.range_batch) == (mine.range_tokens, mine.range_batch)
    assert profile().sped_up(factor).decode is None


def test_polynomials_and_contexts_are_sped_up_too() -> None:
    curve = Curve(10, 100, coefficients=(1.0, 0.5, 0.01))
    assert curve.divided(4).at(50) == pytest.approx(curve.at(50) / 4)
    decode = DecodeCurve(Curve.through_points(((1, 0.02), (2, 0.03)), "linear"), 100.0, 1e-6)
    faster = LatencyProfile("mine", "h20", "any", 8, curve, decode, "a test").sped_up(2)
    assert faster.decode is not None
    assert (faster.decode.context_tokens, faster.decode.context_s) == (100.0, 5e-7)


def test_exactly_the_limit_is_within_it() -> None:
    assert profile((1, 0.01), (20, 0.025), (40, 0.05)).max_batch(1 / 40) == 20
    assert profile((20, 0.025)).max_batch(1 / 40) == 20
    assert profile((20, 0.025)).max_batch(1) == 20


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(
        ProfileRangeError, match="batches of 20, and a step of 20 takes 25 ms, over the limit of 20 ms"
    ):
        profile((20, 0.025)).max_batch(0.02)
    assert profile((1, 0.025), (2, 0.03)).max_batch(0.02) == 0
    with pytest.raises(ProfileRangeError, match='"mine" has decode times for batches of 1 to 2, not of 3'):
        profile((1, 0.025), (2, 0.03)).decode_step_s(3)
    for ask in (
        lambda: profile().max_batch(1),
        lambda: profile().decode_step_s(1),
        lambda: profile().range_batch,
    ):
        with pytest.raises(
            ProfileError, match='"mine" has no decode times, so its instances can only prefill'
        ):
            ask()


def test_lengths_outside_are_refused() -> None:
    mine = profile()
    assert mine.prefill_s(100) == pytest.approx(0.1)
    assert mine.prefill_s(np.array([100, 550])) == pytest.approx([0.1, 0.55])
    sentence = '"mine" has prefill times for 100 to 1000 tokens, not for {}'
    with pytest.raises(ProfileRangeError, match=sentence.format("99")):
        mine.prefill_s(99)
    with pytest.raises(ProfileRangeError, match=sentence.format(r"1000\.5")):
        mine.prefill_s(np.array([500, 1000.5, 99]))
    mine.require_range(100, 1000)
    with pytest.raises(ProfileRangeError, match=sentence.format("128000")):
        mine.require_range(200, 128000)
    with pytest.raises(ProfileRangeError, match=sentence.format("50")):
        mine.require_range(50, 128000)
