"""`prfaas serve`: the gateway and its control plane as a process's main job, until a signal."""

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING

import typer

from prfaas.cli.common import CliError, DeploymentPath, LogFormatOption, LogLevelOption

if TYPE_CHECKING:
    from prfaas.core.deployment import Deployment


def serve(
    deployment: DeploymentPath, log_format: LogFormatOption = None, log_level: LogLevelOption = None
) -> None:
    """Run the gateway of a deployment whose engines are started elsewhere, until Ctrl-C.

    Example: prfaas serve examples/local.yaml
    """
    from prfaas.cli.common import log_settings, write_logs
    from prfaas.core.deployment import load_deployment
    from prfaas.serving.engines.preparation import ensure_key, ensure_model

    loaded = load_deployment(deployment)
    write_logs(log_settings(log_format, log_level))
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
        CliError: an address of the gateway can't be listened on.
        AdminTokenError: the operators' token can't be read.
    """
    from prfaas.serving.admin_token import load_token
    from prfaas.serving.engines.preparation import port_problem

    gateway, admin = deployment.gateway, deployment.gateway.admin
    for host, port, field in ((gateway.host, gateway.port, "port"), (admin.host, admin.port, "admin.port")):
        problem = port_problem(host, port)
        if problem is not None:
            raise CliError(f"gateway of {deployment.path}: {problem}; free it or change gateway.{field}")
    if admin.token_file is not None:
        load_token(admin.token_file)


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
