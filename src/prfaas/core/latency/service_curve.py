"""Seconds of prefill over uncached tokens on the instances of one cluster: a profile, corrected by measurements."""

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prfaas.core.arrays import FloatArray, np
from prfaas.core.latency.cached_prefix import after_prefix_s
from prfaas.core.latency.curve_reader import curve_reader
from prfaas.core.latency.profile import LatencyProfile

# The curve is a table of straight pieces, eight to an octave: within 0.1 % of a parabola.
_KNOTS_PER_OCTAVE = 8
_OCTAVES = 22
_BINS_PER_OCTAVE = 2
_SAMPLES_PER_BIN = 32
# For lengths this many octaves away a bin has half the weight that it has for its own.
_REACH_OCTAVES = 1.0
# The profile weighs as much as this many samples: against the mean of all bins, and that mean against each bin.
_PRIOR_SAMPLES = 2.0
_FIRST_SAMPLES = 16
_HALF_LIFE_S = 600.0
# The table is made again at most so often, but at each of the first samples.
_REBUILD_S = 1.0
_PAUSES = 20
# No length is longer.
_FAR_TOKENS = 2.0**50

DEFAULT_POINTS = ((1.0, 0.05), (1024.0, 0.35), (8192.0, 2.4), (32768.0, 11.0), (131072.0, 66.0))
"""(tokens, seconds) without a profile and before anything is measured: a slow instance, so that predictions are not too
good. It is equal for every cluster, so the number of instances decides how work is split."""


@dataclass(frozen=True, slots=True)
class PrefillSeconds:
    """A curve that no longer changes: a `PlanProblem` keeps it. Equal curves are equal values."""

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    _arrays: "tuple[FloatArray, FloatArray]" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The last piece goes on far beyond the table, so that one interpolation does for all lengths.
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond_s = self.seconds[-1] + (_FAR_TOKENS - self.tokens[-1]) * slope
        arrays = np.array([*self.tokens, _FAR_TOKENS]), np.array([*self.seconds, beyond_s])
        object.__setattr__(self, "_arrays", arrays)

    def __call__(self, tokens: FloatArray) -> FloatArray:
        """Seconds for arrays of tokens, of the same shape; see `ServiceCurve` for lengths outside the table."""
        return np.interp(tokens, *self._arrays)


