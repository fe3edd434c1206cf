"""One pool of a deployment, assembled: its pages, its disk, its events, and its neighbours."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prfaas.core.deployment import Deployment, PoolNode
from prfaas.core.pool.eviction import EvictionPolicy, eviction_policy
from prfaas.core.pool.geometry import PoolGeometry
from prfaas.core.prefix.hashing import seed_of
from prfaas.serving.certificates import identity_of
from prfaas.serving.pool.daemon import DaemonOptions, PoolDaemon, PoolError, arena_path
from prfaas.serving.pool.events import PoolEventPublisher
from prfaas.serving.pool.neighbours import PoolNeighbours
from prfaas.serving.pool.ssd_tier import FileTier, SsdOptions
from prfaas.serving.secret_files import load_key

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0


class LatestFigures:
    """A pool's figures for threads that must not touch the store: made in its loop once a second."""

    def __init__(self, sources: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
        """`sources`: makers of the figures' parts, by name; called in the loop."""
        self._sources = sources
        self._latest: dict[str, Any] = {}

    def reported(self) -> dict[str, Any]:
        """The newest figures, as a part of STATS; in any thread."""
        return {"pool": self._latest}

    async def run(self) -> None:
        """Update the figures until cancelled."""
        while True:
            self._latest = {name: dict(make()) for name, make in self._sources.items()}
            await asyncio.sleep(_PERIOD_S)


async def serve_pool(
    deployment: Deployment,
    node: PoolNode,
    *,
    keep_memory: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve one pool until SIGINT or SIGTERM.

    Args:
        deployment: whose pool it is. Its key and certificates are there.
        node: the pool.
        keep_memory: leave the pages in shared memory to the next daemon at the end, too.
        ready: called when engines and other pools can connect.

    Raises:
        PoolError: another daemon serves the pool, or it can't listen.
        ArenaError: the machine has too little shared memory.
        KeyFileError: the key can't be used.
        TlsFileError: the pool's certificate can't be used.
    """
    socket = deployment.pool_socket(node)
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key, tls = load_key(deployment.security.key_file), identity_of(deployment, node.name)
    with contextlib.closing(PoolEventPublisher(seed_of(key))) as events:
        events.start()
        daemon = _daemon(deployment, node, events, keep_memory=keep_memory)
        figures = LatestFigures(
            {
                "store": lambda: daemon.figures().figures,
                "copies": lambda: neighbours.figures(),
                "events": events.state,
            }
        )
        neighbours = PoolNeighbours(deployment, node, key, tls, lambda: daemon.store, figures.reported)
        neighbours.on_follow = events.take

        def listening() -> None:
            try:
                neighbours.start()
            except OSError as error:
                address = f"{node.host}:{node.kv_port}"
                raise PoolError(f"pool {node.name} can't listen at {address}: {error}") from error
            logger.info("pool %s of %s: engines connect at %s", node.name, deployment.name, socket)
            ready()

        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        serving, stop = asyncio.create_task(daemon.serve(listening)), asyncio.create_task(stopping.wait())
        counting = asyncio.create_task(figures.run())
        try:
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            counting.cancel()
            # Neighbours read and write pages: they go before the arena does.
            await neighbours.close()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


def _daemon(
    deployment: Deployment, node: PoolNode, events: PoolEventPublisher, *, keep_memory: bool
) -> PoolDaemon:
    """The daemon of a pool, with its tier on SSD if it has one."""
    loop, tenant_share = asyncio.get_running_loop(), deployment.pool.tenant_share

    def policy(geometry: PoolGeometry) -> EvictionPolicy[bytes]:
        return eviction_policy(deployment.pool.eviction, geometry.groups)

    def in_loop(call: Callable[[], None]) -> None:
        # The loop may have ended before the last thread has.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call)

    def make_ssd(geometry: PoolGeometry, arena: memoryview) -> FileTier:
        options = SsdOptions(node.path, node.ssd_bytes, tenant_share)
        return FileTier(geometry, arena, options, partial(policy, geometry), in_loop)

    socket = deployment.pool_socket(node)
    return PoolDaemon(
        DaemonOptions(socket, arena_path(socket), node.memory_bytes, keep_memory),
        events=events,
        make_ssd=make_ssd if node.ssd_bytes else None,
        make_policy=policy,
        tenant_share=tenant_share,
    )
