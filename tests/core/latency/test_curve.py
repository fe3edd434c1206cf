"""Curves: through their points, within their range, never below zero."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas.core.latency.profile import Curve, ProfileError, ProfileRangeError

INTERPOLATIONS = ("linear", "cubic", "monotone")

points = st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True).flatmap(
    lambda xs: st.tuples(*(st.tuples(st.just(float(x)), st.floats(0.1, 10)) for x in sorted(xs)))
)


@settings(deadline=None)  # the first call imports SciPy
@given(points, st.sampled_from(INTERPOLATIONS))
def test_goes_through_its_points(given_points: tuple[tuple[float, float], ...], interpolation: str) -> None:
    try:
        curve = Curve.through_points(given_points, interpolation)  # type: ignore[arg-type]
    except ProfileError as error:
        assert "seconds must be above 0 everywhere" in str(error)
        assume(False)
    for x, seconds in given_points:
        assert curve.at(x) == pytest.approx(seconds, rel=1e-9)


@settings(deadline=None)  # the first call imports SciPy
@given(points, st.sampled_from(("linear", "monotone")), st.floats(0, 1))
def test_never_leaves_its_neighbours(
    given_points: tuple[tuple[float, float], ...], interpolation: str, where: float
) -> None:
    curve = Curve.through_points(given_points, interpolation)  # type: ignore[arg-type]
    for (x0, y0), (x1, y1) in pairwise(given_points):
        value = curve.at(min(x1, x0 + where * (x1 - x0)))
        assert min(y0, y1) - 1e-9 <= value <= max(y0, y1) + 1e-9


@settings(deadline=None)  # the first call imports SciPy
@given(points, st.sampled_from(INTERPOLATIONS))
def test_arrays_are_the_single_values(
    given_points: tuple[tuple[float, float], ...], interpolation: str
) -> None:
    try:
        curve = Curve.through_points(given_points, interpolation)  # type: ignore[arg-type]
    except ProfileError:
        assume(False)
    xs = np.linspace(curve.low, curve.high, 7).clip(curve.low, curve.high)
    assert curve.at(xs).tolist() == pytest.approx([curve.at(float(x)) for x in xs])
    assert curve.at(xs.reshape(7, 1)).shape == (7, 1)


@settings(deadline=None)  # the first call imports SciPy
@given(points, st.sampled_from(INTERPOLATIONS))
def test_is_what_scipy_makes(given_points: tuple[tuple[float, float], ...], interpolation: str) -> None:
    from scipy.interpolate import CubicSpline, PchipInterpolator, make_interp_spline

    xs, ys = zip(*given_points, strict=True)
    try:
        curve = Curve.through_points(given_points, interpolation)  # type: ignore[arg-type]
    except ProfileError:
        grid = np.linspace(xs[0], xs[-1], 20_000)
        assert CubicSpline(xs, ys)(grid).min() < 0.05
        return
    made = {
        "linear": lambda: make_interp_spline(xs, ys, 1),
        "cubic": lambda: CubicSpline(xs, ys),
        "monotone": lambda: PchipInterpolator(xs, ys),
    }[interpolation]()
    grid = np.linspace(curve.low, curve.high, 11).clip(curve.low, curve.high)
    assert curve.at(grid) == pytest.approx(made(grid), rel=1e-6, abs=1e-6)


def test_nothing_is_said_outside() -> None:
    curve = Curve.through_points(((10.0, 1.0), (20.0, 2.0)), "linear")
    assert curve.at(10) == 1.0
    assert curve.at(20) == 2.0
    assert curve.at(15) == 1.5
    for outside in (9.999, 20.001, 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ProfileRangeError, match=r"\[10, 20\] is covered, not"):
            curve.at(outside)
        with pytest.raises(ProfileRangeError, match="is covered, not"):
            curve.at(np.array([15.0, outside]))


def test_a_wider_range_needs_a_reason() -> None:
    rows = ((10.0, 1.0), (20.0, 2.0))
    with pytest.raises(ProfileError, match="is wider than the points; give range_reason"):
        Curve.through_points(rows, "linear", valid=(5, 20))
    curve = Curve.through_points(rows, "linear", valid=(5, 30), range_reason="a test")
    assert curve.at(5) == pytest.approx(0.5)
    assert curve.at(30) == pytest.approx(3.0)
    narrower = Curve.through_points(rows, "linear", valid=(12, 18))
    assert not narrower.covers(11)


@pytest.mark.parametrize(
    ("rows", "interpolation", "message"),
    [
        ((), "linear", "points must have at least one entry"),
        (((2.0, 1.0), (1.0, 2.0)), "linear", "points must ascend; 1 comes after 2"),
        (((1.0, 1.0), (1.0, 2.0)), "linear", "points must ascend; 1 comes after 1"),
        (((1.0, 1.0), (2.0, float("nan"))), "linear", "every number must be finite"),
        (((1.0, 1.0), (2.0, -1.0)), "linear", "-1 s at 2; seconds must be above 0"),
        (((0.0, 1.0), (2.0, 1.0)), "linear", "points must be above 0, not 0"),
        # The cubic dips to below zero between 2 and 3.
        (((1.0, 5.0), (2.0, 0.1), (3.0, 0.1), (4.0, 5.0)), "cubic", "seconds must be above 0 everywhere"),
    ],
)
def test_bad_points(rows: tuple[tuple[float, float], ...], interpolation: str, message: str) -> None:
    with pytest.raises(ProfileError) as raised:
        Curve.through_points(rows, interpolation)  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_polynomials() -> None:
    curve = Curve(1, 100, coefficients=(1.0, 0.5, 0.01))
    assert curve.at(10) == pytest.approx(1 + 5 + 1)
    with pytest.raises(ProfileError, match="seconds must be above 0"):
        Curve(1, 100, coefficients=(-1.0, 0.5))
    # Its lowest point lies inside the range.
    with pytest.raises(ProfileError, match="at 10; seconds must be above 0"):
        Curve(1, 100, coefficients=(99.0, -20.0, 1.0))
    with pytest.raises(ProfileError, match="at most 4 coefficients, not 5"):
        Curve(1, 2, coefficients=(1.0,) * 5)
    with pytest.raises(ProfileError, match="either points or polynomial"):
        Curve(1, 2)


def test_one_point_says_nothing_else() -> None:
    curve = Curve.through_points(((20.0, 0.025),), "linear")
    assert curve.at(20) == 0.025
    with pytest.raises(ProfileRangeError):
        curve.at(19)
    with pytest.raises(ProfileError, match="one point says nothing beyond itself"):
        Curve.through_points(((20.0, 0.025),), "linear", valid=(1, 20), range_reason="no")
