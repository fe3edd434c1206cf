"""Ours beside the paper's, as a Markdown page."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """One number. `reason` says why ours differs; it must be there beyond `TOLERANCE`."""

    key: str
    label: str
    ours: float
    paper: float
    digits: int = 4
    reason: str | None = None

    @property
    def deviation(self) -> float:
        """(ours − paper) / paper."""
        return self.ours / self.paper - 1

    @property
    def is_off(self) -> bool:
        """True beyond the tolerance, by the numbers as they are, not as they are shown."""
        return abs(self.deviation) > TOLERANCE


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page with the text above it."""

    title: str
    text: str
    rows: Sequence[Comparison]


def unexplained(sections: Sequence[Section]) -> list[Comparison]:
    """What differs by more than 1 % and has no reason."""
    return [row for section in sections for row in section.rows if row.is_off and not row.reason]


def reproduction_page(intro: str, sections: Sequence[Section]) -> str:
    """The page: per section a table, then each deviation above 1 % with its reason."""
    rows = [row for section in sections for row in section.rows]
    off = [row for row in rows if row.is_off]
    lines = [
        "# The paper's tables, computed again",
        "",
        intro.strip(),
        "",
        f"Of {len(rows)} numbers {len(rows) - len(off)} agree within 1 %; the other {len(off)} are marked and "
        "explained.",
    ]
    for section in sections:
        lines += ["", f"## {section.title}", "", _wrapped(section.text), ""]
        lines += ["| | ours | paper | deviation |", "|---|---:|---:|---:|"]
        lines += [_row(row) for row in section.rows]
        reasons = [row for row in section.rows if row.is_off]
        if reasons:
            lines += ["", "Deviations above 1 %:", ""]
            lines += _reasons(reasons)
    return "\n".join(lines) + "\n"


def _row(row: Comparison) -> str:
    mark = "**" if row.is_off else ""
    return (
        f"| {row.label} | {_shown(row.ours, row.digits)} | {_shown(row.paper, row.digits)} "
        f"| {mark}{_percent(row.deviation)}{mark} |"
    )


def _percent(deviation: float) -> str:
    return f"{deviation:+.1%}" if abs(deviation) >= 0.0005 else "0.0%"


def _shown(value: float, digits: int) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def _reasons(rows: Sequence[Comparison]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row.reason or "**not explained**", []).append(
            f"{row.label} {_percent(row.deviation)}"
        )
    return [_wrapped(f"- {'; '.join(labels)}: {reason}", "  ") for reason, labels in by_reason.items()]


def _wrapped(text: str, indent: str = "") -> str:
    """Paragraphs at the width of the other pages; tables as they are."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(
        block
        if block.startswith("|")
        else textwrap.fill(block, 118, subsequent_indent=indent, break_on_hyphens=False)
        for block in blocks
    )
