"""Drawings (SVG) that take the colours of the page they stand on, light or dark."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stands for the colour of text while matplotlib draws, as in the style; no drawing uses it for anything else.
INK = "#010203"
MUTED = "#767676"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B58900", "#8C564B", "#7A68C9")
"""Okabe and Ito's palette without the two that vanish on white or on black."""

_STYLE = Path(__file__).parent / "data" / "drawing.mplstyle"

# What has room below a figure, and what of it a label's line and gaps take.
_LEGEND_LETTERS, _KEY_LETTERS = 140, 9

# A file does not know the colour of the page that it stands on: it brings its own.
_FILE_INK = "#1f2328"
_FILE_STYLE = "<style>text{font-family:system-ui,sans-serif!important}</style>"
_FILE_PAPER = '<rect width="100%" height="100%" fill="#fff"/>'
_FILE_WIDTH_PX = 760


class Drawing:
    """A figure with a grid of panels; `svg` is there once the `with` of `drawing` has ended."""

    def __init__(self, figure: "Figure", panels: "list[Axes]") -> None:
        self.figure = figure
        self.panels = panels
        self.svg = ""


@contextmanager
def drawing(name: str, panels: int = 1, *, columns: int = 1, height: float = 2.4) -> Iterator[Drawing]:
    """Draw into panels that share the x axis, `height` inches a row. One legend of all labels stands below.

    `name` is unique on a page: ids within drawings are made of it. The same numbers give the same text.
    """
    # Here, so that importing report costs nothing where no plot is wanted.
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": name}, _STYLE):
        rows = -(-panels // columns)
        figure = Figure(figsize=(9.6, height * rows + 0.5))
        FigureCanvasSVG(figure)
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel().tolist()
        for unused in axes[panels:]:
            unused.remove()
        drawn = Drawing(figure, axes[:panels])
        yield drawn
        _legend(figure, drawn.panels)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        drawn.svg = _inline(out.getvalue(), name)


def _legend(figure: "Figure", panels: "Sequence[Axes]") -> None:
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=_columns([len(label) for label in handles]),
            fontsize=9,
        )


def _columns(letters: Sequence[int]) -> int:
    """How many labels of so many letters stand beside each other: at most six, and within the figure."""
    for columns in range(min(len(letters), 6), 1, -1):
        rows = -(-len(letters) // columns)
        widest = [max(letters[first : first + rows]) for first in range(0, len(letters), rows)]
        if sum(widest) + _KEY_LETTERS * columns <= _LEGEND_LETTERS:
            return columns
    return 1


def _inline(svg: str, name: str) -> str:
    """Without the prologue of a file, in the page's colour, and with ids of its own."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Named groups are of no use here, and their names would be on the page many times.
    svg = re.sub(r'<g id="[A-Za-z][A-Za-z0-9_.]*_\d+">', "<g>", svg)
    svg = re.sub(r'(id="|href="#|url\(#)(?=[mp][0-9a-f])', rf"\1{name}-", svg)
    return svg.replace(INK, "currentColor")


def svg_file(svg: str) -> str:
    """A drawing of a page as a file: with a size, colours and numbers no longer than a screen can show."""
    width, height = (float(value) for value in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    size = f'<svg width="{_FILE_WIDTH_PX}" height="{_FILE_WIDTH_PX * height / width:.0f}"'
    svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg.replace("<svg", size, 1)).replace("currentColor", _FILE_INK)
    svg = re.sub(r" ?\n(?=[LQCz])", " ", svg)
    head = svg.index(">") + 1
    return f"{svg[:head]}{_FILE_STYLE}{_FILE_PAPER}{svg[head:]}\n"
