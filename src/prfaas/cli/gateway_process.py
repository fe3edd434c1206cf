"""The gateway and its control plane as this process's main job: until a signal, beside tasks that watch others."""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Coroutine, Sequence

from prfaas.cli.common import CliError
from prfaas.core.deployment import Deployment
from prfaas.serving.engines.preparation import port_problem


def run_gateway(
    deployment: Deployment,
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


def check_gateway_port(deployment: Deployment) -> None:
    """Refuse early what would fail late, after engines have taken a minute to start.

    Raises:
        CliError: the gateway's address can't be listened on.
    """
    problem = port_problem(deployment.gateway.host, deployment.gateway.port)
    if problem is not None:
        raise CliError(f"gateway of {deployment.path}: {problem}; free it or change gateway.port")


async def _serve(
    deployment: Deployment,
    ready: Callable[[int], None] | None,
    beside: Sequence[Callable[[], Coroutine[None, None, None]]],
) -> None:
    from prometheus_client import CollectorRegistry

    from prfaas.serving.control.plane import LivePlane
    from prfaas.serving.control.planning_inputs import kv_model_of
    from prfaas.serving.gateway.server import serve_gateway
    from prfaas.serving.transport.ticket import load_key

    loop = asyncio.get_running_loop()
    registry = CollectorRegistry()
    plane = LivePlane(deployment, load_key(deployment.security.key_file), registry, kv_model_of(deployment))
    gateway = asyncio.create_task(serve_gateway(deployment, plane, ready=ready, registry=registry))
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
