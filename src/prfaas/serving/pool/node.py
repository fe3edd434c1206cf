"""One pool of a deployment, put together: its pages, and who reaches them how."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from prfaas.core.deployment import Deployment, PoolNode
from prfaas.core.pool.eviction import EvictionPolicy, eviction_policy
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.serving.pool.daemon import PoolDaemon, PoolOptions, arena_path

logger = logging.getLogger(__name__)


async def serve_pool(
    deployment: Deployment,
    node: PoolNode,
    *,
    keep_memory: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve one pool until SIGINT or SIGTERM.

    Args:
        deployment: whose pool it is.
        node: the pool.
        keep_memory: leave the pages in shared memory to the next daemon at the end, too.
        ready: called when engines can connect.

    Raises:
        PoolError: another daemon serves the pool, or its socket can't be made.
        ArenaError: the machine has too little shared memory.
    """
    socket = deployment.pool_socket(node)
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = PoolOptions(socket, arena_path(socket), node.memory_bytes, keep_memory)

    def policy(geometry: PoolGeometry) -> EvictionPolicy[bytes]:
        return eviction_policy(deployment.pool.eviction, geometry.groups)

    daemon = PoolDaemon(options, make_policy=policy)

    def listening() -> None:
        logger.info("pool %s of %s: engines connect at %s", node.name, deployment.name, socket)
        ready()

    serving = asyncio.create_task(daemon.serve(listening))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
