"""`prfaas reproduce`: the paper's tables, computed again."""

from pathlib import Path
from typing import Annotated

import typer

from prfaas.cli.common import AsJson, CliError, print_json, write_text


def reproduce(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page there; default: print it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute Tables 3, 5 and 6 of the paper again: ours beside the paper's, with a reason for every deviation.

    The page is made by studies/ of a checkout. Exit code 1 if a number differs by more than 1 % and no reason is known.

    Example: prfaas reproduce --out reproduction.md
    """
    from prfaas.cli.study_folder import StudyFolderError, own_module

    try:
        tables = own_module("_reproduction")
    except StudyFolderError as error:
        raise CliError(str(error)) from None
    result = tables.reproduced()
    page = tables.reproduction_page(result)
    if out is not None:
        write_text(out, page)
    if as_json:
        print_json({"numbers": [row.to_json() for section in result for row in section.rows]})
    elif out is None:
        typer.echo(page, nl=False)
    missing = tables.unexplained(result)
    for row in missing:
        typer.echo(f"no reason is known for {row.label}: {row.ours:.4g}, paper {row.paper:.4g}", err=True)
    if missing:
        raise typer.Exit(1)
