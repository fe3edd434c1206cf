"""`--columns`: what the columns of a CSV trace are called, for the commands that read one."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.cli.common import CliError

if TYPE_CHECKING:
    from prfaas.core.workload import CsvColumns


def columns_option(option: Callable[..., Any]) -> Any:
    """The option, made by the function that makes others of its panel."""
    return option(
        "--columns",
        metavar="arrival=A,input=B,output=C",
        help="What the columns of a CSV trace are called; arrival in seconds or as date and time, or arrival_ms.",
    )


def csv_columns(text: str | None, trace: Path | None) -> "CsvColumns | None":
    """The columns that the option names; None where it is not given.

    Raises:
        CliError: another form, or no trace.
    """
    if text is None:
        return None
    if trace is None:
        raise CliError("--columns names those of a CSV --trace; there is none")
    from prfaas.core.workload import CsvColumns, WorkloadError

    try:
        return CsvColumns.parse(text)
    except WorkloadError as error:
        raise CliError(f"--columns: {error}") from None
