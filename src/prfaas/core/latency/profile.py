"""How fast one instance is, as measured: prefill seconds over lengths, decode step seconds over batches.

A `Curve` is measured points, or a polynomial fitted to them, with the range where it holds.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, overload

from prfaas.core.arrays import NDArray, np

Interpolation = Literal["linear", "cubic", "monotone"]
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class PiecewisePolynomial:
    """A function of one variable; its first and last piece go on beyond the ends."""

    breaks: tuple[float, ...]
    """Piece i covers breaks[i] up to breaks[i + 1]."""
    coefficients: tuple[tuple[float, ...], ...]
    """Of piece i, those of the powers of (x - breaks[i]), highest power first; as many in every piece."""

    def at(self, x: float) -> float:
        """The value at `x`."""
        piece = min(max(bisect_right(self.breaks, x) - 1, 0), len(self.coefficients) - 1)
        distance, value = x - self.breaks[piece], 0.0
        for coefficient in self.coefficients[piece]:
            value = value * distance + coefficient
        return value

    def at_each(self, xs: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """The values at every x of an array of any shape."""
        breaks = np.asarray(self.breaks)
        pieces = np.clip(np.searchsorted(breaks, xs, side="right") - 1, 0, len(self.coefficients) - 1)
        table = np.asarray(self.coefficients)
        distance = xs - breaks[pieces]
        values: NDArray[np.float64] = np.zeros_like(distance)
        for power in range(table.shape[1]):
            values = values * distance + table[pieces, power]
        return values

    def lowest(self, low: float, high: float) -> tuple[float, float]:
        """(x, value) where the function is lowest on [low, high], exact for pieces up to the third degree."""
        candidates = [low, high, *(x for x in self.breaks if low < x < high)]
        edges = [low, *(x for x in self.breaks[1 : len(self.coefficients)]), high]
        for start, end, origin, powers in zip(edges, edges[1:], self.breaks, self.coefficients, strict=False):
            candidates += [
                origin + x for x in _stationary(powers) if max(start, low) < origin + x < min(end, high)
            ]
        return min(((x, self.at(x)) for x in candidates), key=lambda pair: pair[1])


def _stationary(powers: Sequence[float]) -> list[float]:
    """Where the derivative of a polynomial of at most the third degree is 0."""
    c, b, a = ([0.0] * 3 + [float(value) for value in powers[:-1]])[-3:][::-1]
    a, b = 3 * a, 2 * b
    if a == 0:
        return [-c / b] if b else []
    inside = b * b - 4 * a * c
    if inside < 0:
        return []
    root = inside**0.5
    return [(-b - root) / (2 * a), (-b + root) / (2 * a)]


@lru_cache(maxsize=256)
def through(points: Points, interpolation: Interpolation) -> PiecewisePolynomial:
    """The function through `points` (x ascending).

    "linear" joins them by lines; "cubic" by one smooth cubic spline (not-a-knot: four points give the one cubic
    through them); "monotone" by cubics that never turn between two points (Fritsch-Carlson, SciPy's pchip).
    """
    xs, ys = zip(*points, strict=True)
    if len(points) == 1:
        return PiecewisePolynomial(xs, (ys,))
    if interpolation == "linear":
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        return PiecewisePolynomial(xs, tuple(zip(slopes, ys, strict=False)))
    from scipy.interpolate import CubicSpline, PchipInterpolator

    spline = CubicSpline(xs, ys) if interpolation == "cubic" else PchipInterpolator(xs, ys)
    return PiecewisePolynomial(
        tuple(float(x) for x in spline.x), tuple(tuple(float(c) for c in piece) for piece in spline.c.T)
    )


@lru_cache(maxsize=256)
def polynomial(coefficients: tuple[float, ...]) -> PiecewisePolynomial:
    """c0 + c1·x + c2·x² + …"""
    return PiecewisePolynomial((0.0,), (tuple(reversed(coefficients)),))


class ProfileError(ValueError):
    """A profile can't be found, read or used."""


class ProfileRangeError(ProfileError):
    """A profile was asked about something outside of what was measured."""


MAX_DEGREE = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for every x of [low, high]; nothing is said about any x outside. `points` or `coefficients` is given.

    Raises:
        ProfileError: there is no such curve, it goes to or below 0 s, or the range is wider than the points
            without a reason.
    """

    low: float
    high: float
    points: Points = ()
    """(x, seconds), x ascending."""
    interpolation: Interpolation = "linear"
    coefficients: tuple[float, ...] = ()
    """c0, c1, … of a polynomial up to the third degree."""
    range_reason: str = ""
    """Why a range that goes beyond the measured points may be used."""
    _pieces: PiecewisePolynomial = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        pieces = through(self.points, self.interpolation) if self.points else polynomial(self.coefficients)
        object.__setattr__(self, "_pieces", pieces)
        x, lowest = pieces.lowest(self.low, self.high)
        if not lowest > 0:
            raise ProfileError(
                f"the curve gives {lowest:.4g} s at {x:.0f}; seconds must be above 0 everywhere"
            )

    @classmethod
    def through_points(
        cls,
        points: Points,
        interpolation: Interpolation = "monotone",
        *,
        valid: tuple[float, float] | None = None,
        range_reason: str = "",
    ) -> "Curve":
        """The curve through measured points, on their own range unless `valid` and a reason say otherwise."""
        if not points:
            raise ProfileError("points must have at least one entry")
        low, high = valid or (points[0][0], points[-1][0])
        return cls(low, high, points=points, interpolation=interpolation, range_reason=range_reason)

    def _check(self) -> None:
        if bool(self.points) == bool(self.coefficients):
            raise ProfileError("give either points or polynomial")
        numbers = [
            self.low,
            self.high,
            *self.coefficients,
            *(value for point in self.points for value in point),
        ]
        if not all(math.isfinite(number) for number in numbers):
            raise ProfileError("every number must be finite")
        if len(self.coefficients) > MAX_DEGREE + 1:
            raise ProfileError(
                f"polynomial must have at most {MAX_DEGREE + 1} coefficients, not {len(self.coefficients)}"
            )
        xs = [x for x, _ in self.points]
        for before, after in pairwise(xs):
            if before >= after:
                raise ProfileError(f"points must ascend; {after:g} comes after {before:g}")
        if xs and xs[0] <= 0:
            raise ProfileError(f"points must be above 0, not {xs[0]:g}")
        if not 0 < self.low <= self.high:
            raise ProfileError(f"the range must be [low, high] with 0 < low <= high, not {self.range_text}")
        if xs and (self.low < xs[0] or self.high > xs[-1]):
            if len(xs) == 1:
                raise ProfileError(
                    f"one point says nothing beyond itself, so the range can't be {self.range_text}"
                )
            if not self.range_reason.strip():
                raise ProfileError(
                    f"the range {self.range_text} is wider than the points; give range_reason, why that may be trusted"
                )

    def divided(self, factor: float) -> "Curve":
        """The same curve with all its times divided by `factor`, above 0."""
        points = tuple((x, seconds / factor) for x, seconds in self.points)
        return replace(self, points=points, coefficients=tuple(c / factor for c in self.coefficients))

    @property
    def range_text(self) -> str:
        """The range for people: "[128, 131072]"."""
        return f"[{self.low:g}, {self.high:g}]" if self.high < 1e6 else f"[{self.low:.0f}, {self.high:.0f}]"

    def covers(self, low: float, high: float | None = None) -> bool:
        """True if all of [low, high] is inside the range."""
        return self.low <= low and (low if high is None else high) <= self.high

    @overload
    def at(self, x: float) -> float: ...
    @overload
    def at(self, x: "NDArray[np.float64]") -> "NDArray[np.float64]": ...
    def at(self, x: "float | NDArray[np.float64]") -> "float | NDArray[np.float64]":
        """Seconds at `x`, a number or an array of any shape.

        Raises:
            ProfileRangeError: an x outside the range. There is no extrapolation.
        """
        if isinstance(x, int | float):
            if not self.low <= x <= self.high:
                raise ProfileRangeError(f"{self.range_text} is covered, not {x:g}")
            return self._pieces.at(x)
        xs = np.asarray(x, dtype=np.float64)
        outside = ~((xs >= self.low) & (xs <= self.high))
        if outside.any():
            raise ProfileRangeError(f"{self.range_text} is covered, not {xs[outside].flat[0]:g}")
        values = self._pieces.at_each(xs)
        return float(values) if values.ndim == 0 else values


PrefillCurve = Curve
"""Seconds from a request's start to its first token on an idle instance, over uncached prompt tokens."""

# A step of exactly the limit keeps the limit, whatever rounding made of 1 / 40.
_LIMIT_TOLERANCE = 1e-9


Origin = Literal["measured", "published", "estimated"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """How the times of a curve are known.

    Raises:
        ProfileError: the band is none.
    """

    origin: Origin | None = None
    """Measured by who wrote the file, published or derived from what was, or estimated; None: not stated."""
    source: str = ""
    """Where the times come from, if from elsewhere than the profile's `source`."""
    band: tuple[float, float] | None = None
    """Measured over estimated times, within which most are (`docs/explanation/estimates.md`)."""

    def __post_init__(self) -> None:
        if self.band is not None and not 0 < self.band[0] <= self.band[1] < math.inf:
            raise ProfileError("band must be [low, high] with 0 < low <= high: measured over estimated times")


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Seconds of one decode step over the number of requests in the batch."""

    curve: Curve
    context_tokens: float | None = None
    """The context length per request that the steps were measured at; None: not stated."""
    context_s: float = 0.0
    """Seconds that a step takes longer per token of context in its batch; 0: not known."""
    evidence: Evidence = field(default_factory=Evidence)
    """How the steps are known."""

    @classmethod
    def through_points(cls, points: Points, context_tokens: int, evidence: Evidence) -> "DecodeCurve | None":
        """The curve through steps of some batches; None without any."""
        if not points:
            return None
        return cls(Curve.through_points(points, "linear"), float(context_tokens), evidence=evidence)


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """T_prefill and T_decode of one instance of `gpus_per_instance` GPUs (the paper's Table 4)."""

    name: str
    hardware: str
    model: str
    gpus_per_instance: int
    prefill: PrefillCurve
    decode: DecodeCurve | None
    """None where only prefill is known."""
    source: str
    """Where the numbers come from."""
    evidence: Evidence = field(default_factory=Evidence)
    """How the prefill times are known."""

    def sped_up(self, factor: float) -> "LatencyProfile":
        """An instance that is `factor` times as fast, as stand-ins with a `speedup` are."""
        decode = self.decode
        if decode is not None:
            decode = replace(decode, curve=decode.curve.divided(factor), context_s=decode.context_s / factor)
        return replace(self, prefill=self.prefill.divided(factor), decode=decode)

    @property
    def range_tokens(self) -> tuple[float, float]:
        """The prompt lengths that prefill times are known for, both ends included."""
        return (self.prefill.low, self.prefill.high)

    @property
    def last_growth(self) -> float:
        """The power of the length that prefills grew with over the last octave: at least 1, at most 2."""
        low, high = self.range_tokens
        middle = max(high / 2, low)
        if high <= middle:
            return 1.0
        grown = math.log(self.prefill_s(high) / self.prefill_s(middle))
        return min(max(grown / math.log(high / middle), 1.0), 2.0)

    def extended_prefill_s(self, tokens: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """`prefill_s` for arrays of any lengths: below `range_tokens` the first time holds, above it times go on as
        `last_growth` says."""
        low, high = self.range_tokens
        longer: NDArray[np.float64] = np.maximum(np.asarray(tokens) / high, 1.0) ** self.last_growth
        return self.prefill_s(np.clip(tokens, low, high)) * longer

    def require_range(self, low_tokens: float, high_tokens: float) -> None:
        """Make sure that prefill times are known for all of [low_tokens, high_tokens].

        Raises:
            ProfileRangeError: they are not.
        """
        for tokens in (low_tokens, high_tokens):
            if not self.prefill.covers(tokens):
                raise self._outside(tokens)

    @overload
    def prefill_s(self, tokens: float) -> float: ...
    @overload
    def prefill_s(self, tokens: "NDArray[np.float64]") -> "NDArray[np.float64]": ...
    def prefill_s(self, tokens: "float | NDArray[np.float64]") -> "float | NDArray[np.float64]":
        """T_prefill in seconds for `tokens` uncached tokens; an array gives an array of its shape.

        Raises:
            ProfileRangeError: a length outside `range_tokens`. There is no extrapolation.
        """
        try:
            return self.prefill.at(tokens)
        except ProfileRangeError:
            raise self._outside(tokens) from None

    @property
    def range_batch(self) -> tuple[float, float]:
        """The batch sizes that decode step times are known for. ProfileError without decode times."""
        return (self._decode.low, self._decode.high)

    def decode_step_s(self, batch: float) -> float:
        """T_decode in seconds with `batch` requests in the batch.

        Raises:
            ProfileError: this profile has no decode times.
            ProfileRangeError: a batch outside `range_batch`.
        """
        if not self._decode.covers(batch):
            raise ProfileRangeError(
                f'profile "{self.name}" has decode times for batches of {_span(*self.range_batch)}, not of {batch:g}'
            )
        return self._decode.at(float(batch))

    def max_batch(self, step_limit_s: float) -> int:
        """BS_max: the largest batch up to which every step takes at most `step_limit_s`; 0 if already 1 is too slow.

        Never more than the largest batch measured, however generous the limit.

        Raises:
            ProfileError: this profile has no decode times.
            ProfileRangeError: the smallest batch measured is too slow and not 1, so the answer isn't known.
        """
        low, high = self.range_batch
        limit = step_limit_s * (1 + _LIMIT_TOLERANCE)
        best = 0
        for batch in range(math.ceil(low), math.floor(high) + 1):
            if self._decode.at(float(batch)) > limit:
                break
            best = batch
        if best == 0 and low > 1:
            raise ProfileRangeError(
                f'profile "{self.name}" has decode times for batches of {_span(low, high)}, and a step of {low:g} '
                f"takes {self._decode.at(low) * 1000:.3g} ms, over the limit of {step_limit_s * 1000:.3g} ms"
            )
        return best

    @property
    def _decode(self) -> Curve:
        if self.decode is None:
            raise ProfileError(
                f'profile "{self.name}" has no decode times, so its instances can only prefill'
            )
        return self.decode.curve

    def _outside(self, tokens: "float | NDArray[np.float64]") -> ProfileRangeError:
        low, high = self.range_tokens
        asked: float
        if isinstance(tokens, int | float):
            asked = tokens
        else:
            values = np.asarray(tokens, dtype=np.float64)
            asked = float(values[~((values >= low) & (values <= high))].flat[0])
        return ProfileRangeError(
            f'profile "{self.name}" has prefill times for {_span(low, high)} tokens, not for {_number(asked)}'
        )


def _span(low: float, high: float) -> str:
    return _number(low) if low == high else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.6g}"
