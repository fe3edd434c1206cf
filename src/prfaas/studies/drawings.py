"""Small drawings for a Markdown page: files of their own, readable on light and dark screens."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.report.html import COLOURS, INK, MUTED, drawing
from prfaas.studies.study import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A picture does not know the colour of the page that it stands on: it brings its own.
_PAPER = '<rect width="100%" height="100%" fill="#fff"/>'
_INK = "#1f2328"
_STYLE = "<style>text{font-family:system-ui,sans-serif!important}</style>"
# More points than this are a line already.
_MOST_MARKERS = 16
_WIDTH_PX = 760


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over x; None leaves a gap. Without a label it is not in the legend.

    `colour`: a number of the palette, `is_dashed`: of a second kind."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. `mark`: a vertical line with its text."""

    label: str
    curves: Sequence[Curve]
    is_log: bool = False
    mark: tuple[float, str] | None = None
    is_stepped: bool = False


def lines(
    name: str,
    caption: str,
    x_label: str,
    panels: Sequence[Panel],
    *,
    x_log: bool = False,
    height: float = 2.3,
) -> Figure:
    """Panels side by side over one kind of x axis."""
    columns = min(len(panels), 3)
    with drawing(f"study-{name}", len(panels), columns=columns, height=height) as drawn:
        for axes, panel in zip(drawn.panels, panels, strict=True):
            _fill(axes, panel, x_log=x_log)
            axes.set_xlabel(x_label)
            axes.tick_params(labelbottom=True)
    return Figure(f"study-{name}", _file(drawn.svg), caption)


def bars(name: str, caption: str, x_label: str, labels: Sequence[str], values: Sequence[float]) -> Figure:
    """A horizontal bar per label; what is no finite number has none."""
    import math

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
    return Figure(f"study-{name}", _file(drawn.svg), caption)


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
    if panel.mark is not None:
        at, text = panel.mark
        axes.axvline(at, color=MUTED, linewidth=0.8, linestyle=":")
        axes.annotate(
            text, (at, 1), xycoords=("data", "axes fraction"), xytext=(3, -8), textcoords="offset points",
            color=INK, fontsize=8,
        )  # fmt: skip


def _file(svg: str) -> str:
    """A drawing of a page as a file: with a size, colours and numbers no longer than a screen can show."""
    width, height = (float(value) for value in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    size = f'<svg width="{_WIDTH_PX}" height="{_WIDTH_PX * height / width:.0f}"'
    svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg.replace("<svg", size, 1)).replace("currentColor", _INK)
    svg = re.sub(r" ?\n(?=[LQCz])", " ", svg)
    head = svg.index(">") + 1
    return f"{svg[:head]}{_STYLE}{_PAPER}{svg[head:]}\n"
