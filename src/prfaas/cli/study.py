"""`prfaas study`: questions about the scheduler, answered by many simulations."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import (
    AsJson,
    CliError,
    made_folder,
    print_json,
    progress_bar,
    write_text,
)
from prfaas.cli.option_groups import argument, option, with_options
from prfaas.cli.study_folder import studies_of, study_names

if TYPE_CHECKING:
    from prfaas.lab.studies import Study, StudyContext, StudySection
    from prfaas.lab.studies.study import Outcomes, StudyOutcome, StudyRun

_TRACE = "traces/mooncake_burst.jsonl.gz"


@with_options
def study(
    name: str = argument(
        ...,
        "For example bandwidth; a wrong one says which there are. all: every one.",
        metavar="NAME",
        autocompletion=lambda: [*study_names(), "all"],
    ),
    deployment: Path | None = option(None, "Default: examples/paper.yaml.", metavar="FILE"),
    folder: Path | None = option(
        None,
        "A Python package whose STUDIES has studies by name. Default: studies/ of the checkout.",
        "--studies",
        metavar="DIR",
    ),
    out: Path | None = option(
        None, "Write DIR/studies.md (or DIR/study-NAME.md) and DIR/img/study-*.svg.", metavar="DIR"
    ),
    quick: bool = option(False, "A twentieth of the requests, to see that it works.", "--quick"),
    seed: int = option(0, "The first of the seeds.", min=0),
    jobs: int = option(2, "Processes; the numbers don't depend on it.", min=1),
    as_json: AsJson = False,
) -> None:
    """Carry out a study on the simulator and write it down: tables, plots and what they say.

    One PrfaaS and one PD cluster. Progress and speed go to stderr. The page explanation/studies has those of the house.

    Example: prfaas study bandwidth --out out
    """
    from prfaas.core.deployment import load_planned
    from prfaas.core.shipped import example_path
    from prfaas.core.workload.requests import read_requests
    from prfaas.lab.studies import context_of, page_of

    known = studies_of(folder)
    if name != "all" and name not in known:
        raise CliError(f'there is no study "{name}"; there are {", ".join(known)}, and "all"')
    chosen = list(known.values()) if name == "all" else [known[name]]
    path = example_path("paper.yaml") if deployment is None else deployment
    planned = load_planned(path)
    trace = read_requests(example_path(_TRACE))
    try:
        context = context_of(planned, trace, seed=seed, is_quick=quick)
    except ValueError as error:
        raise CliError(f"{path}: {error}") from error
    if out is not None:
        made_folder(out / "img")
    outcomes = _simulate(chosen, context, jobs)
    sections = {each.name: (each, each.describe(context, outcomes[each.name])) for each in chosen}
    page = page_of(context, sections, _command(name, deployment, folder, quick=quick, seed=seed))
    if out is not None:
        _write(out, "studies.md" if name == "all" else f"study-{name}.md", page, sections)
    if as_json:
        _print_json(context, outcomes)
    elif out is None:
        typer.echo(page, nl=False)


def _simulate(chosen: "Sequence[Study]", context: "StudyContext", jobs: int) -> "dict[str, Outcomes]":
    """Simulate all runs, with a bar and the speed on stderr."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    from prfaas.lab.studies import run_studies
    from prfaas.lab.studies.study import LostProcessError

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    started_s = time.perf_counter()
    requests = 0.0
    count = 0
    with progress_bar(*columns, TimeRemainingColumn(), transient=True) as progress:
        task = progress.add_task("simulating", total=None)

        def begin(runs: "Sequence[StudyRun]") -> None:
            progress.update(task, total=sum(run.expected_requests for run in runs))

        def done(run: "StudyRun", _outcome: "StudyOutcome") -> None:
            nonlocal requests, count
            requests += run.expected_requests
            count += 1
            progress.update(task, completed=requests)

        try:
            outcomes = run_studies(chosen, context, jobs=jobs, on_begin=begin, on_done=done)
        except LostProcessError as error:
            raise CliError(str(error)) from error
    took_s = time.perf_counter() - started_s
    for name, found in outcomes.items():
        wall_s = sum(outcome.wall_s for outcome in found.values())
        typer.echo(f"{name}: {len(found)} runs, {wall_s:.0f} s of one core", err=True)
    typer.echo(
        f"{count} runs, about {requests:,.0f} requests in {took_s:.0f} s: {requests / took_s:,.0f} per second",
        err=True,
    )
    return outcomes


def _command(name: str, deployment: Path | None, folder: Path | None, *, quick: bool, seed: int) -> str:
    import shlex

    parts = ["prfaas", "study", name]
    parts += ["--deployment", str(deployment)] if deployment is not None else []
    parts += ["--studies", str(folder)] if folder is not None else []
    parts += ["--quick"] if quick else []
    parts += ["--seed", str(seed)] if seed else []
    return shlex.join([*parts, "--out", "docs/explanation"])


def _write(out: Path, name: str, page: str, sections: "dict[str, tuple[Study, StudySection]]") -> None:
    files = {out / name: page}
    for _, section in sections.values():
        files |= {out / "img" / f"{figure.name}.svg": figure.svg for figure in section.figures}
    for path, text in files.items():
        write_text(path, text)


def _print_json(context: "StudyContext", outcomes: "dict[str, Outcomes]") -> None:
    document = {
        "deployment": context.planned.name,
        "lambda_max_rps": context.lambda_max,
        "seed": context.seed,
        "quick": context.is_quick,
        "studies": {
            name: [{"run": list(key), **outcome.numbers} for key, outcome in found.items()]
            for name, found in outcomes.items()
        },
    }
    print_json(document)
