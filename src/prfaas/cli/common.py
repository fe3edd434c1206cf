"""Parts that commands share: arguments, errors that end a command with one sentence, JSON and tables on stdout."""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prfaas.cli.completions import instance_names
from prfaas.cli.option_groups import option

if TYPE_CHECKING:
    from urllib.error import HTTPError

    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from prfaas.serving.logs import LogSettings


class CliError(Exception):
    """A command can't do what it was asked to; the text says why and what to do."""


# What ended so is the disk's affair even where no file is named: stdout, pictures.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}

# Heavy libraries that are only there with an engine installed.
_ENGINE_MODULES = {"vllm", "torch", "transformers", "safetensors"}

# The commands that need the planner's packages. What another one lacks is the gateway's.
PLAN_COMMANDS = ("plan", "policies", "simulate", "study", "reproduce", "bandwidth", "profile")
_OWNERS = {"plan": "the planner's", "gateway": "the gateway's"}


def sentence(error: Exception, command: str = "") -> str | None:
    """The sentence for an error that the user can mend; None for a bug of ours.

    Args:
        error: what ended the command.
        command: its name, for example "plan".
    """
    # Late, so that `prfaas --help` doesn't pay for what it doesn't need.
    from prfaas.core.deployment import DeploymentError
    from prfaas.core.kv.config_fields import ConfigError
    from prfaas.core.latency.profile import ProfileError
    from prfaas.core.planner import PlanError
    from prfaas.core.workload.lengths import WorkloadError
    from prfaas.serving.engines import EngineError
    from prfaas.serving.secret_files import SecretFileError

    known = (CliError, DeploymentError, EngineError, ConfigError, PlanError, ProfileError, WorkloadError)
    if isinstance(error, (*known, SecretFileError)):
        return str(error)
    if isinstance(error, OSError) and (error.filename or error.errno in _FULL):
        return f"{error.filename2 or error.filename or 'output'}: {error.strerror or error}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return _missing(error.name.split(".")[0], command)
    return None


def _missing(package: str, command: str) -> str | None:
    from prfaas.core.extras import how_to_install

    if package in _ENGINE_MODULES:
        return (
            f"{package} is not installed in this environment; "
            "`make setup` installs vLLM's CPU build, `pip install vllm` the one for GPUs"
        )
    if package in ("opentelemetry", "requests"):
        return (
            f"gateway.tracing needs OpenTelemetry's packages: {how_to_install('trace')}, "
            "or take gateway.tracing out of the deployment file"
        )
    if package == "prfaas":
        return None
    extra = "plan" if command in PLAN_COMMANDS else "gateway"
    return (
        f"`prfaas {command}` needs {_OWNERS[extra]} packages ({package} is missing): {how_to_install(extra)}"
    )


def console(pipe_columns: int = 120) -> "Console":
    """For tables. A pipe has no width; 80 columns would wrap them."""
    from rich.console import Console

    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=pipe_columns)


def progress_bar(*columns: "ProgressColumn", transient: bool = False) -> "Progress":
    """On stderr: a bar that moves on a terminal, and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    shown = Console(stderr=True, highlight=False)
    return Progress(*columns, console=shown, transient=transient, disable=not shown.is_terminal)


def counted_progress(transient: bool = False) -> "Progress":
    """A bar of things of which it is known how many there will be."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return progress_bar(*columns, transient=transient)


def made_folder(directory: Path) -> Path:
    """A folder, made if it isn't there."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def new_file(folder: Path, name: str, *, force: bool) -> Path:
    """The path of a file to write, once its folder is made. CliError: it is there already, and `force` isn't given."""
    target = made_folder(folder) / name
    if target.exists() and not force:
        raise CliError(f"{target} is there already; --force overwrites it")
    return target


