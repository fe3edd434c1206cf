"""Puts a deployment's gateway together and serves it.

aiohttp towards the clients, a pool of our own on httptools towards the engines (http_pool.py), uvloop below: measured
side by side by bench/gateway.py; an ASGI stack with a second HTTP library costs several times as much.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from prfaas.deployment import Deployment
from prfaas.gateway.gateway import Gateway
from prfaas.gateway.options import GatewayOptions
from prfaas.gateway.plane import ControlPlane


async def serve_gateway(
    deployment: Deployment,
    plane: ControlPlane,
    *,
    ready: Callable[[int], None] | None = None,
    options: GatewayOptions | None = None,
    registry: CollectorRegistry | None = None,
) -> None:
    """Serve `deployment`'s gateway until cancelled; `ready` is called with the bound port once it accepts
    requests.

    `plane` runs meanwhile and is closed at the end. `registry`: what `GET /metrics` shows besides the gateway's own
    series. Engines may be started before or after. Raises KeyFileError when the deployment's key cannot be
    read, and OSError when the address cannot be bound.
    """
    try:
        await _serve(deployment, plane, ready, options or GatewayOptions(), registry or CollectorRegistry())
    finally:
        await plane.close()


async def _serve(
    deployment: Deployment,
    plane: ControlPlane,
    ready: Callable[[int], None] | None,
    options: GatewayOptions,
    registry: CollectorRegistry,
) -> None:
    gateway = Gateway(deployment, plane, options, registry)
    runner = web.AppRunner(
        gateway.service.application(),
        # A client that leaves cancels its handler, and with it both hops.
        handler_cancellation=True,
        access_log=None,
        # Compressed bodies would let a few bytes unfold into gigabytes; no client of ours sends them.
        auto_decompress=False,
        shutdown_timeout=1.0,
    )
    background: list[asyncio.Task[None]] = []
    try:
        await runner.setup()
        site = web.TCPSite(runner, deployment.gateway.host, deployment.gateway.port, backlog=1024)
        await site.start()
        background.append(asyncio.create_task(plane.run()))
        background.append(asyncio.create_task(gateway.introduce()))
        if ready is not None:
            ready(int(runner.addresses[0][1]))
        # Whichever loop ends first is a bug: let it be seen instead of serving without it.
        await asyncio.gather(*background, asyncio.Event().wait())
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await runner.cleanup()
        await gateway.close()
