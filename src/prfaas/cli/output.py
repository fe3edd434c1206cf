"""What commands write to stdout: JSON that any reader takes, and tables that fit."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from prfaas.cli.errors import CliError

if TYPE_CHECKING:
    from rich.console import Console


def console(pipe_columns: int = 120) -> "Console":
    """For tables. A pipe has no width; 80 columns would wrap them."""
    from rich.console import Console

    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=pipe_columns)


def made_folder(directory: Path, option: str) -> Path:
    """The folder that an option names, made if it isn't there.

    Raises:
        CliError: it can't be.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(
            f"{option} {directory}: can't be made a folder ({error.strerror}); name another"
        ) from error
    return directory


def print_json(document: Any) -> None:
    """One document on stdout; infinities and what is no number become null."""
    import json

    typer.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has neither infinity nor what is no number: both are null."""
    import math

    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
