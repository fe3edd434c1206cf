"""How all plots look: colours that stay apart in print and for colour-blind eyes, a light grid, one size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.core.units import KIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, without the yellow that vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4D4D4D", "#8C564B")
PREFILL_AWAY, PREFILL_HOME, DECODE, THROUGHPUT = COLOURS[0], COLOURS[1], COLOURS[2], "#222222"
MUTED = "#767676"

# A logarithmic axis over less than this ratio gets more ticks than one per power of ten.
_FEW_DECADES = 100.0

_STYLE = Path(__file__).parent / "data" / "plot.mplstyle"


@contextmanager
def plot(path: Path, *, panels: int = 1, height: float = 4.6) -> Iterator["list[Axes]"]:
    """One picture: draw into its panels, which stand above each other over one x axis. On leaving it is written
    to `path` (PNG), with one legend of all labels under the panels. Missing folders are made.
    """
    # Here, so that importing report costs nothing where no plot is wanted.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=_STYLE):
        figure = Figure(figsize=(7.2, height))
        FigureCanvasAgg(figure)
        axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
        yield list(axes)
        handles = [handle for each in axes for handle in each.get_legend_handles_labels()[0]]
        if handles:
            columns = 3 if len(handles) in (3, 5, 6) else 2
            figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the version of matplotlib in it, the file doesn't change with the library alone.
        figure.savefig(path, metadata={"Software": None})


def mark_missed(
    axes: "Axes", values: Sequence[float], heights: Sequence[float], missed: Sequence[bool]
) -> None:
    """Cross out the points of a curve that miss the target for the TTFT."""
    points = [
        (value, height) for value, height, misses in zip(values, heights, missed, strict=True) if misses
    ]
    crossed, at = zip(*points, strict=True)
    label = "misses the target for the TTFT"
    # Crosses at the end of an axis are whole.
    axes.plot(crossed, at, "x", color=COLOURS[3], markersize=8, label=label, clip_on=False, zorder=5)


def short_tokens(tokens: float) -> str:
    """`131072` → "128K" (K = 1024), for ticks."""
    if tokens < KIB:
        return f"{tokens:g}"
    return f"{tokens / KIB:g}K"


def length_axis(axes: "Axes", low: float, high: float, label: str) -> None:
    """A logarithmic axis of token counts with a tick at each power of two (or of four, if they would be many)."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = [2.0**n for n in range(4, 24) if low * 0.999 <= 2.0**n <= high * 1.001]
    while len(ticks) > 9:
        ticks = ticks[(len(ticks) - 1) % 2 :: 2]
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_tokens(value)))
    axes.set_xlabel(f"{label} (tokens, K = 1024)")


def rate_axis(axes: "Axes", which: str, label: str, span: tuple[float, float] | None = None) -> None:
    """A logarithmic axis of bit rates, with ticks like "10 Gbit/s".

    Where `span`, from the lowest to the highest, is short, there are ticks at 2 and 5 times a power of ten too.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from prfaas.core.units import format_bits_per_s

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    subs = (1.0, 2.0, 5.0) if span is not None and span[1] < _FEW_DECADES * span[0] else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_bits_per_s(value)))
    (axes.set_xlabel if which == "x" else axes.set_ylabel)(label)
