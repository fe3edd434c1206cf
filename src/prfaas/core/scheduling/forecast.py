"""What traffic will be in some minutes, if a day is like the days before it (section 3.4.3: "often periodic")."""

import math
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.scheduling.length_window import LengthWindow
from prfaas.core.workload import LengthDistribution

SLOTS = 48
"""Parts of a period that are learnt apart: half an hour of a day."""

# What a period counts beside the one after it.
_DECAY = 0.5
# Fewer requests than this say little of a part of the period.
_ENOUGH_REQUESTS = 100.0
# Traffic is not expected to change by more than this factor while a role changes.
_MOST = 4.0


@dataclass(frozen=True, slots=True)
class TrafficMeans:
    """Traffic in three numbers."""

    requests_per_s: float
    uncached_tokens: float
    """Mean uncached length of a prompt."""
    output_tokens: float
    """Mean length of an answer."""


@dataclass(frozen=True, slots=True)
class SeenTraffic:
    """What was seen of the traffic up to now."""

    means: TrafficMeans
    at_s: float
    """The middle of the time in which requests were counted."""
    output_at_s: float
    """The middle of the time in which answers were."""


class Foresight(Protocol):
    """What is known of traffic to come."""

    def learn(self, seen: SeenTraffic, requests: float) -> None:
        """Take note of traffic that is known by now; `requests` of it are new."""

    def ahead(self, seen: SeenTraffic, at_s: float) -> TrafficMeans | None:
        """The traffic at `at_s`, if this was seen last; None if nothing is known of it."""


class _Shape:
    """The usual course of one mean over the period: geometric means of its parts, the last periods above all."""

    def __init__(self, period_s: float) -> None:
        self._slot_s = period_s / SLOTS
        self._numbers = [-1] * SLOTS
        self._weights = [0.0] * SLOTS
        self._logs = [0.0] * SLOTS

    def learn(self, value: float, weight: float, at_s: float) -> None:
        number = int(at_s // self._slot_s)
        slot = number % SLOTS
        if self._numbers[slot] < number:
            self._weights[slot] *= _DECAY
            self._numbers[slot] = number
        self._weights[slot] += weight
        self._logs[slot] += (math.log(value) - self._logs[slot]) * weight / self._weights[slot]

    def growth(self, from_s: float, to_s: float) -> float | None:
        """The usual value at `to_s` over that at `from_s`; None where too little is known."""
        then, now = self._log(to_s), self._log(from_s)
        if then is None or now is None:
            return None
        return min(max(math.exp(then - now), 1 / _MOST), _MOST)

    def _log(self, at_s: float) -> float | None:
        place = at_s / self._slot_s - 0.5
        first = math.floor(place)
        one, other = first % SLOTS, (first + 1) % SLOTS
        if min(self._weights[one], self._weights[other]) < _ENOUGH_REQUESTS * _DECAY:
            return None
        return self._logs[one] + (place - first) * (self._logs[other] - self._logs[one])


class PeriodicForecast:
    """Learns the shape of a period, and carries what is seen now along it.

    The period has `SLOTS` parts. Of each, the geometric means of rate, prompts and answers are kept, weighted by
    requests; every period counts half as much as the one after it. Between the middles of two parts the logarithms
    are interpolated. A forecast is what is seen now, times the usual growth from when it was seen until then, each
    mean for itself: today's deviation from the usual stays as it is. That also makes good for the age of what is
    seen, which is half of the window. A part in which hardly any requests came yet has no shape: there is no
    forecast from it or for it. Memory does not grow. Times are seconds of any one clock from 0 on.
    """

    def __init__(self, period_s: float) -> None:
        if not 0 < period_s < math.inf:
            raise ValueError(f"a period is a time above 0, not {period_s!r} s")
        self.period_s = period_s
        self._rate, self._uncached, self._output = (_Shape(period_s) for _ in range(3))

    def learn(self, seen: SeenTraffic, requests: float) -> None:
        """See `Foresight`."""
        means = seen.means
        if requests <= 0 or min(means.requests_per_s, means.uncached_tokens, means.output_tokens) <= 0:
            return
        self._rate.learn(means.requests_per_s, requests, seen.at_s)
        self._uncached.learn(means.uncached_tokens, requests, seen.at_s)
        self._output.learn(means.output_tokens, requests, seen.output_at_s)

    def ahead(self, seen: SeenTraffic, at_s: float) -> TrafficMeans | None:
        """See `Foresight`."""
        rate = self._rate.growth(seen.at_s, at_s)
        uncached = self._uncached.growth(seen.at_s, at_s)
        output = self._output.growth(seen.output_at_s, at_s)
        if rate is None or uncached is None or output is None:
            return None
        means = seen.means
        return TrafficMeans(
            means.requests_per_s * rate, means.uncached_tokens * uncached, means.output_tokens * output
        )


def foresight_of(period_s: float) -> Foresight | None:
    """What `control.forecast_period_s` says: nothing is foreseen with a period of 0."""
    return PeriodicForecast(period_s) if period_s > 0 else None


@dataclass(frozen=True, slots=True)
class ExpectedTraffic:
    """What roles are chosen for."""

    lengths: LengthDistribution
    """Uncached lengths in tokens."""
    means: TrafficMeans
    is_forecast: bool
    """False: it is what was seen."""


class Outlook:
    """The traffic that roles are chosen for: the window's, or a forecast that starts from it."""

    def __init__(self, window: LengthWindow, foresight: Foresight | None) -> None:
        """`foresight`: None takes what is seen for what will be."""
        self._window = window
        self._foresight = foresight
        self._learnt_s = -math.inf

    def expect(
        self, output_tokens: float, output_age_s: float, now_s: float, lead_s: float
    ) -> ExpectedTraffic | None:
        """The traffic in `lead_s`; None while too few requests came.

        `output_tokens` is the mean of answers `output_age_s` ago. Call it periodically: it is what is learnt from.
        """
        lengths = self._window.lengths(now_s)
        if lengths is None:
            return None
        rate = self._window.rate_per_s(now_s)
        means = TrafficMeans(rate, lengths.mean(), output_tokens)
        if self._foresight is None:
            return ExpectedTraffic(lengths, means, False)
        window_s = self._window.window_s
        seen = SeenTraffic(means, now_s - window_s / 2, now_s - output_age_s)
        new_s = min(now_s - self._learnt_s, window_s)
        self._learnt_s = now_s
        then = self._foresight.ahead(seen, now_s + lead_s)
        self._foresight.learn(seen, rate * new_s)
        if then is None:
            return ExpectedTraffic(lengths, means, False)
        return ExpectedTraffic(lengths.scaled(then.uncached_tokens / means.uncached_tokens), then, True)
