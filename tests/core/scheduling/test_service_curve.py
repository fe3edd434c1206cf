import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.latency.service_curve import DEFAULT_POINTS, ServiceCurve

from .case_study import H20, H200


def h20_s(tokens: float) -> float:
    return float(H20.prefill_s(float(tokens)))


def measured(curve: ServiceCurve, rng: np.random.Generator, count: int, slower: float, **rest: float) -> None:
    """Samples of an instance that takes `slower` times the profile's time, with noise and stalls."""
    rest = {"stalls": 0.0, "low": 200, "high": 120_000, "every_s": 0.3, "start_s": 0.0} | rest
    stalls, low, high, every_s, start_s = rest.values()
    for i, tokens in enumerate(np.exp(rng.uniform(math.log(low), math.log(high), count)).tolist()):
        seconds = slower * h20_s(tokens) * rng.lognormal(0, 0.15)
        curve.add(tokens, seconds * (60 if rng.random() < stalls else 1), start_s + every_s * i)


@pytest.mark.parametrize("profile", [H20, H200])
@pytest.mark.parametrize("speedup", [1.0, 20.0])
def test_starts_as_the_profile(profile, speedup) -> None:  # type: ignore[no-untyped-def]
    curve = ServiceCurve.of_profile(profile, speedup)
    for tokens in np.geomspace(*profile.range_tokens, 300).tolist():
        assert curve.seconds(tokens) == pytest.approx(profile.prefill_s(tokens) / speedup, rel=1e-3)


def test_outside_the_profile() -> None:
    curve = ServiceCurve.of_profile(H20)
    low, high = H20.range_tokens
    assert curve.seconds(1) == curve.seconds(0) == curve.seconds(-5) == pytest.approx(h20_s(low))
    doubled = curve.seconds(2 * high) / h20_s(high)
    assert 2 <= doubled <= 4
    assert doubled == pytest.approx(h20_s(high) / h20_s(high / 2), rel=0.01)
    assert curve.seconds(1 << 24) > curve.seconds(1 << 23) > curve.seconds(1 << 22)


def test_without_a_profile_it_is_slow_but_something() -> None:
    curve = ServiceCurve()
    for tokens, seconds in DEFAULT_POINTS:
        assert curve.seconds(tokens) == pytest.approx(seconds, rel=1e-2)
        if tokens >= 1024:
            assert seconds > h20_s(tokens) * 0.5


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 1e7), st.floats(1e-4, 1e4), st.floats(0, 50)), min_size=0, max_size=60),
    st.booleans(),
)
def test_never_falls_and_is_above_0_whatever_is_measured(
    samples: list[tuple[float, float, float]], with_profile: bool
) -> None:
    curve = ServiceCurve.of_profile(H20) if with_profile else ServiceCurve()
    now_s = 0.0
    for tokens, seconds, gap_s in samples:
        now_s += gap_s
        curve.add(tokens, seconds, now_s)
    lengths = np.concatenate([[0.0], np.geomspace(0.5, 1 << 25, 500)])
    seconds_at = curve.prefill_s(lengths)
    assert np.isfinite(seconds_at).all() and (seconds_at > 0).all()
    assert (np.diff(seconds_at) >= -1e-12 * seconds_at[1:]).all()
    assert seconds_at.tolist() == pytest.approx([curve.seconds(length) for length in lengths.tolist()])


@pytest.mark.parametrize("slower", [0.4, 2.0, 8.0])
def test_finds_the_speed_that_is_measured(slower: float) -> None:
    curve = ServiceCurve.of_profile(H20)
    measured(curve, np.random.default_rng(1), 1500, slower)
    for tokens in (300, 2_000, 10_000, 40_000, 110_000):
        assert curve.seconds(tokens) == pytest.approx(slower * h20_s(tokens), rel=0.08)


@pytest.mark.parametrize("stalls", [0.1, 0.3])
def test_stalled_engines_move_it_little(stalls: float) -> None:
    curve = ServiceCurve.of_profile(H20)
    measured(curve, np.random.default_rng(2), 1500, 1.0, stalls=stalls)
    for tokens in (300, 2_000, 10_000, 40_000, 110_000):
        assert curve.seconds(tokens) == pytest.approx(h20_s(tokens), rel=0.25)


