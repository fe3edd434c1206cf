"""Arguments that several commands share.

Errors that end a command with one sentence and exit code 2.

What commands write to stdout: JSON that any reader takes, and tables that fit.

The deployment files that come with prfaas.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


class CliError(Exception):
    """A command can't do what it was asked to; the text says why and what to do."""


# Heavy libraries that are only there with an engine installed.
_ENGINE_MODULES = {"vllm", "torch", "transformers", "safetensors"}


def sentence(error: Exception) -> str | None:
    """What to tell the user about an error that they can mend; None for one of ours."""
    # Late, so that `prfaas --help` doesn't pay for what it doesn't need.
    from prfaas.core.deployment import DeploymentError
    from prfaas.core.kv import ConfigError
    from prfaas.core.latency import ProfileError
    from prfaas.core.planner import PlanError
    from prfaas.core.workload import WorkloadError
    from prfaas.serving.engines.errors import EngineError
    from prfaas.serving.transport.ticket import KeyFileError

    known = (CliError, DeploymentError, EngineError, ConfigError, PlanError, ProfileError, KeyFileError)
    if isinstance(error, (*known, WorkloadError)):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _ENGINE_MODULES:
        return (
            f"{error.name} is not installed in this environment; "
            "`make setup` installs vLLM's CPU build, `pip install 'prfaas[engine]'` the one for GPUs"
        )
    return None


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


def example_path(name: str) -> Path:
    """`examples/NAME` beside an installed package, or in the repository that it was installed from.

    Raises:
        CliError: it is not there.
    """
    import prfaas

    package = Path(prfaas.__file__).parent
    for directory in (package / "examples", package.parents[1] / "examples"):
        if (directory / name).is_file():
            return directory / name
    raise CliError(f"examples/{name} is not installed with this prfaas")


DeploymentPath = Annotated[
    Path, typer.Argument(metavar="DEPLOYMENT", help="The deployment file, for example examples/local.yaml.")
]
InstanceName = Annotated[
    str, typer.Argument(metavar="NAME", help="An instance's name in the deployment file.")
]
StartTimeout = Annotated[
    float | None,
    typer.Option(
        "--start-timeout",
        metavar="SECONDS",
        min=1.0,
        help="Give engines up that are not ready by then; default: 1200.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")]
