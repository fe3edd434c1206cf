"""A function of one variable as polynomials between breaks."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Interpolation = Literal["linear", "cubic", "monotone"]
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Piece i covers breaks[i] up to breaks[i + 1]; the first and last piece go on beyond the ends.

    `coefficients[i]` are those of (x - breaks[i]), highest power first, the same number in every piece.
    """

    breaks: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...]

    def at(self, x: float) -> float:
        """The value at `x`."""
        piece = min(max(bisect_right(self.breaks, x) - 1, 0), len(self.coefficients) - 1)
        distance, value = x - self.breaks[piece], 0.0
        for coefficient in self.coefficients[piece]:
            value = value * distance + coefficient
        return value

    def at_each(self, xs: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """The values at every x of an array of any shape."""
        import numpy as np

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
def through(points: Points, interpolation: Interpolation) -> Pieces:
    """The function through `points` (x ascending).

    "linear" joins them by lines; "cubic" by one smooth cubic spline (not-a-knot: four points give the one cubic
    through them); "monotone" by cubics that never turn between two points (Fritsch-Carlson, SciPy's pchip).
    """
    xs, ys = zip(*points, strict=True)
    if len(points) == 1:
        return Pieces(xs, (ys,))
    if interpolation == "linear":
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        return Pieces(xs, tuple(zip(slopes, ys, strict=False)))
    from scipy.interpolate import CubicSpline, PchipInterpolator

    spline = CubicSpline(xs, ys) if interpolation == "cubic" else PchipInterpolator(xs, ys)
    return Pieces(
        tuple(float(x) for x in spline.x), tuple(tuple(float(c) for c in piece) for piece in spline.c.T)
    )


@lru_cache(maxsize=256)
def polynomial(coefficients: tuple[float, ...]) -> Pieces:
    """c0 + c1·x + c2·x² + …"""
    return Pieces((0.0,), (tuple(reversed(coefficients)),))