class ServiceCurve:
    """T_prefill of one instance of a cluster (the paper's Table 4), for every length.

    It starts as `base` and is corrected by measured samples. Per half octave of lengths, the correction is the median
    ratio of measured to base of the last 32 samples. A sample has half its weight after ten minutes. Up to half of
    the weight may come from stalled engines without moving the median far. Lengths without samples follow the bins
    around them, then the mean of all. With few samples the base still counts. A pause between two samples ages the
    older ones by half a minute at most, so that an idle cluster forgets nothing.

    Whatever is measured, the curve is above 0 and never falls as lengths grow (isotonic regression). It is constant
    below 1 token and goes on with its last slope above 4 million.
    """

    seconds: Callable[[float], float]
    """Seconds of a prefill of so many uncached tokens, about 0.2 µs: for `ClusterView.prefill_s`."""

    def __init__(self, base: Callable[[float], float] | None = None) -> None:
        """Start with the base alone: seconds at any number of tokens of 1 and above; None: `DEFAULT_POINTS`."""
        import scipy.optimize  # noqa: F401  # half a second that the first sample must not cost an event loop

        knots = np.exp2(np.arange(_OCTAVES * _KNOTS_PER_OCTAVE + 1) / _KNOTS_PER_OCTAVE)
        seconds = base if base is not None else extended(DEFAULT_POINTS)
        self._knots: list[float] = knots.tolist()
        self._base = np.maximum.accumulate(np.array([seconds(tokens) for tokens in self._knots]))
        if not (np.isfinite(self._base).all() and self._base[0] > 0):
            raise ValueError("a prefill takes a finite number of seconds above 0")
        self._rebuild_s = _REBUILD_S
        bins = _OCTAVES * _BINS_PER_OCTAVE
        self._logs: FloatArray = np.zeros((bins, _SAMPLES_PER_BIN))
        self._taken_s: FloatArray = np.full((bins, _SAMPLES_PER_BIN), -np.inf)
        self._filled = [0] * bins
        centres = (np.arange(bins) + 0.5) / _BINS_PER_OCTAVE
        distance = np.abs(np.log2(knots)[:, None] - centres[None, :]) / _REACH_OCTAVES
        self._nearness = 1.0 / (1.0 + distance**2)
        self._newest_s = self._built_s = -math.inf
        self._active_s = 0.0
        self._starts: list[float] = [self._knots[0], *self._knots]
        self._values: list[float]
        self._slopes: list[float]
        self._values, self._slopes = self._lines(self._base)
        self._base_values, self._base_slopes = self._values.copy(), self._slopes.copy()
        self.seconds = curve_reader(self._knots, self._starts, self._values, self._slopes)
        self._at_rest: PrefillSeconds | None = None
        self.samples = 0

    @classmethod
    def of_profile(cls, profile: LatencyProfile, speedup: float = 1.0) -> "ServiceCurve":
        """From a profile, its times divided by `speedup`.

        Below the profile's range its first value holds; above, the curve goes on as the power of the length that
        its last octave grew with, at least linearly and at most quadratically.
        """
        low, high = profile.range_tokens
        points = [(tokens, profile.prefill_s(tokens)) for tokens in _between(low, high)]
        curve = extended(points, profile.last_growth)
        return cls(lambda tokens: curve(tokens) / speedup)

    def __getstate__(self) -> dict[str, object]:
        """Without `seconds`: a copy reads its own tables."""
        return {name: value for name, value in self.__dict__.items() if name != "seconds"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.seconds = curve_reader(self._knots, self._starts, self._values, self._slopes)

    def at_rest(self) -> PrefillSeconds:
        """The curve as it is now, for arrays: for a `PlanProblem`, in any thread."""
        if self._at_rest is None:
            self._at_rest = PrefillSeconds(tuple(self._knots), tuple(self._values[1:]))
        return self._at_rest

    def prefill_s(self, tokens: FloatArray) -> FloatArray:
        """`seconds` for arrays of tokens, of the same shape."""
        return self.at_rest()(tokens)

    def between_s(self, start_tokens: int, end_tokens: int) -> float:
        """Seconds of a prefill over tokens [start, end) of a prompt, from those over its beginnings."""
        return self.seconds(end_tokens) - self.seconds(start_tokens)

    def after_prefix_s(self, uncached_tokens: float, reused_tokens: float) -> float:
        """Seconds of computing `uncached_tokens` behind `reused_tokens` that need not be computed."""
        return after_prefix_s(self.seconds, uncached_tokens, reused_tokens)

    def copied(self, rebuild_s: float) -> "ServiceCurve":
        """A curve of its own that goes on from here; its table is made again at most so often."""
        copied = copy.deepcopy(self)
        copied._rebuild_s = rebuild_s
        return copied

    def add(self, tokens: float, seconds: float, now_s: float) -> None:
        """Take one measured prefill: `seconds` of service, without waiting. Impossible values are ignored.

        About 1.5 µs, and 0.2 ms when the table is made again.
        """
        if not (tokens >= 1 and 0 < seconds < math.inf):
            return
        bin_ = min(int(math.log2(tokens) * _BINS_PER_OCTAVE), len(self._filled) - 1)
        place = self._filled[bin_] % _SAMPLES_PER_BIN
        self._filled[bin_] += 1
        self._logs[bin_, place] = math.log(seconds / self._base_at(tokens))
        if self.samples:
            self._active_s += min(max(now_s - self._newest_s, 0.0), _HALF_LIFE_S / _PAUSES)
        self._newest_s = max(now_s, self._newest_s)
        self._taken_s[bin_, place] = self._active_s
        self.samples += 1
        if self.samples <= _FIRST_SAMPLES or now_s - self._built_s >= self._rebuild_s:
            self._built_s = now_s
            self._rebuild()

    def _rebuild(self) -> None:
        from scipy.optimize import isotonic_regression

        weights = np.exp2((self._taken_s - self._active_s) / _HALF_LIFE_S)
        mass = weights.sum(axis=1)
        seen = mass > 0
        medians = np.zeros(len(mass))
        medians[seen] = _medians(self._logs[seen], weights[seen])
        overall = float((mass * medians).sum() / (mass.sum() + _PRIOR_SAMPLES))
        local = self._nearness @ mass
        moved = self._nearness @ (mass * (medians - overall)) / (local + _PRIOR_SAMPLES)
        wanted = self._base * np.exp(overall + moved)
        rising = isotonic_regression(wanted, weights=local + _PRIOR_SAMPLES).x
        self._at_rest = None
        # In place: `seconds` reads them.
        self._values[:], self._slopes[:] = self._lines(rising)

    def _lines(self, seconds: FloatArray) -> tuple[list[float], list[float]]:
        """Value and slope of every piece; the first is what lies below the table, the last what lies above."""
        slopes = np.diff(seconds) / np.diff(self._knots)
        return [float(seconds[0]), *seconds.tolist()], [0.0, *slopes.tolist(), float(slopes[-1])]

    def _base_at(self, tokens: float) -> float:
        piece = bisect_right(self._knots, tokens)
        return self._base_values[piece] + self._base_slopes[piece] * (tokens - self._starts[piece])


def extended(points: Sequence[tuple[float, float]], power: float | None = None) -> Callable[[float], float]:
    """The curve through `points` ((tokens, seconds), ascending), straight between them and for every length.

    Below the first point it is constant. Above the last it grows with the `power` of the length, within [1, 2];
    None: the power that joins the last two points.
    """
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if power is None:
        power = math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2]) if len(points) > 1 else 1.0
    grows = min(max(power, 1.0), 2.0)

    def curve(tokens: float) -> float:
        right = bisect_right(xs, tokens)
        if right == 0:
            return ys[0]
        if right == len(xs):
            return ys[-1] * math.pow(tokens / xs[-1], grows)
        share = (tokens - xs[right - 1]) / (xs[right] - xs[right - 1])
        return ys[right - 1] + share * (ys[right] - ys[right - 1])

    return curve


def _between(low: float, high: float) -> list[float]:
    """Both ends, and enough lengths between them."""
    octaves = math.log2(high / low)
    between: list[float] = np.geomspace(
        low, high, max(math.ceil(octaves * 2 * _KNOTS_PER_OCTAVE), 1) + 1
    ).tolist()
    return [low, *between[1:-1], high] if high > low else [low]


def _medians(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The weighted median of every row."""
    order = np.argsort(values, axis=1)
    sorted_values = np.take_along_axis(values, order, axis=1)
    cumulative = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1)
    half = cumulative[:, -1:] / 2
    return np.take_along_axis(sorted_values, (cumulative < half).sum(axis=1)[:, None], axis=1)[:, 0]
