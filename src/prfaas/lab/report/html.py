"""Pages of one self-contained file: tables, and drawings in the colours of the reader's light or dark theme."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stands for the colour of text while matplotlib draws; no drawing uses it for anything else.
INK = "#010203"
MUTED = "#767676"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B58900", "#8C564B", "#7A68C9")
"""Okabe and Ito's palette without the two that vanish on white or on black."""

# matplotlib's stubs want every key as a literal type.
_RC: Any = {
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titlepad": 6,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.facecolor": "none",
    "font.size": 9,
    "grid.alpha": 0.4,
    "grid.color": MUTED,
    "grid.linewidth": 0.4,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.2,
    "lines.solid_capstyle": "round",
    "savefig.facecolor": "none",
    # Letters as letters: small files, text that can be searched and copied.
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 8.5,
    "xtick.major.width": 0.6,
    "ytick.color": INK,
    "ytick.labelsize": 8.5,
    "ytick.major.width": 0.6,
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #656d76; --line: #d8dee4; --page: #ffffff; --best: #eaf3ec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e3; --quiet: #9aa0a6; --line: #3a3f45; --page: #16181b; --best: #1d2f24; }
}
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; max-width: 50rem; }
p.lead, p.note, figcaption { color: var(--quiet); }
p.note, figcaption { font-size: .87rem; }
figure { margin: .5rem 0 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figure svg text { font-family: system-ui, sans-serif !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .22rem .9rem .22rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
thead th { font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 400; }
table.facts td { text-align: left; white-space: normal; vertical-align: top; }
table.facts th { color: var(--quiet); vertical-align: top; }
td small { color: var(--quiet); }
code { font-size: .87rem; overflow-wrap: anywhere; }
"""


@dataclass(slots=True)
class HtmlPage:
    """A page that is added to from top to bottom. All texts are plain; they are escaped here."""

    title: str
    lead: str
    _parts: list[str] = field(default_factory=list, init=False)

    def heading(self, text: str) -> None:
        """A section's heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def note(self, text: str) -> None:
        """A quiet sentence."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows of cells; the first of each names the row. What follows a line break in a cell is quieter."""
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
        body = "".join(
            f'<tr><th scope="row">{escape(row[0])}</th>{"".join(_cell(text) for text in row[1:])}</tr>'
            for row in rows
        )
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """What something is, in words: a name and a text each."""
        body = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in rows
        )
        self._parts.append(f'<table class="facts"><tbody>{body}</tbody></table>')

    def code(self, text: str) -> None:
        """A command line."""
        self._parts.append(f"<p><code>{escape(text)}</code></p>")

    def figure(self, svg: str, caption: str) -> None:
        """A drawing of `drawing`, with what it says in words for those who can't see it."""
        self._parts.append(
            f'<figure role="img" aria-label="{escape(caption, quote=True)}">{svg}'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def text(self) -> str:
        """The whole file."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n<body>"
            f'<h1>{escape(self.title)}</h1><p class="lead">{escape(self.lead)}</p>\n'
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )


class Drawing:
    """A figure with a grid of panels; `svg` is there once the `with` of `drawing` has ended."""

    __slots__ = ("figure", "panels", "svg")

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

    with matplotlib.rc_context({**_RC, "svg.hashsalt": name}):
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
            ncols=min(len(handles), 6),
            fontsize=9,
        )


def _inline(svg: str, name: str) -> str:
    """Without the prologue of a file, in the page's colour, and with ids of its own."""
    import re

    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Named groups are of no use here, and their names would be on the page many times.
    svg = re.sub(r'<g id="[A-Za-z][A-Za-z0-9_.]*_\d+">', "<g>", svg)
    svg = re.sub(r'(id="|href="#|url\(#)(?=[mp][0-9a-f])', rf"\1{name}-", svg)
    return svg.replace(INK, "currentColor")


def _cell(text: str) -> str:
    first, _, second = text.partition("\n")
    return f"<td>{escape(first)}{f' <small>{escape(second)}</small>' if second else ''}</td>"
