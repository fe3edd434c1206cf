"""Draws what `prfaas demo` printed as docs/img/demo.svg, which the tutorial shows.

    FORCE_COLOR=1 .venv/bin/prfaas demo > build/demo.txt
    .venv/bin/python docs/img/record_demo.py build/demo.txt

FORCE_COLOR keeps the colours although the output goes to a file. The drawing fetches nothing: rich's template would
load a font, so those lines are taken out, and any monospace font will do.
"""

import argparse
import re
import sys
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).parent
# Readable in front of light and dark pages alike.
THEME = TerminalTheme(
    (22, 27, 34),
    (214, 221, 229),
    [
        *((72, 79, 88), (255, 123, 114), (88, 194, 123), (227, 179, 65)),
        *((116, 189, 245), (210, 168, 255), (86, 212, 221), (214, 221, 229)),
    ],
    [
        *((110, 118, 129), (255, 161, 152), (116, 211, 148), (234, 196, 101)),
        *((150, 208, 255), (226, 197, 255), (118, 227, 234), (255, 255, 255)),
    ],
)


def svg_of(printed: str, title: str) -> str:
    """The terminal's window as SVG; `printed` may hold ANSI colours. As wide as its longest line."""
    lines = [Text.from_ansi(line.rstrip()) for line in printed.rstrip("\n").split("\n")]
    width = max(40, *(line.cell_len for line in lines))
    console = Console(
        record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code", "DejaVu Sans Mono")
    svg = console.export_svg(title=title, theme=THEME, code_format=template, unique_id="demo")
    return "\n".join(line.rstrip() for line in svg.split("\n")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what `prfaas demo` printed as an SVG.")
    parser.add_argument(
        "printed", nargs="?", default="-", help="the console's text, perhaps with colours; -: stdin"
    )
    parser.add_argument("--title", default="make demo")
    parser.add_argument("--out", type=Path, default=HERE / "demo.svg")
    options = parser.parse_args()
    printed = (
        sys.stdin.read() if options.printed == "-" else Path(options.printed).read_text(encoding="utf-8")
    )
    options.out.write_text(svg_of(printed, options.title), encoding="utf-8")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
