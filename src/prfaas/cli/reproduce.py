"""`prfaas reproduce`: the paper's tables, computed again."""

from pathlib import Path

import typer

from prfaas.cli.common import AsJson, check_target, print_json, write_text
from prfaas.cli.option_groups import option, with_options


@with_options
def reproduce(
    out: Path | None = option(None, "Write the page there; default: print it.", metavar="FILE"),
    as_json: AsJson = False,
) -> None:
    """Compute Tables 3, 5 and 6 of the paper again: ours beside the paper's, with a reason for every deviation.

    The page is made by studies/ of a checkout. Exit code 1 if a number differs by more than 1 % and no reason is known.

    Example: prfaas reproduce --out reproduction.md
    """
    from prfaas.cli.study_folder import own_module

    check_target(out, "--out")
    tables = own_module("_reproduction")
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
