"""`prfaas drain` and `prfaas undrain`: take an instance out of a running deployment without losing a request."""

from pathlib import Path
from typing import Annotated, Any

import typer

from prfaas.cli.common import CliError, GatewayWhere, TokenFile, admin_address, fetch
from prfaas.cli.completions import instance_names
from prfaas.cli.option_groups import option, with_options

_LOOK_EVERY_S = 1.0

_Instance = Annotated[
    str,
    typer.Argument(
        metavar="INSTANCE", help="Its name in the deployment file.", autocompletion=instance_names
    ),
]


@with_options
def drain(
    instance: _Instance,
    where: GatewayWhere,
    wait_s: float | None = option(
        None, "Return when its work has ended.", "--wait", metavar="SECONDS", min=0.0
    ),
    notice_s: float | None = option(
        None, "It is taken away in so many seconds.", "--notice-s", metavar="SECONDS", min=0.1, max=3600.0
    ),
    as_engine: bool = option(
        False, "On the engine's own machine: tell all gateways over the engine's KV port.", "--as-engine"
    ),
    token_file: TokenFile = None,
) -> None:
    """Give an instance no new work; what runs there ends.

    `prfaas status` shows it as draining, then as drained: it can be stopped now. The gateway remembers this until
    `prfaas undrain`, or until it ends itself. With --wait, exit code 1 if work is left after so many seconds.

    With --notice-s, which is for instances of a cluster with `preemptible: true`: until they go they get prefills
    that end in time, and what would not end goes to others at once. One that comes back takes part again by itself.

    With --as-engine, which is for preStop hooks and ExecStop: no gateway need be named, each hears it from the engine
    itself. It holds until the engine's next process answers.

    Example: prfaas drain home-decode-0 examples/local.yaml --wait 60
    Example: prfaas drain east-1 deployment.yaml --notice-s 30
    Example: prfaas drain east-1 /etc/prfaas/deployment.yaml --as-engine --wait 30
    """
    import time

    if as_engine:
        _leave(instance, where, wait_s or 0.0)
        return
    if notice_s is not None:
        state = _ask(where, token_file, instance, f"drain?notice_s={notice_s:g}")
        typer.echo(f"{instance} has {notice_s:g} s of notice, {state['in_flight']} requests open")
        return
    state = _ask(where, token_file, instance, "drain")
    deadline = time.monotonic() + (wait_s or 0.0)
    while wait_s is not None and state["drain"] == "draining" and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        # To ask again changes nothing.
        state = _ask(where, token_file, instance, "drain")
    left = f", {state['in_flight']} requests open" if state["drain"] == "draining" else ""
    typer.echo(f"{instance} is {state['drain']}{left}")
    if wait_s is not None and state["drain"] == "draining":
        raise typer.Exit(1)


def _leave(instance: str, where: str, within_s: float) -> None:
    import asyncio

    from prfaas.core.deployment import load_deployment
    from prfaas.tools.leaving import leave

    deployment = load_deployment(Path(where))
    deployment.instance(instance)
    try:
        left = asyncio.run(leave(deployment, instance, within_s))
    except (OSError, TimeoutError) as error:
        address = f"{deployment.instance(instance).host}:{deployment.instance(instance).kv_port}"
        raise CliError(f"{instance} has not been told at {address}: {error or 'no answer'}") from None
    typer.echo(f"{instance} is draining: {left}" if left else f"{instance} is drained")
    if left and within_s:
        raise typer.Exit(1)


def undrain(instance: _Instance, where: GatewayWhere, token_file: TokenFile = None) -> None:
    """Give a drained instance work again.

    Example: prfaas undrain home-decode-0 examples/local.yaml
    """
    state = _ask(where, token_file, instance, "undrain")
    if state["drain"] is not None:
        raise CliError(f"{instance} is still {state['drain']}")
    typer.echo(f"{instance} takes part again" + ("" if state["healthy"] else " once it answers"))


def _ask(where: str, token_file: Path | None, instance: str, what: str) -> dict[str, Any]:
    from urllib.parse import quote

    path = f"/prfaas/instances/{quote(instance, safe='')}/{what}"
    return fetch(admin_address(where, token_file), path, method="POST")
