"""`prfaas plan`: what a deployment can do, and how to divide its work best; with `--sweep`, over one of its numbers."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from prfaas.cli.common import (
    AsJson,
    CliError,
    DeploymentPath,
    console,
    field_number,
    is_rate_field,
    made_folder,
    print_json,
    progress_bar,
)
from prfaas.cli.option_groups import option, with_options
from prfaas.cli.pool_options import PoolsAsked, pools_asked
from prfaas.cli.trace_options import TraceAsked, beyond

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prfaas.core.planner import Plan
    from prfaas.lab.report.plan_sweep import Sweep

LossKind = Literal["link", "cluster", "instance"]

_MOST_VALUES = 1000
# A range whose ends are further apart than this is divided by equal ratios.
_GEOMETRIC_RATIO = 30


@with_options
def plan(
    deployment: DeploymentPath,
    plot: Path | None = option(None, "Draw the plan, or the sweep, into this folder (SVG).", metavar="DIR"),
    sweep: str | None = option(
        None,
        'Plan N times, with values from A to B in one field, e.g. "links[0].bandwidth=1 Gbit/s:1 Tbit/s:50".',
        metavar="FIELD=A:B:N",
    ),
    survive: LossKind | None = option(
        None,
        "Also say which instances it takes to keep all of the throughput whichever one of these is gone.",
    ),
    *,
    asked: PoolsAsked,
    asked_trace: TraceAsked,
    as_json: AsJson = False,
) -> None:
    """Say what a deployment can do: best threshold and roles, throughput, TTFT, cost, and what limits it.

    The file needs no servers, only counts, profiles and a workload; the page guides/plan explains fields and results.

    Example: prfaas plan examples/paper.yaml --plot plots
    """
    if sweep is None:
        _plan(deployment, plot, asked, asked_trace, survive, as_json)
    elif asked.is_given or asked_trace.trace is not None or survive is not None:
        raise CliError("--sweep goes without --pool, --pool-ssd, --pool-rate, --trace and --survive")
    else:
        _sweep(deployment, sweep, plot, as_json)


def _plan(
    path: Path,
    plot: Path | None,
    asked: PoolsAsked,
    asked_trace: TraceAsked,
    survive: LossKind | None,
    as_json: bool,
) -> None:
    from prfaas.core.deployment import load_planned
    from prfaas.core.planner import make_plan, problem_of, problem_of_trace, range_tokens
    from prfaas.core.planner.survival import losses, reserve_for
    from prfaas.lab.report.plan_bands import doubts
    from prfaas.lab.report.plan_figures import write_plots
    from prfaas.lab.report.plan_pools import PoolPlan, print_pools

    deployment = load_planned(path)
    problem = problem_of(deployment)
    given = pools_asked(deployment, asked)
    trace, covered = asked_trace.read(), range_tokens(deployment)
    pools = PoolPlan.of(deployment, problem, given, trace) if given else None
    if trace is not None:
        problem = problem_of_trace(problem, trace, covered[0])
        typer.echo(f"Planned for the {len(trace):,} requests of the trace. Units: {trace.units}.", err=True)
    for note in (*beyond(problem.workload.lengths, covered), *(doubts(deployment) if trace is None else ())):
        typer.echo(note, err=True)
    result = make_plan(problem)
    # Of several clusters each loss takes a linear programme.
    lost = losses(problem, result.optimum) if problem.is_two_cluster or survive is not None else ()
    of_kind = tuple(each for each in lost if each.kind == survive)
    if survive is not None and not of_kind:
        raise CliError(f"--survive {survive}: the deployment has no {survive}")
    reserve = reserve_for(problem, result.optimum.lambda_max, of_kind) if of_kind else None
    written = [] if plot is None else _drawn(write_plots(deployment, problem, result, made_folder(plot)))
    if as_json:
        document = result.to_json() | {"survival": [asdict(each) for each in lost]}
        document |= {} if reserve is None else {"reserve": asdict(reserve)}
        document |= {} if pools is None else {"pools": pools.to_json()}
        document |= {} if plot is None else {"plots": written}
        print_json(document)
        return
    from prfaas.lab.report.plan import print_plan, print_survival

    print_plan(console(), deployment, result)
    print_survival(console(), result.optimum.lambda_max, lost, reserve)
    if pools is not None:
        print_pools(console(), pools)


def _drawn(files: "Iterator[Path]") -> list[str]:
    """Name each file as it is written."""
    written = []
    for file in files:
        typer.echo(f"wrote {file}", err=True)
        written.append(str(file))
    return written


def _sweep(path: Path, text: str, plot: Path | None, as_json: bool) -> None:
    from prfaas.core.deployment import load_planned
    from prfaas.lab.report.plan_sweep import PlanSweep, field_words, is_planned_field, planned_fields

    sweep = parse_sweep(text)
    planned = load_planned(path)
    if not is_planned_field(sweep.field):
        # What the file does not know is said first.
        load_planned(path, changes={sweep.field: sweep.values[0]})
        raise CliError(f"--sweep: a plan does not depend on {sweep.field}, but on {planned_fields()}")
    for value in (sweep.values[0], sweep.values[-1]):
        # What can't stand in the file is said before minutes of planning.
        load_planned(path, changes={sweep.field: value})
    plans = list(_plans(path, sweep))
    swept = PlanSweep(**asdict(sweep), words=field_words(planned, sweep.field), plans=plans)
    written = []
    if plot is not None:
        name = re.sub(r"[^A-Za-z0-9]+", "-", sweep.field).strip("-")
        written.append(made_folder(plot) / f"{planned.name}-sweep-{name}.svg")
        swept.plot(written[0], f"{planned.name}: over the {swept.words}")
    if as_json:
        print_json(swept.to_json(written))
        return
    swept.print(console())
    for file in written:
        typer.echo(f"wrote {file}", err=True)


def parse_sweep(text: str) -> "Sweep":
    """From "links[0].bandwidth=1 Gbit/s:1 Tbit/s:50". Ends of bandwidths may have a unit.

    Values are spaced evenly, those of a range over more than a factor 30 by equal ratios. Of instance counts
    every whole number is taken once.

    Raises:
        CliError: the text has another form, or a range makes no sense.
    """
    from prfaas.lab.report.plan_sweep import Sweep

    field, sign, span = text.partition("=")
    parts = span.split(":")
    if not sign or not field or len(parts) != 3:
        raise CliError(
            f'--sweep "{text}": write FIELD=FROM:TO:COUNT, for example "links[0].bandwidth=1 Gbit/s:1 Tbit/s:50"'
        )
    field = field.strip()
    first, last = (field_number(f'--sweep "{text}"', field, part.strip()) for part in parts[:2])
    count = parts[2].strip()
    if not re.fullmatch(r"[0-9]+", count) or not 2 <= int(count) <= _MOST_VALUES:
        raise CliError(
            f'--sweep "{text}": the count must be a whole number from 2 to {_MOST_VALUES}, not "{count}"'
        )
    if first >= last:
        raise CliError(f'--sweep "{text}": the first value must be below the second')
    is_geometric = first > 0 and last / first > _GEOMETRIC_RATIO
    values = _spaced(first, last, int(count), is_geometric)
    if field.endswith(("instance_count", "tensor_parallel")):
        values = tuple(float(value) for value in dict.fromkeys(round(value) for value in values))
    return Sweep(field=field, values=values, is_rate=is_rate_field(field), is_geometric=is_geometric)


def _spaced(first: float, last: float, count: int, is_geometric: bool) -> tuple[float, ...]:
    steps = [index / (count - 1) for index in range(count)]
    inner = [first * (last / first) ** x if is_geometric else first + (last - first) * x for x in steps[1:-1]]
    return (first, *inner, last)


def _plans(path: Path, sweep: "Sweep") -> "Iterator[Plan]":
    from prfaas.core.deployment import load_planned
    from prfaas.core.planner import make_plan, problem_of

    with progress_bar(transient=True) as progress:
        task = progress.add_task(f"{len(sweep.values)} plans", total=len(sweep.values))
        for value in sweep.values:
            yield make_plan(problem_of(load_planned(path, changes={sweep.field: value})))
            progress.advance(task)
