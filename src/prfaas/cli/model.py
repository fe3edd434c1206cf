"""`prfaas model`: the tiny models that prfaas makes itself."""

from pathlib import Path
from typing import Annotated

import typer

from prfaas.cli.options import AsJson

model = typer.Typer(no_args_is_help=True, help="Make the tiny models that examples and tests run on.")


@model.command()
def make(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="qwen3-next, gpt-oss, mimo-v2-flash, qwen3, or all.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--into", metavar="DIRECTORY", help="Where models are kept; default: $PRFAAS_HOME/models."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a tiny checkpoint (seconds, no download) unless it is there, and print its path.

    Examples: prfaas model make gpt-oss; prfaas model make all --into ./models
    """
    import json

    from prfaas.cli.errors import CliError
    from prfaas.deployment import default_state_dir
    from prfaas.engines.tiny import TINY_MODEL_NAMES, tiny_model

    names = TINY_MODEL_NAMES if name == "all" else (name,)
    parent = (directory or default_state_dir() / "models").absolute()
    paths = {}
    for each in names:
        try:
            paths[each] = str(tiny_model(each, parent))
        except (ValueError, OSError) as error:
            raise CliError(f"model make {each}: {error}") from error
        if not as_json:
            typer.echo(paths[each])
    if as_json:
        typer.echo(json.dumps(paths, indent=2))
