"""`prfaas reproduce`: the paper's tables, computed again."""

from pathlib import Path
from typing import Annotated

import typer

from prfaas.cli.common import AsJson, CliError, example_path, print_json, write_text

_INTRO = """
Written by `prfaas reproduce --out docs/explanation/reproduction.md`, from the data files and `examples/paper.yaml`
that come with prfaas; don't edit. The paper is arXiv 2604.15039. A deviation is (ours − paper) / paper, taken before
rounding; the paper's three digits alone make up to 0.5 %. K is 1024.
"""


def reproduce(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page there; default: print it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute Tables 3, 5 and 6 of the paper again: ours beside the paper's, with a reason for every deviation.

    The page is made by studies/ of a checkout. Exit code 1 if a number differs by more than 1 % and no reason is known.

    Example: prfaas reproduce --out docs/explanation/reproduction.md
    """
    from prfaas.cli.study_folder import StudyFolderError, own_module
    from prfaas.core.deployment import load_planned
    from prfaas.core.planner import make_plan, problem_of

    try:
        reproduction = own_module("_reproduction")
    except StudyFolderError as error:
        raise CliError(str(error)) from None
    result = reproduction.sections(make_plan(problem_of(load_planned(example_path("paper.yaml")))))
    page = reproduction.reproduction_page(_INTRO, result)
    if out is not None:
        write_text(out, page, "--out")
    if as_json:
        from dataclasses import asdict

        rows = [{**asdict(row), "deviation": row.deviation} for section in result for row in section.rows]
        print_json({"numbers": rows})
    elif out is None:
        typer.echo(page, nl=False)
    missing = reproduction.unexplained(result)
    for row in missing:
        typer.echo(f"no reason is known for {row.label}: {row.ours:.4g}, paper {row.paper:.4g}", err=True)
    if missing:
        raise typer.Exit(1)
