"""`prfaas profile --estimate`: a profile without a GPU beside a measured one; and times as tables."""

from pathlib import Path

import typer
from rich import box
from rich.table import Table

from prfaas.cli.common import console, print_json
from prfaas.core.latency.files import load_profile, profile_text, save_profile
from prfaas.core.units import format_s
from prfaas.tools.profiling.estimate import EstimatePlan, beside, estimate


def print_estimate(plan: EstimatePlan, out: Path | None, measured_name: str | None, *, as_json: bool) -> None:
    """Estimate, then write and print what was asked for, beside a measured profile, by its name or file."""
    measured = load_profile(measured_name) if measured_name is not None else None
    estimated = estimate(plan)
    for note in estimated.notes:
        typer.echo(f"prfaas: {note}", err=True)
    profile = estimated.profile
    rows = beside(profile, measured)
    if out is not None:
        save_profile(profile, out)
    if as_json:
        facts = {"profile": profile.name, "file": out and str(out), "source": profile.source}
        print_json(facts | {"context_tokens": plan.context_tokens, "beside": measured_name} | rows)
    elif out is None and measured is None:
        typer.echo(profile_text(profile), nl=False)
    else:
        console().print(profile.source, soft_wrap=True)
        for part, unit in (
            ("prefill", "tokens"),
            (f"decode step after {plan.context_tokens} tokens", "batch"),
        ):
            columns = (
                unit,
                "estimated",
                "error bar",
                *((measured.name, "over estimated") if measured else ()),
            )
            times = [_cells(row) for row in rows.get(part.split()[0], [])]
            print_times(f"{profile.model}: {part}", columns, times)
        if out is not None:
            typer.echo(f"profile: {out}")


def _cells(row: dict[str, float]) -> tuple[str, ...]:
    bar = f"{format_s(row['low_s'])} – {format_s(row['high_s'])}"
    other_s = row.get("measured_s")
    if other_s is None:
        return f"{row['at']:.0f}", format_s(row["estimated_s"]), bar
    outside = "" if row["low_s"] <= other_s <= row["high_s"] else " outside"
    over = f"{other_s / row['estimated_s']:.2f}{outside}"
    return f"{row['at']:.0f}", format_s(row["estimated_s"]), bar, format_s(other_s), over


def print_times(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A table of times, if there are any."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    if rows:
        console().print(table)
