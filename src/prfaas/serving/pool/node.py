"""One pool of a deployment, put together: its pages, and who reaches them how."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from prfaas.core.deployment import Deployment, PoolNode
from prfaas.core.pool.eviction import EvictionPolicy, eviction_policy
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.serving.certificates import identity_of
from prfaas.serving.pool.daemon import PoolDaemon, PoolError, PoolOptions, arena_path
from prfaas.serving.pool.neighbours import PoolNeighbours
from prfaas.serving.transport.ticket import load_key

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
        PoolError: another daemon serves the pool, its socket can't be made, or its KV port is taken.
        ArenaError: the machine has too little shared memory.
        KeyFileError: the key can't be used.
        TlsFileError: its certificate can't be used.
    """
    socket = deployment.pool_socket(node)
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = PoolOptions(socket, arena_path(socket), node.memory_bytes, keep_memory)

    def policy(geometry: PoolGeometry) -> EvictionPolicy[bytes]:
        return eviction_policy(deployment.pool.eviction, geometry.groups)

    daemon = PoolDaemon(options, make_policy=policy)
    neighbours = PoolNeighbours(
        deployment,
        node,
        load_key(deployment.security.key_file),
        identity_of(deployment, node.name),
        lambda: daemon.store,
    )

    def listening() -> None:
        try:
            neighbours.start()
        except OSError as error:
            raise PoolError(f"pool {node.name} can't listen at {node.host}:{node.kv_port}: {error}") from None
        logger.info("pool %s of %s: engines connect at %s", node.name, deployment.name, socket)
        ready()

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    serving, stopped = loop.create_task(daemon.serve(listening)), loop.create_task(stopping.wait())
    try:
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        # Nothing of other pools is written any more when the memory goes to the next daemon.
        await neighbours.close()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
