"""`prfaas profile --estimate`: a profile without a GPU; and times as tables."""

from collections.abc import Sequence
from pathlib import Path

import typer
from rich import box
from rich.table import Table

from prfaas.cli.common import console, print_json
from prfaas.core.latency.files import profile_text, save_profile
from prfaas.core.latency.profile import Curve, Evidence, LatencyProfile
from prfaas.core.units import format_s
from prfaas.tools.profiling.estimate import EstimatePlan, estimate


def print_estimate(plan: EstimatePlan, out: Path | None, *, as_json: bool) -> None:
    """Estimate, then write and print what was asked for."""
    estimated = estimate(plan)
    for note in estimated.notes:
        typer.echo(f"prfaas: {note}", err=True)
    profile = estimated.profile
    if out is not None:
        save_profile(profile, out)
    if as_json:
        facts = {"profile": profile.name, "file": out and str(out), "source": profile.source}
        print_json(facts | {"context_tokens": plan.context_tokens} | _rows(profile))
    elif out is None:
        typer.echo(profile_text(profile), nl=False)
    else:
        console().print(profile.source, soft_wrap=True)
        for part, unit in (
            ("prefill", "tokens"),
            (f"decode step after {plan.context_tokens} tokens", "batch"),
        ):
            cells = [
                (
                    f"{row['at']:.0f}",
                    format_s(row["estimated_s"]),
                    f"{format_s(row['low_s'])} – {format_s(row['high_s'])}",
                )
                for row in _rows(profile).get(part.split()[0], [])
            ]
            print_times(f"{profile.model}: {part}", (unit, "estimated", "error bar"), cells)
        typer.echo(f"profile: {out}")


def _rows(profile: LatencyProfile) -> dict[str, list[dict[str, float]]]:
    """By curve, its times with their error bars."""
    curves: dict[str, tuple[Curve, Evidence]] = {"prefill": (profile.prefill, profile.evidence)}
    if profile.decode is not None:
        curves["decode"] = profile.decode.curve, profile.decode.evidence
    return {
        part: [
            {"at": at, "estimated_s": seconds, "low_s": low * seconds, "high_s": high * seconds}
            for at, seconds in curve.points
        ]
        for part, (curve, evidence) in curves.items()
        for low, high in (evidence.band or (1.0, 1.0),)
        if curve.points
    }


def print_times(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table of times, if there are any."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    if rows:
        console().print(table)
