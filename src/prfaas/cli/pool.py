"""`prfaas pool`: the prefix-cache pools of a deployment."""

import os
import shlex
from dataclasses import replace
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prfaas.cli.common import DeploymentPath, LogFormatOption, LogLevelOption


class _PoolGroup(TyperGroup):
    """`prfaas pool FILE NAME` is `prfaas pool start FILE NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


pool = typer.Typer(
    cls=_PoolGroup, no_args_is_help=True, help="Prefix-cache pools: start, look at, clear, verify."
)


@pool.command()
def start(
    deployment: DeploymentPath,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A pool's name, for example home-pool.")],
    keep_memory: Annotated[
        bool,
        typer.Option(
            "--keep-memory",
            help="At the end, leave the pages in shared memory to the next start. Without, those on disk are left.",
        ),
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the exact command line and start nothing.")
    ] = False,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Start one pool of this machine, in place of this process, until SIGTERM or Ctrl-C.

    Engines of the machine use it as soon as it is there. "start" may be left out.

    Example: prfaas pool examples/local.yaml home-pool
    """
    from prfaas.cli.common import log_settings
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.engines.preparation import ensure_certificates, ensure_key
    from prfaas.serving.pool.running import pool_command

    loaded = load_deployment(deployment)
    command = pool_command(loaded, loaded.pool_named(name), keep_memory=keep_memory)
    logs = log_settings(log_format, log_level)
    command = replace(command, env={**command.env, **logs.environment()})
    if print_only:
        settings = [f"{key}={value}" for key, value in command.env.items()]
        typer.echo(shlex.join(["env", *settings, *command.argv]))
        return
    ensure_key(loaded)
    ensure_certificates(loaded, [name])
    os.execve(command.argv[0], command.argv, command.environment())
