"""Seconds over a length or a batch: measured points, or a polynomial fitted to them, and where it holds."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, overload

from prfaas.profiles.errors import ProfileError, ProfileRangeError
from prfaas.profiles.pieces import Interpolation, Pieces, Points, polynomial, through

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_DEGREE = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for every x of [low, high]; nothing is said about any x outside.

    Exactly one of `points` ((x, seconds), x ascending) and `coefficients` (c0, c1, … of a polynomial up to the
    third degree) is given. `range_reason` says why a range that goes beyond the measured points may be used.

    Raises:
        ProfileError: there is no such curve, it goes to or below 0 s, or the range is wider than the points
            without a reason.
    """

    low: float
    high: float
    points: Points = ()
    interpolation: Interpolation = "linear"
    coefficients: tuple[float, ...] = ()
    range_reason: str = ""
    _pieces: Pieces = field(init=False, repr=False, compare=False)

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
        import numpy as np

        xs = np.asarray(x, dtype=np.float64)
        outside = ~((xs >= self.low) & (xs <= self.high))
        if outside.any():
            raise ProfileRangeError(f"{self.range_text} is covered, not {xs[outside].flat[0]:g}")
        values = self._pieces.at_each(xs)
        return float(values) if values.ndim == 0 else values
