"""`prfaas serve`: the gateway and its control plane as a process's main job, until a signal."""

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import CliError, DeploymentPath

if TYPE_CHECKING:
    from prfaas.core.deployment import Deployment


def serve(deployment: DeploymentPath) -> None:
    """Run the gateway of a deployment whose engines are started elsewhere, until Ctrl-C.

    Example: prfaas serve examples/local.yaml
    """
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.engines.preparation import ensure_key, ensure_model

    loaded = load_deployment(deployment)
    if loaded.model.tiny is not None:
        ensure_model(loaded)
    ensure_key(loaded)
    run_gateway(loaded, ready=lambda _port: typer.echo(f"ready: {loaded.gateway.url}/v1"))


def run_gateway(
    deployment: "Deployment",
    *,
    ready: Callable[[int], None] | None = None,
    beside: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
) -> None:
    """Serve until SIGINT or SIGTERM, with `beside` running meanwhile. Returns normally after a signal.

    `ready` is called with the port once clients can connect.

    Raises:
        CliError: the gateway's address can't be listened on.
    """
    import uvloop

    check_gateway_port(deployment)
    uvloop.run(_serve(deployment, ready, beside))


def check_gateway_port(deployment: "Deployment") -> None:
    """Refuse early what would fail late, after engines have taken a minute to start.

    Raises:
        CliError: the gateway's address can't be listened on.
    """
    from prfaas.serving.engines.preparation import port_problem

    problem = port_problem(deployment.gateway.host, deployment.gateway.port)
    if problem is not None:
        raise CliError(f"gateway of {deployment.path}: {problem}; free it or change gateway.port")


async def _serve(
    deployment: "Deployment",
    ready: Callable[[int], None] | None,
    beside: Sequence[Callable[[], Coroutine[None, None, None]]],
) -> None:
    import asyncio
    import contextlib
    import gc
    import signal

    from prfaas.serving.live import serve_live

    loop = asyncio.get_running_loop()
    gateway = asyncio.create_task(serve_live(deployment, ready=ready))
    # What the imports made stays: without it, a full collection would look at all of it, for a tenth of a second.
    gc.collect()
    gc.freeze()
    others = [asyncio.create_task(make()) for make in beside]
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, gateway.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await gateway
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