def test_one_sample_moves_it_little() -> None:
    curve = ServiceCurve.of_profile(H20)
    curve.add(10_000, 100 * h20_s(10_000), 0)
    assert curve.seconds(10_000) < 20 * h20_s(10_000)
    for i in range(20):
        curve.add(10_000, h20_s(10_000), 1 + i)
    assert curve.seconds(10_000) == pytest.approx(h20_s(10_000), rel=0.02)


def test_lengths_that_nobody_measured_follow_the_others() -> None:
    curve = ServiceCurve.of_profile(H20)
    measured(curve, np.random.default_rng(3), 400, 3.0, low=1000, high=4000)
    assert curve.seconds(2000) == pytest.approx(3 * h20_s(2000), rel=0.08)
    assert curve.seconds(100_000) == pytest.approx(3 * h20_s(100_000), rel=0.1)


def test_forgets_what_is_old_once_there_is_something_newer() -> None:
    curve = ServiceCurve.of_profile(H20)
    measured(curve, np.random.default_rng(4), 1500, 3.0)
    before = curve.seconds(20_000)
    measured(curve, np.random.default_rng(5), 400, 1.0, start_s=6000, every_s=25, low=10_000, high=40_000)
    assert before == pytest.approx(3 * h20_s(20_000), rel=0.1)
    # The newest samples speak for lengths too that only the old ones covered.
    for tokens in (300, 20_000, 110_000):
        assert curve.seconds(tokens) == pytest.approx(h20_s(tokens), rel=0.12)


def test_idle_time_forgets_nothing() -> None:
    curve = ServiceCurve.of_profile(H20)
    measured(curve, np.random.default_rng(6), 500, 2.0)
    curve.add(500, 2 * h20_s(500), 1e6)
    assert curve.seconds(500) == pytest.approx(2 * h20_s(500), rel=0.2)
    assert curve.seconds(20_000) > 1.4 * h20_s(20_000)


def test_what_cannot_be_a_measurement_is_left_out() -> None:
    curve = ServiceCurve.of_profile(H20)
    before = curve.at_rest()
    for tokens, seconds in ((0, 1), (100, 0), (100, -1), (100, math.inf), (100, math.nan), (math.nan, 1)):
        curve.add(tokens, seconds, 0)
    assert curve.samples == 0 and curve.at_rest() == before


def test_a_curve_at_rest_stays_and_equal_ones_are_equal() -> None:
    curve, other = ServiceCurve.of_profile(H20), ServiceCurve.of_profile(H20)
    rest = curve.at_rest()
    assert rest == other.at_rest() and hash(rest) == hash(other.at_rest())
    before = rest(np.array([[100.0, 5000.0], [2e4, 1e7]]))
    assert before.shape == (2, 2)
    curve.add(5000, 50, 0)
    assert (rest(np.array([[100.0, 5000.0], [2e4, 1e7]])) == before).all()
    assert curve.at_rest() != rest


def test_the_table_is_not_made_again_for_every_sample() -> None:
    curve = ServiceCurve.of_profile(H20)
    for i in range(20):
        curve.add(5000, 2 * h20_s(5000), 0.01 * i)
    before = curve.at_rest()
    for i in range(40):
        curve.add(5000, 4 * h20_s(5000), 0.3 + 0.01 * i)
    assert curve.at_rest() == before
    curve.add(5000, 4 * h20_s(5000), 1.5)
    assert curve.seconds(5000) > 3 * h20_s(5000)


def test_a_base_that_is_no_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="above 0"):
        ServiceCurve(lambda tokens: 0.0)


def test_a_copy_has_a_life_of_its_own() -> None:
    curve = ServiceCurve()
    copies = [copy.deepcopy(curve), pickle.loads(pickle.dumps(curve))]
    before_s = curve.seconds(8192)
    for number in range(40):
        curve.add(8192, 5 * before_s, float(number))
    assert curve.seconds(8192) > 2 * before_s
    assert curve.at_rest() != copies[0].at_rest()
    for each in copies:
        assert each.seconds(8192) == before_s
        each.add(8192, before_s / 5, 0.0)
        assert each.seconds(8192) < before_s