def check_target(path: Path | None, option_name: str) -> None:
    """Raise CliError, before long work, for a file that could not be written after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise CliError(f"{option_name}: there is no directory {path.absolute().parent}")
    if path is not None and path.is_dir():
        raise CliError(f"{option_name}: {path} is a directory; name a file")


def write_text(path: Path, text: str) -> None:
    """Write a file that an option asks for, and say so on stderr."""
    path.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {path}", err=True)


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


def is_rate_field(field: str) -> bool:
    """True if a field of the deployment file holds bits per second."""
    return field.endswith("bandwidth")


def field_number(name: str, field: str, text: str) -> float:
    """The number for a field of the deployment file; a bandwidth may have a unit.

    Raises:
        CliError: no finite number.
    """
    import math

    from prfaas.core.units import parse_bits_per_s

    try:
        value = float(text)
    except ValueError:
        try:
            rate_bits_per_s = parse_bits_per_s(text)
        except ValueError as error:
            why = f"{error}" if is_rate_field(field) else f'"{text}" is no number'
            raise CliError(f"{name}: {why}") from None
        if not is_rate_field(field):
            raise CliError(
                f'{name}: "{text}" is a bandwidth, but {field} is none; did you mean links[0].bandwidth?'
            ) from None
        return rate_bits_per_s
    if not math.isfinite(value):
        raise CliError(f'{name}: "{text}" is no number')
    return value


DeploymentPath = Annotated[
    Path, typer.Argument(metavar="DEPLOYMENT", help="The deployment file, for example examples/local.yaml.")
]
GatewayWhere = Annotated[
    str,
    typer.Argument(
        metavar="DEPLOYMENT|URL",
        help="The deployment file, or the URL of the gateway's operators (gateway.admin).",
    ),
]
InstanceName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="An instance's name in the deployment file.", autocompletion=instance_names
    ),
]
ReadyTimeout = Annotated[
    float | None,
    typer.Option(
        "--ready-timeout",
        metavar="SECONDS",
        min=1.0,
        help="Give engines up that are not ready by then; default: 1200.",
    ),
]
DRAIN_TIMEOUT_S = 30.0
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        metavar="SECONDS",
        min=0.0,
        help="After a first SIGTERM or Ctrl-C, let running requests go on so long; a second one ends them.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Where the operators' token is; default: what the deployment file says.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")]


_TIMEOUT_S = 10.0
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LogsAsked:
    """How logs are written: by these options, else by the environment."""

    log_format: str | None = option(None, "text (default) or json, one object per line.")
    log_level: str | None = option(None, "debug, info (default), warning or error: what is less is left out.")

    def settings(self) -> "LogSettings":
        """The two together. Raises CliError for an unknown word."""
        from prfaas.serving.logs import FORMATS, LEVELS, LogSettings

        asked = (("--log-format", self.log_format, FORMATS), ("--log-level", self.log_level, LEVELS))
        for name, value, known in asked:
            if value is not None and value not in known:
                raise CliError(f'{name}: "{value}" is none of {", ".join(known)}')
        told = LogSettings.of_environment()
        return LogSettings(
            "json" if (self.log_format or told.format) == "json" else "text", self.log_level or told.level
        )

    def write(self) -> None:
        """Have this process and its children write their logs so."""
        import os

        from prfaas.serving.logs import set_up_logging

        settings = self.settings()
        os.environ.update(settings.environment())
        set_up_logging(settings, whole_process=True)


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where a gateway's operators connect, and the token that they show."""

    url: str
    token: str | None


def admin_address(where: str, token_file: Path | None) -> AdminAddress:
    """The operators' port of a deployment file's gateway, or at a URL.

    Raises:
        DeploymentError: a bad file.
        AdminTokenError: the token's file can't be used.
    """
    from prfaas.serving.secret_files import load_token

    if where.startswith(("http://", "https://")):
        url = where.rstrip("/").removesuffix("/v1")
    else:
        from prfaas.core.deployment import load_deployment

        admin = load_deployment(Path(where)).gateway.admin
        url, token_file = admin.url, token_file or admin.token_file
    return AdminAddress(url, None if token_file is None else load_token(token_file))


def fetch(admin: AdminAddress, path: str, method: str = "GET") -> dict[str, Any]:
    """The JSON object that a gateway's operators get at `path`.

    Raises:
        CliError: nothing answers there, or not with such an object; the text is what the gateway says itself.
    """
    import http.client
    import json
    import urllib.error
    import urllib.request

    url = admin.url
    headers = {} if admin.token is None else {"Authorization": f"Bearer {admin.token}"}
    stays = urllib.request.HTTPRedirectHandler()
    # Who answers elsewhere would get the operators' token.
    stays.redirect_request = lambda *_: None  # type: ignore[method-assign]
    # Environments with a proxy for the outside would send it questions about this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), stays)
    try:
        asked = urllib.request.Request(url + path, headers=headers, method=method)
        with opener.open(asked, timeout=_TIMEOUT_S) as response:
            content: bytes = response.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        said = _said(error) or f"{url}{path} answered {error.code}; is it a prfaas gateway?"
        if said.startswith("There is no GET"):
            said += " Operators' pages are at gateway.admin, by default the port after the gateway's."
        raise CliError(said) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CliError(f"no gateway answers at {url} ({reason}); start it: prfaas serve DEPLOYMENT") from None
    try:
        document = json.loads(content)
    except ValueError as error:
        raise CliError(f"{url}{path} is no page of a prfaas gateway ({error})") from None
    if not isinstance(document, dict):
        raise CliError(f"{url}{path} is no page of a prfaas gateway")
    return document


def _said(error: "HTTPError") -> str | None:
    import json

    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
