"""Tables that fit a terminal: columns and rows that matter least are left out, and a hint says which."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# From here on columns stand two cells apart, below one.
_WIDE = 100
# Lines of a table besides headings and rows: an empty one, the title, a rule.
_FRAME_LINES = 3
# A hint takes more lines the more it names: so often at most is the page made anew for it.
_MOST_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class StatusColumn:
    """A heading, and how much the column matters."""

    heading: str
    is_number: bool = True
    rank: int = 0
    """0: always shown. Of the others the highest is left out first."""
    what: str = ""
    """Its name in hints, where the heading alone says too little."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One line."""

    cells: tuple[Text, ...]
    urgency: float = 0.0
    """Rows with the least are hidden first."""


@dataclass(frozen=True, slots=True)
class StatusTable:
    """A table with a title; the first column names what a row is about, and folds rather than being cut."""

    title: str
    columns: tuple[StatusColumn, ...]
    rows: tuple[StatusRow, ...]
    what: str = "rows"
    """What rows are called in hints."""
    hidden_rows: int = 0
    hidden_columns: tuple[str, ...] = ()

    def within(self, width: int) -> "StatusTable":
        """Without the columns that have no room."""
        widths = self._widths()
        kept = list(range(len(self.columns)))
        while sum(widths[place] for place in kept) + _gap(width) * (len(kept) - 1) > width:
            optional = [place for place in kept if self.columns[place].rank]
            if not optional:
                break
            kept.remove(max(optional, key=lambda place: self.columns[place].rank))
        return replace(
            self,
            columns=tuple(self.columns[place] for place in kept),
            rows=tuple(replace(row, cells=tuple(row.cells[place] for place in kept)) for row in self.rows),
            hidden_columns=tuple(
                column.what or column.heading
                for place, column in enumerate(self.columns)
                if place not in kept
            ),
        )

    def with_rows(self, most: int) -> "StatusTable":
        """With at most so many rows, the most urgent ones, in their order."""
        if len(self.rows) <= most:
            return self
        ranked = sorted(range(len(self.rows)), key=lambda place: -self.rows[place].urgency)
        shown = sorted(ranked[:most])
        return replace(
            self, rows=tuple(self.rows[place] for place in shown), hidden_rows=len(self.rows) - most
        )

    def lines_at(self, width: int) -> int:
        """Of a screen so wide: names in the first column fold where the others leave them no room."""
        first, *others = self._widths()
        room = max(width - sum(others) - _gap(width) * len(others), 1)
        names = [cell_len(self.columns[0].heading), *(row.cells[0].cell_len for row in self.rows)]
        return _FRAME_LINES + sum(max(math.ceil(name / min(room, first or 1)), 1) for name in names)

    def _widths(self) -> list[int]:
        return [
            max(cell_len(column.heading), *(row.cells[place].cell_len for row in self.rows), 0)
            for place, column in enumerate(self.columns)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text()
        yield Text(self.title, style="bold")
        padding = (0, _gap(options.max_width) - 1, 0, 0)
        table = Table(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False)
        for place, column in enumerate(self.columns):
            table.add_column(
                column.heading,
                justify="right" if column.is_number else "left",
                no_wrap=place > 0,
                overflow="fold",
            )
        for row in self.rows:
            table.add_row(*row.cells)
        yield table


def _gap(width: int) -> int:
    return 2 if width >= _WIDE else 1


@dataclass(frozen=True, slots=True)
class StatusPage:
    """What stands above tables, the tables, and what stands below them.

    Where the height is limited (a screen of its own), lines below go first, then rows, then whole tables.
    """

    above: tuple[Text, ...]
    tables: tuple[StatusTable, ...]
    below: tuple[Text, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The height is set only where a screen limits it.
        height, options = options.height, options.update(height=None)
        width = options.max_width
        tables = [table.within(width) for table in self.tables]
        below = self.below
        hint = _hint(tables, ())
        if height is not None:
            free = height - self._lines(self.above, console, options)
            hint_lines = self._lines(hint, console, options)
            below_lines = self._lines(below, console, options) + 1 if below else 0
            if sum(table.lines_at(width) for table in tables) + below_lines + hint_lines > free:
                hidden = ["the latest changes"] if below else []
                below = ()
                for _ in range(_MOST_ATTEMPTS):
                    shown, gone = _fitting(tables, width, free - hint_lines)
                    hint = _hint(shown, (*hidden, *(table.title for table in gone)))
                    needed = self._lines(hint, console, options)
                    if needed <= hint_lines:
                        break
                    hint_lines = needed
                tables = shown
        yield from self.above
        yield from tables
        if below:
            yield Text()
            yield from below
        yield from hint

    @staticmethod
    def _lines(texts: Sequence[Text], console: Console, options: ConsoleOptions) -> int:
        return sum(len(console.render_lines(text, options, pad=False)) for text in texts)


def _fitting(
    tables: Sequence[StatusTable], width: int, free: int
) -> tuple[list[StatusTable], list[StatusTable]]:
    """The tables with as many rows as have room, and those that have no room at all."""
    for count in range(len(tables), 0, -1):
        chosen = tables[:count]
        for most in range(max(len(table.rows) for table in chosen), 0, -1):
            cut = [table.with_rows(most) for table in chosen]
            if sum(table.lines_at(width) for table in cut) <= free:
                return cut, list(tables[count:])
    return [], list(tables)


def _hint(tables: Sequence[StatusTable], hidden: Sequence[str]) -> tuple[Text, ...]:
    """A line on what is not shown; none if all is."""
    what = "; ".join((*_columns_and_rows(tables), *hidden))
    if not what:
        return ()
    return (Text(f"Not shown here: {what}. A larger window or --json has it.", style="dim"),)


def _columns_and_rows(tables: Sequence[StatusTable]) -> Iterator[str]:
    columns = dict.fromkeys(heading for table in tables for heading in table.hidden_columns)
    if columns:
        yield f"columns {', '.join(columns)}"
    rows: dict[str, int] = {}
    for table in tables:
        if table.hidden_rows:
            rows[table.what] = rows.get(table.what, 0) + table.hidden_rows
    for what, count in rows.items():
        yield f"{count} {what}"
