"""`prfaas pool`: the prefix-cache pools of a deployment."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from prfaas.cli.common import AsJson, CliError, DeploymentPath, LogsAsked, console, print_json
from prfaas.cli.completions import pool_names
from prfaas.cli.option_groups import argument, option, with_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from prfaas.serving.pool.client import PoolClient

_ANSWER_S = 5.0
_SILENT = "does not answer"
# What the tier on SSD says of itself.
_WRITABLE = "writable"


class _PoolGroup(TyperGroup):
    """`prfaas pool FILE NAME` is `prfaas pool start FILE NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


pool = typer.Typer(
    name="pool",
    cls=_PoolGroup,
    no_args_is_help=True,
    help="Prefix-cache pools: start, look at, clear, verify.",
)


@pool.command()
@with_options
def start(
    deployment: DeploymentPath,
    name: str = argument(
        ..., "A pool's name, for example home-pool.", metavar="NAME", autocompletion=pool_names
    ),
    keep_memory: bool = option(
        False,
        "At the end, leave the pages in shared memory to the next start. Without, those on disk are left.",
        "--keep-memory",
    ),
    print_only: bool = option(False, "Print the exact command line and start nothing.", "--print"),
    *,
    logs: LogsAsked,
) -> None:
    """Start one pool of this machine, in place of this process, until SIGTERM or Ctrl-C.

    Engines of the machine use it as soon as it is there. "start" may be left out.

    Example: prfaas pool examples/local.yaml home-pool
    """
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.engines.preparation import ensure_certificates, ensure_key
    from prfaas.serving.pool.running import pool_command

    loaded = load_deployment(deployment)
    command = pool_command(loaded, loaded.pool_named(name), keep_memory=keep_memory)
    command = replace(command, env={**command.env, **logs.settings().environment()})
    if print_only:
        typer.echo(command.shell)
        return
    ensure_key(loaded)
    ensure_certificates(loaded, [name])
    os.execve(command.argv[0], command.argv, command.environment())


PoolName = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]", help="A pool's name; all of this machine if not given.", autocompletion=pool_names
    ),
]


@pool.command()
def status(deployment: DeploymentPath, name: PoolName = None, as_json: AsJson = False) -> None:
    """Show what the pools of this machine hold, in memory and on disk, and what engines found there.

    Exit code 1: a pool doesn't answer, or its disk can't be written.

    Example: prfaas pool status examples/local.yaml
    """
    answers = _ask(deployment, name, lambda client: client.stats())
    if as_json:
        _print_json(answers)
    else:
        _print_table(answers)
    if not all(_is_well(figures) for figures in answers.values()):
        raise typer.Exit(1)


@pool.command()
def clear(deployment: DeploymentPath, name: PoolName = None, as_json: AsJson = False) -> None:
    """Drop all pages of the pools of this machine, from memory and from disk.

    Pages that engines read at the moment stay in memory.

    Exit code 1: a pool doesn't answer.

    Example: prfaas pool clear examples/local.yaml home-pool
    """
    answers = _ask(deployment, name, lambda client: client.clear())
    _tell(answers, as_json, lambda figures: f"{figures.get('dropped_pages', 0):,} pages dropped")
    if None in answers.values():
        raise typer.Exit(1)


@pool.command()
def verify(deployment: DeploymentPath, name: PoolName = None, as_json: AsJson = False) -> None:
    """Read all pages of the pools of this machine and compare them with their checksums. Wrong ones are dropped.

    Exit code 1: a pool doesn't answer, or had wrong pages.

    Example: prfaas pool verify examples/local.yaml
    """

    def said(figures: dict[str, Any]) -> str:
        return (
            f"memory {figures['right_pages']:,} right, {figures['wrong_pages']:,} wrong; "
            f"disk {figures['ssd_right_pages']:,} right, {figures['ssd_wrong_pages']:,} wrong"
        )

    answers = _ask(deployment, name, lambda client: client.verify())
    _tell(answers, as_json, said)
    if any(
        figures is None or figures["wrong_pages"] or figures["ssd_wrong_pages"]
        for figures in answers.values()
    ):
        raise typer.Exit(1)


def _ask(
    path: Path, name: str | None, question: "Callable[[PoolClient], dict[str, Any] | None]"
) -> dict[str, dict[str, Any] | None]:
    """The answer of each pool by name; None where none came.

    Raises:
        DeploymentError: a bad file, or no pool has that name.
        CliError: no pool of the file has a socket on this machine.
    """
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.pool.client import PoolClient

    deployment = load_deployment(path)
    nodes = [deployment.pool_named(name)] if name is not None else list(deployment.pools)
    if not nodes:
        raise CliError(f"{path}: no cluster has a pool; give one a section pool")
    here = [node for node in nodes if deployment.pool_socket(node).exists()]
    if not here:
        named = name or nodes[0].name
        raise CliError(f"no pool runs here; start one on its machine: prfaas pool {path} {named}")
    answers = {}
    for node in here:
        client = PoolClient(deployment.pool_socket(node), "tool", None, timeout_s=_ANSWER_S)
        try:
            answers[node.name] = question(client) if client.connect() else None
        finally:
            client.close()
    return answers


def _is_well(figures: dict[str, Any] | None) -> bool:
    return figures is not None and figures.get("ssd_state", _WRITABLE) == _WRITABLE


def _print_json(answers: dict[str, dict[str, Any] | None]) -> None:
    print_json(
        {
            "pools": [
                {"name": name, "answers": bool(figures is not None), **(figures or {})}
                for name, figures in answers.items()
            ]
        }
    )


def _tell(
    answers: dict[str, dict[str, Any] | None], as_json: bool, said: "Callable[[dict[str, Any]], str]"
) -> None:
    if as_json:
        _print_json(answers)
        return
    for name, figures in answers.items():
        typer.echo(f"{name}: {_SILENT if figures is None else said(figures)}")


def _print_table(answers: dict[str, dict[str, Any] | None]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="pools of this machine", title_justify="left")
    for column in ("pool", "state", "engines", "memory", "disk", "pages", "hit tokens", "wrong pages"):
        table.add_column(column, overflow="fold")
    for name, figures in answers.items():
        table.add_row(Text(name), *map(Text, _cells(figures)))
    console().print(table)


def _cells(figures: dict[str, Any] | None) -> list[str]:
    from prfaas.core.units import format_bytes

    if not figures:
        return [_SILENT if figures is None else "waits for its first engine", *["-"] * 6]
    state = "fills its memory" if figures["provided_bytes"] < figures["memory_bytes"] else "serves"
    disk = figures.get("ssd_state", _WRITABLE)
    if disk != _WRITABLE:
        state = f"{state}; disk: {disk}"
    has_disk = "ssd_capacity_bytes" in figures
    in_memory, on_disk = sum(figures["memory_pages"].values()), sum(figures["ssd_pages"].values())
    return [
        state,
        str(figures["engine_sessions"]),
        f"{format_bytes(figures['used_bytes'])} of {format_bytes(figures['memory_bytes'])}",
        f"{format_bytes(figures['ssd_used_bytes'])} of {format_bytes(figures['ssd_capacity_bytes'])}"
        if has_disk
        else "none",
        f"{in_memory:,}, disk {on_disk:,}",
        f"{figures['hit_memory_tokens']:,}, disk {figures['hit_ssd_tokens']:,}",
        f"{figures['wrong_pages'] + figures.get('ssd_wrong', 0):,}",
    ]
