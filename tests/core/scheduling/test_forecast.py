"""A day's shape is learnt, and what is seen today is carried along it."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.scheduling.forecast import (
    SLOTS,
    Outlook,
    PeriodicForecast,
    SeenTraffic,
    TrafficMeans,
    foresight_of,
)
from prfaas.core.scheduling.length_window import LengthWindow

DAY_S, PERIOD_S = 4800.0, 20.0


def usual(at_s: float) -> TrafficMeans:
    wave = math.cos(2 * math.pi * at_s / DAY_S)
    return TrafficMeans(10 * math.exp(0.5 * wave), 9000 * math.exp(-0.3 * wave), 700 * math.exp(0.4 * wave))


def seen_at(at_s: float, of: Callable[[float], TrafficMeans] = usual) -> SeenTraffic:
    return SeenTraffic(of(at_s), at_s, at_s)


def taught(days: float, of: Callable[[float], TrafficMeans] = usual) -> PeriodicForecast:
    forecast = PeriodicForecast(DAY_S)
    for at_s in np.arange(0.0, days * DAY_S, PERIOD_S):
        seen = seen_at(float(at_s), of)
        forecast.learn(seen, seen.means.requests_per_s * PERIOD_S)
    return forecast


def values(means: TrafficMeans | None) -> list[float]:
    assert means is not None
    return [means.requests_per_s, means.uncached_tokens, means.output_tokens]


@pytest.mark.parametrize("hour", [0.0, 3.3, 6.0, 11.9, 17.5, 23.99])
def test_the_usual_day_is_foreseen(hour: float) -> None:
    now_s, lead_s = (2 + hour / 24) * DAY_S, 300.0
    found = taught(2).ahead(seen_at(now_s), now_s + lead_s)
    assert values(found) == pytest.approx(values(usual(now_s + lead_s)), rel=0.01)


def test_todays_deviation_stays() -> None:
    """Twice the requests, half the length, as ever the answers."""
    now_s = 2.3 * DAY_S
    means = usual(now_s)
    today = TrafficMeans(2 * means.requests_per_s, means.uncached_tokens / 2, means.output_tokens)
    found = taught(2).ahead(SeenTraffic(today, now_s, now_s), now_s + 400)
    then = usual(now_s + 400)
    expected = [2 * then.requests_per_s, then.uncached_tokens / 2, then.output_tokens]
    assert values(found) == pytest.approx(expected, rel=0.01)


def test_what_was_seen_some_time_ago_is_brought_up_to_date() -> None:
    """Requests were counted 300 s ago on average, answers 30 s ago."""
    now_s = 2.3 * DAY_S
    old, newer = usual(now_s - 300), usual(now_s - 30)
    seen = TrafficMeans(old.requests_per_s, old.uncached_tokens, newer.output_tokens)
    found = taught(2).ahead(SeenTraffic(seen, now_s - 300, now_s - 30), now_s)
    assert values(found) == pytest.approx(values(usual(now_s)), rel=0.01)


def test_of_the_first_day_nothing_is_known() -> None:
    forecast, now_s = taught(0.9), 0.9 * DAY_S
    assert forecast.ahead(seen_at(now_s), now_s + 300) is None
    # Over midnight it is: of the small hours something is known.
    assert forecast.ahead(seen_at(0.8 * DAY_S), 1.1 * DAY_S) is not None


def test_nights_without_requests_have_no_shape() -> None:
    forecast = PeriodicForecast(DAY_S)
    for at_s in np.arange(0.0, 2 * DAY_S, PERIOD_S):
        forecast.learn(seen_at(float(at_s)), 1.0 if at_s % DAY_S < DAY_S / 2 else 200.0)
    assert forecast.ahead(seen_at(2.2 * DAY_S), 2.25 * DAY_S) is None
    assert forecast.ahead(seen_at(2.6 * DAY_S), 2.65 * DAY_S) is not None


def test_the_last_days_count_most() -> None:
    """The wave comes half a day later from day 2 on: after three days of that the old one is nearly forgotten."""

    def shifted(at_s: float) -> TrafficMeans:
        return usual(at_s if at_s < 2 * DAY_S else at_s + DAY_S / 2)

    now_s = 5.2 * DAY_S
    found = taught(5, shifted).ahead(seen_at(now_s, shifted), now_s + 400)
    assert values(found) == pytest.approx(values(shifted(now_s + 400)), rel=0.1)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 3000),
            st.floats(1e-6, 1e6),
            st.floats(1, 1e6),
            st.floats(1, 1e6),
            st.floats(0, 1e5),
        ),
        max_size=30,
    ),
    st.floats(0, 1e5),
)
def test_whatever_comes_a_forecast_is_a_number(
    seen: list[tuple[float, float, float, float, float]], lead_s: float
) -> None:
    """It is above 0, finite, and no more than four times from what is seen."""
    forecast, now_s = PeriodicForecast(DAY_S), 0.0
    for pause_s, rate, uncached, output, requests in seen:
        now_s += pause_s
        last = SeenTraffic(TrafficMeans(rate, uncached, output), now_s, max(now_s - 10, 0.0))
        found = forecast.ahead(last, now_s + lead_s)
        forecast.learn(last, requests)
        if found is not None:
            for then, now in zip(values(found), values(last.means), strict=True):
                assert now / 4.001 <= then <= 4.001 * now


def test_memory_does_not_grow() -> None:
    forecast = taught(4)
    shapes = [each for each in vars(forecast).values() if hasattr(each, "_logs")]
    assert len(shapes) == 3 and all(len(each._logs) == SLOTS for each in shapes)


def test_a_period_is_a_time() -> None:
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="period"):
            PeriodicForecast(wrong)
    assert foresight_of(0.0) is None and foresight_of(60.0) is not None


class TwiceAsMuch:
    """A foresight that counts what it is told."""

    requests = 0.0

    def learn(self, seen: SeenTraffic, requests: float) -> None:
        self.requests += requests

    def ahead(self, seen: SeenTraffic, at_s: float) -> TrafficMeans | None:
        means = seen.means
        return TrafficMeans(2 * means.requests_per_s, 2 * means.uncached_tokens, 2 * means.output_tokens)


def test_the_outlook_begins_with_the_window() -> None:
    window, foresight = LengthWindow(600), TwiceAsMuch()
    outlook = Outlook(window, foresight)
    assert outlook.expect(500.0, 10.0, 0.0, 60.0) is None
    for second in range(1200):
        for tokens in (1000.0, 5000.0):
            window.add(tokens, float(second))
    found, plain = (each.expect(500.0, 10.0, 1200.0, 60.0) for each in (outlook, Outlook(window, None)))
    assert found is not None and found.is_forecast
    assert plain is not None and not plain.is_forecast
    assert values(plain.means) == pytest.approx([2.0, 3000.0, 500.0], rel=0.02)
    assert values(found.means) == pytest.approx([2 * each for each in values(plain.means)])
    assert found.lengths.mean() == pytest.approx(2 * plain.lengths.mean())
    # Only what is new is learnt.
    before = foresight.requests
    outlook.expect(500.0, 10.0, 1230.0, 60.0)
    assert foresight.requests - before == pytest.approx(30 * 2.0, rel=0.06)
