"""`prfaas plan`: what a deployment can do, and how to divide its work best."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from prfaas.cli.options import AsJson, DeploymentPath
from prfaas.cli.output import console, made_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prfaas.cli.sweep import Sweep
    from prfaas.planner import Plan
    from prfaas.report.sweep import SweepPoint

T = TypeVar("T")

PlotDirectory = Annotated[
    Path | None, typer.Option("--plot", metavar="DIR", help="Write plots (PNG) into this folder.")
]


def plan(
    deployment: DeploymentPath,
    plot: PlotDirectory = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=A:B:N",
            help='Plan N times, with values from A to B in one field, e.g. "links[0].bandwidth=1 Gbit/s:1 Tbit/s:50".',
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a deployment can do: best threshold and roles, throughput, TTFT, cost, and what limits it.

    The file needs no servers, only counts, profiles and a workload; docs/guides/plan.md explains fields and results.

    Example: prfaas plan examples/paper.yaml --plot plots
    """
    if sweep is not None:
        _sweep(deployment, sweep, plot, as_json)
    else:
        _plan(deployment, plot, as_json)


def _plan(path: Path, plot: Path | None, as_json: bool) -> None:
    from prfaas.deployment import load_planned
    from prfaas.planner import make_plan, problem_of

    deployment = load_planned(path)
    problem = problem_of(deployment)
    result = make_plan(problem)
    written: list[Path] = []
    if plot is not None:
        from prfaas.cli.plan_plots import write_plots

        written += _with_progress(
            write_plots(deployment, problem, result, made_folder(plot, "--plot")), "plots"
        )
    if as_json:
        document = result.to_json()
        _print_json(document | {"plots": [str(each) for each in written]} if plot is not None else document)
        return
    from prfaas.cli.plan_report import plan_report
    from prfaas.report.plan import print_plan

    print_plan(console(), plan_report(deployment, result))
    _print_written(written)


def _sweep(path: Path, text: str, plot: Path | None, as_json: bool) -> None:
    from prfaas.cli.sweep import parse_sweep, swept
    from prfaas.deployment import load_planned

    parsed = parse_sweep(text)
    name = load_planned(path).name
    plans = list(_with_progress(swept(path, parsed), f"{len(parsed.values)} plans", len(parsed.values)))
    written = []
    if plot is not None:
        written.append(_plot_sweep(name, parsed, plans, made_folder(plot, "--plot")))
    if as_json:
        rows = [{"value": value, **each.to_json()} for value, each in zip(parsed.values, plans, strict=True)]
        _print_json({"field": parsed.field, "points": rows, "plots": [str(each) for each in written]})
        return
    from prfaas.report.sweep_table import print_sweep

    print_sweep(console(), parsed.field, points_of(parsed, plans), is_rate=parsed.is_rate)
    _print_written(written)


def points_of(sweep: "Sweep", plans: "Sequence[Plan]") -> "list[SweepPoint]":
    """Plans as points of a plot."""
    from prfaas.report.sweep import SweepPoint

    return [
        SweepPoint(
            value,
            plan.optimum.lambda_max,
            plan.homogeneous.point.lambda_max,
            plan.optimum.threshold_tokens,
            f"{plan.optimum.n_prefill} + {plan.optimum.n_decode}",
            plan.optimum.egress_bits_per_s,
            ", ".join(plan.optimum.binding),
        )
        for value, plan in zip(sweep.values, plans, strict=True)
    ]


def _plot_sweep(name: str, sweep: "Sweep", plans: "Sequence[Plan]", directory: Path) -> Path:
    import re

    from prfaas.report.sweep import plot_sweep

    path = directory / f"{name}-sweep-{re.sub(r'[^A-Za-z0-9]+', '-', sweep.field).strip('-')}.png"
    plot_sweep(
        points_of(sweep, plans),
        path,
        title=f"{name}: what {sweep.field} changes",
        label=sweep.field,
        scale="bits_per_s" if sweep.is_rate else "logarithmic" if sweep.is_geometric else "plain",
    )
    return path


def _with_progress(each: "Iterable[T]", what: str, total: int | None = None) -> "Iterator[T]":
    """Hand things on as they come, with a bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        for thing in each:
            progress.advance(task)
            yield thing


def _print_written(paths: "Sequence[Path]") -> None:
    for path in paths:
        typer.echo(f"wrote {path}", err=True)


def _print_json(document: Any) -> None:
    import json

    typer.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no infinity: what has no limit is null."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
