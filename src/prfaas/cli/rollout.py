"""`prfaas rollout`: every engine of a running deployment is replaced, one after the other."""

from typing import TYPE_CHECKING, Any

import typer

from prfaas.cli.common import (
    AsJson,
    CliError,
    DeploymentPath,
    ReadyTimeout,
    TokenFile,
    admin_address,
    fetch,
    print_json,
)
from prfaas.cli.completions import instance_names
from prfaas.cli.option_groups import argument, option, with_options

if TYPE_CHECKING:
    from prfaas.tools.rollout import Replaced


@with_options
def rollout(
    deployment: DeploymentPath,
    instances: list[str] | None = argument(
        None, "Only these; default: all.", metavar="[INSTANCE…]", autocompletion=instance_names
    ),
    command: str | None = option(
        None,
        "Restarts one engine, where `prfaas up` has not started it; {instance}, {host} and {cluster} in it.",
        "--command",
        metavar="COMMAND",
    ),
    resume: bool = option(False, "Go on with the rollout that was stopped.", "--resume"),
    drain_s: float = option(
        60.0, "What is open after that goes on elsewhere.", "--drain", metavar="SECONDS", min=0.0
    ),
    ready_timeout_s: ReadyTimeout = None,
    with_gap: bool = option(
        False, "Also the only engine that decodes, though requests are refused then.", "--with-gap"
    ),
    new_answers: bool = option(
        False, "Engines may answer otherwise than before: another model or version.", "--new-answers"
    ),
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Replace engines one after the other: drain, restart, health, one exact answer, and back in.

    The ranks of a group are replaced together. It stops at the first that fails, which stays drained. --resume goes on
    with that one.

    Example: prfaas rollout examples/local.yaml --with-gap
    Example: prfaas rollout deployment.yaml --command 'ssh {host} systemctl restart prfaas-engine-{instance}'
    """
    import asyncio
    from dataclasses import asdict
    from functools import partial

    from prfaas.core.deployment import load_deployment
    from prfaas.serving.engines.child_processes import READY_TIMEOUT_S
    from prfaas.tools.rollout import RolloutError, RolloutSettings, replace_all

    loaded = load_deployment(deployment)
    if resume and instances:
        raise CliError("--resume goes on with the instances of the rollout that was stopped; name none")
    settings = RolloutSettings(
        command=command,
        drain_s=drain_s,
        ready_s=ready_timeout_s or READY_TIMEOUT_S,
        with_gap=with_gap,
        new_answers=new_answers,
    )
    admin = admin_address(str(deployment), token_file)

    def ask(path: str, method: str) -> dict[str, Any]:
        try:
            return fetch(admin, path, method)
        except CliError as error:
            raise RolloutError(str(error)) from None

    tell = partial(typer.echo, err=True)
    done: list[Replaced] = []
    trouble: Exception | None = None
    try:
        asyncio.run(replace_all(loaded, ask, settings, None if resume else instances or [], done, tell))
    except RolloutError as error:
        trouble = error
    if as_json:
        print_json({"replaced": list(map(asdict, done)), "failed": trouble and str(trouble)})
    if trouble is not None:
        raise CliError(str(trouble))
