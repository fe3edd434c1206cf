"""How a study shows numbers: in sentences and cells, with what several seeds can tell apart, and in small drawings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.core.experiment import mean_and_half
from prfaas.lab.report.drawing import COLOURS, INK, MUTED, drawing, svg_file
from prfaas.lab.studies.study import StudyFigure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NONE = "–"
# More than this is said as a factor.
_MANY = 3.0
# From here on a factor has no decimals, and up to here a difference has one.
_CENTS, _PRECISE = 10.0, 0.01


def seconds(value: float) -> str:
    """Three digits, always in seconds: columns of them are compared."""
    if not math.isfinite(value):
        return NONE
    return f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2


def percent(value: float, digits: int = 0) -> str:
    """0.123 → "12 %"."""
    return f"{value * 100:.{digits}f} %" if math.isfinite(value) else NONE


def more_or_less(ratio: float) -> str:
    """1.2 → "20 % more", 0.9 → "10 % less", 3 → "3.0 times"; of what is compared."""
    if ratio >= _MANY:
        return f"{ratio:.1f} times as much"
    if round(abs(ratio - 1) * 100) == 0:
        return "the same"
    return f"{abs(ratio - 1) * 100:.0f} % {'more' if ratio > 1 else 'less'}"


def listed(items: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A mean over seeds."""

    mean: float
    half: float
    """Half of its 95 % interval (Student's t); infinite for one seed."""

    def text(self, decimals: int, unit: str = "", factor: float = 1.0) -> str:
        """3.784 → "3.78 ± 0.12"; the unit comes behind."""
        if not math.isfinite(self.mean):
            return NONE
        half = f" ± {self.half * factor:,.{decimals}f}" if math.isfinite(self.half) else ""
        return f"{self.mean * factor:,.{decimals}f}{half}{unit}"

    @property
    def seconds(self) -> str:
        """With as many digits as `seconds` shows."""
        return self.text(_decimals(self.mean))

    def percent(self, decimals: int = 0) -> str:
        """0.512 → "51 ± 1 %"."""
        return self.text(decimals, " %", 100)

    @property
    def gigabits(self) -> str:
        """Bit/s as "11.3 ± 0.1 Gbit/s"."""
        return self.text(1, " Gbit/s", 1e-9)


def seed_mean(values: Sequence[float]) -> SeedMean:
    """The mean of one number per seed, with its 95 % interval (Student's t); NaN if one of them is."""
    middle = math.fsum(values) / len(values)
    if len(values) < 2 or not math.isfinite(middle):
        return SeedMean(middle, math.inf)
    return SeedMean(*mean_and_half(values))


@dataclass(frozen=True, slots=True)
class Difference:
    """How much values differ from their bases, over pairs that met the same requests."""

    mean: float
    """Of value / base − 1."""
    half: float
    """Half of its 95 % interval (Student's t); infinite for one pair."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half

    @property
    def times(self) -> str:
        """The ratio: "0.51 ± 0.01 times"."""
        return SeedMean(self.mean + 1, self.half).text(1 if self.mean >= _MANY - 1 else 2, " times")

    @property
    def more_or_less(self) -> str:
        """Of what is compared: "16 ± 2 % more", "10 ± 1 % less", "as much, as far as seeds can tell (+1 ± 3 %)"."""
        if not math.isfinite(self.mean):
            return NONE
        if not self.is_clear:
            return f"as much, as far as seeds can tell ({self})"
        if self.mean >= _MANY - 1:
            return f"{self.times} as much"
        return f"{str(self)[1:]} {'more' if self.mean > 0 else 'less'}"

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return NONE
        if self.mean == self.half == 0:
            return "0 %"
        if self.mean >= _MANY - 1:
            return SeedMean(self.mean + 1, self.half).text(0 if self.mean >= _CENTS else 1, " times")
        # What is smaller than a percent would be 0 ± 0.
        decimals = 1 if abs(self.mean) < _PRECISE and self.half < _PRECISE else 0
        sign = "+" if self.mean >= 0 else "−"
        return sign + SeedMean(abs(self.mean), self.half).percent(decimals)


def difference(values: Sequence[float], bases: Sequence[float]) -> Difference:
    """Of pairs that met the same requests."""
    found = seed_mean([value / base - 1 for value, base in zip(values, bases, strict=True)])
    return Difference(found.mean, found.half)


# More points than this are a line already.
_MOST_MARKERS = 16


@dataclass(frozen=True, slots=True)
class PlotCurve:
    """One line of a diagram."""

    label: str
    """In the legend; empty: not there."""
    x: Sequence[float]
    y: Sequence[float | None]
    """None leaves a gap."""
    colour: int
    """A number of the palette."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram."""

    label: str
    curves: Sequence[PlotCurve]
    is_log: bool = False
    mark: tuple[float, str] | None = None
    """Where a vertical line stands, and its text; there is none where no curve has a point."""
    is_stepped: bool = False


def lines(
    name: str,
    caption: str,
    x_label: str,
    panels: Sequence[Panel],
    *,
    x_log: bool = False,
    height: float = 2.3,
) -> StudyFigure:
    """Panels side by side over one kind of x axis."""
    columns = min(len(panels), 3)
    with drawing(f"study-{name}", len(panels), columns=columns, height=height) as drawn:
        for axes, panel in zip(drawn.panels, panels, strict=True):
            _fill(axes, panel, x_log=x_log)
            axes.set_xlabel(x_label)
            axes.tick_params(labelbottom=True)
    return StudyFigure(f"study-{name}", svg_file(drawn.svg), caption)


def bars(
    name: str, caption: str, x_label: str, labels: Sequence[str], values: Sequence[float]
) -> StudyFigure:
    """A horizontal bar per label; what is no finite number has none."""
    with drawing(f"study-{name}", height=0.24 * len(labels) + 0.5) as drawn:
        (axes,) = drawn.panels
        places = range(len(labels))
        axes.barh(
            list(places),
            [value if math.isfinite(value) else 0.0 for value in values],
            color=[COLOURS[0] if number == 0 else COLOURS[4] for number in places],
            height=0.7,
        )
        axes.set_yticks(list(places), list(labels))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(x_label)
    return StudyFigure(f"study-{name}", svg_file(drawn.svg), caption)


def _fill(axes: "Axes", panel: Panel, *, x_log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(panel.label)
    for curve in panel.curves:
        axes.plot(
            curve.x,
            [float("nan") if value is None else value for value in curve.y],
            color=COLOURS[curve.colour % len(COLOURS)],
            linestyle=(0, (3, 1.5)) if curve.is_dashed else "-",
            marker="o" if len(curve.x) <= _MOST_MARKERS else None,
            markersize=2.5,
            drawstyle="steps-mid" if panel.is_stepped else "default",
            label=curve.label or None,
        )
    shown = FuncFormatter(lambda value, _: f"{value:,.6g}")
    for axis, is_log in ((axes.xaxis, x_log), (axes.yaxis, panel.is_log)):
        if is_log:
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
            axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(shown)
    if not panel.is_log:
        axes.set_ylim(bottom=0)
    # Without a point the axis has no range, and matplotlib divides by its width.
    if panel.mark is not None and any(value is not None for curve in panel.curves for value in curve.y):
        at, text = panel.mark
        axes.axvline(at, color=MUTED, linewidth=0.8, linestyle=":")
        axes.annotate(
            text, (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -8), textcoords="offset points",
            color=INK, fontsize=8,
        )  # fmt: skip
