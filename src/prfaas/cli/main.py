"""The `prfaas` command: registers the commands and turns errors a user can mend into one sentence.

Modules of commands import only typer at the top and the rest inside the command, so that `prfaas --help` is quick
and works without vLLM.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prfaas import __version__
from prfaas.cli.bandwidth import bandwidth
from prfaas.cli.certs import certs
from prfaas.cli.common import sentence
from prfaas.cli.demo import demo
from prfaas.cli.doctor import doctor
from prfaas.cli.drain import drain, undrain
from prfaas.cli.emit import emit
from prfaas.cli.engine import engine
from prfaas.cli.explain import explain
from prfaas.cli.init import init
from prfaas.cli.key import key
from prfaas.cli.models import model, models
from prfaas.cli.monitoring import monitoring
from prfaas.cli.plan import plan
from prfaas.cli.policies import policies
from prfaas.cli.pool import pool
from prfaas.cli.profile import profile
from prfaas.cli.reload import reload
from prfaas.cli.replay import replay
from prfaas.cli.reproduce import reproduce
from prfaas.cli.rollout import rollout
from prfaas.cli.schema import schema
from prfaas.cli.serve import serve
from prfaas.cli.simulate import simulate
from prfaas.cli.status import status
from prfaas.cli.study import study
from prfaas.cli.up import up
from prfaas.cli.worth import worth
from prfaas.core.shipped import page

# More characters than any command's first sentence has.
_WHOLE = 1000
# Whatever is wrong with words on the command line; typer has no name for it that all its releases share.
_USAGE_ERROR: Any = typer.BadParameter.__base__


class _Overview(TyperGroup):
    """Its help is plain text: to load what draws boxes would take half of the time."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panels.setdefault(command.rich_help_panel, []).append((name, command.get_short_help_str(_WHOLE)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _hide_type_of_flags(command, ctx)
        return command


def _hide_type_of_flags(command: Any, ctx: Any) -> None:
    """Help says "<bool>" beside each, which takes no value."""
    for each in (*command.params, command.get_help_option(ctx)):
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _hide_type_of_flags(inner, ctx)


app = typer.Typer(
    name="prfaas",
    cls=_Overview,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Pages that are named: {page('index')} and beside it.",
)
# By what they are for, as the overview has them.
_COMMANDS: dict[str, tuple[Any, ...]] = {
    "Run": (init, up, serve, engine, model, pool, key, certs, emit, reload, drain, undrain, rollout),
    "Watch": (doctor, status, explain, worth, demo, replay, monitoring),
    "Decide": (models, bandwidth, profile, plan, simulate, study, reproduce),
    "Extend": (policies, schema),
}

for title, commands in _COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=command.info.name, rich_help_panel=title)
        else:
            app.command(rich_help_panel=title)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prfaas {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Prefill-as-a-Service: long prompts are prefilled in another cluster and decoded here, on unmodified vLLM.

    Results go to stdout, logs and progress to stderr. Exit code 2: the command can't be carried out as given.

    Example: prfaas up examples/local.yaml
    """


@cache
def _all_commands() -> Any:
    """What `app` makes anew for each call: a process that runs many commands, as tests do, makes them once."""
    return typer.main.get_command(app)


def main() -> None:
    """Entry point of the `prfaas` script."""
    # None where who started it has closed it.
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        with _flushed():
            code = _all_commands()(standalone_mode=False)
    except _USAGE_ERROR as error:
        _say_usage(error)
        sys.exit(2)
    except Exception as error:
        text = sentence(error, next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
        if text is None:
            raise
        print(f"prfaas: {text}", file=sys.stderr)
        sys.exit(2)
    # What typer ends itself with, after help or Ctrl-C.
    sys.exit(code if isinstance(code, int) else 0)


def _say_usage(error: Any) -> None:
    """One line, as of all that a user can mend; the help of a command that was given nothing.

    Help of inner commands is drawn on stdout before the error comes here, whose text is empty then.
    """
    text = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text, end="\n" if text else "")
        return
    command = getattr(error.ctx, "command_path", "prfaas")
    print(f"prfaas: {' '.join(text.split()).rstrip('.')}; {command} --help says more", file=sys.stderr)


@contextmanager
def _flushed() -> Iterator[None]:
    """Write all output while an error still ends in a sentence; a reader that has enough, as `head`, is none."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # Python would try again at its end, and print a traceback.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise


if __name__ == "__main__":
    main()
