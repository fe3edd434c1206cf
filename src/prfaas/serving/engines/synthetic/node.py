"""One instance of a deployment as a stand-in, with its ports; and several of them in one process."""

import argparse
import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Sequence

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.deployment.speculation import counted_model
from prfaas.core.deployment.types import SYNTHETIC
from prfaas.core.kv.model import KvModel, model_on_wire
from prfaas.core.units import GIB
from prfaas.serving.certificates import identity_of
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.synthetic import VERSION
from prfaas.serving.engines.synthetic.api_bodies import ServedModels
from prfaas.serving.engines.synthetic.cache import PrefixCache
from prfaas.serving.engines.synthetic.endpoints import Endpoints
from prfaas.serving.engines.synthetic.engine import SyntheticEngine
from prfaas.serving.engines.synthetic.layout import SyntheticLayout
from prfaas.serving.engines.synthetic.pace import Pace
from prfaas.serving.engines.synthetic.server import EngineServer
from prfaas.serving.engines.synthetic.text import Text

logger = logging.getLogger(__name__)

_DEFAULT_CACHE_GIB = 1
_END_POLL_S = 0.05


class SyntheticNode:
    """HTTP and KV port of one stand-in, and the engine behind them. Make it in a running event loop."""

    def __init__(self, deployment: Deployment, instance: Instance, key: bytes, text: Text) -> None:
        """Raises EngineError when the deployment can't be stood in for, TlsFileError when it lacks a certificate."""
        cluster = deployment.cluster_of(instance)
        if cluster.hardware != SYNTHETIC or cluster.profile is None:
            raise EngineError(
                f"{instance.name} is not synthetic: its cluster's hardware is {cluster.hardware}"
            )
        self.instance = instance
        self._tls = identity_of(deployment, instance.name)
        layout = SyntheticLayout.of_model(_sent_model(deployment))
        endpoints = Endpoints(deployment, instance, layout, key, self._tls)
        capacity_bytes = round((deployment.engine.kv_cache_gib or _DEFAULT_CACHE_GIB) * GIB)
        longest = layout.pages_for(deployment.model.max_model_len)
        cache = PrefixCache(
            layout,
            max(capacity_bytes // layout.page_bytes, longest),
            secrets.randbits(64),
            endpoints.events.add,
        )
        self.engine = SyntheticEngine(
            instance.name,
            deployment.engine,
            pace=Pace(cluster.profile, cluster.speedup),
            cache=cache,
            endpoints=endpoints,
            vocabulary=text.vocabulary,
        )
        model = deployment.model
        self._server = EngineServer(
            self.engine,
            ServedModels(model.served_name, tuple(model.adapters), model.max_model_len),
            text,
            on_death=self._kill,
            stream_interval=stream_interval_of((*deployment.engine.extra_args, *cluster.extra_args)),
        )
        self._dying: asyncio.Task[None] | None = None
        self.gone = asyncio.Event()

    def listen(self) -> None:
        """Open the KV port. Raises OSError when it is taken."""
        self.engine.endpoints.receiver.start()

    async def serve(self) -> None:
        """Connect to the peers and answer HTTP. Raises OSError when the port is taken."""
        self.engine.endpoints.connect()
        tls = self._tls if self.instance.tls else None
        await self._server.start(self.instance.host, self.instance.http_port, tls)
        logger.info(
            "%s: %s at %s: a stand-in, no model runs here", self.instance.name, VERSION, self.instance.url
        )

    async def end(self, within_s: float) -> None:
        """Take no new requests, and close when those that run have ended, or their time is over."""
        self._server.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.engine.counts.running + self.engine.counts.waiting:
                    await asyncio.sleep(_END_POLL_S)
        await self.close()

    async def close(self) -> None:
        """Close every port and end every thread; idempotent."""
        if self.gone.is_set():
            return
        await self._server.close()
        await self.engine.close()
        self.gone.set()

    def _kill(self) -> None:
        async def die() -> None:
            logger.warning("%s: dies on request", self.instance.name)
            # KV first: requests that end say so to the consumers of their transfers, which a dead engine can't.
            await self.engine.endpoints.close()
            self._server.cut()
            await self.close()

        self._dying = asyncio.create_task(die(), name=f"synthetic-death-{self.instance.name}")


def _sent_model(deployment: Deployment) -> KvModel:
    """What stand-ins send each other: with the copies that as many ranks keep.

    Raises:
        EngineError: they have unlike sizes, which a stand-in can't map, or ones that no heads can be divided among.
    """
    ranks = {instance.tensor_parallel for instance in deployment.instances if instance.is_stand_in}
    if len(ranks) > 1:
        raise EngineError("stand-ins map no KVCache; give all of them the same tensor_parallel")
    clusters = {instance.cluster for instance in deployment.instances if instance.is_stand_in}
    kept = [counted_model(deployment, deployment.cluster(name)) for name in sorted(clusters)]
    try:
        # What one side lacks, an unlike drafter's, none of them sends.
        return min(
            (model_on_wire(one, other, *ranks) for one in kept for other in kept), key=KvModel.compared_bytes
        )
    except ValueError as error:
        raise EngineError(f"{error}; give another tensor_parallel") from None


def stream_interval_of(arguments: Sequence[str]) -> int:
    """vLLM's `--stream-interval`, the only one of its options that stand-ins take; 1 if it is not among `arguments`.

    Raises:
        EngineError: it is no whole number from 1 on.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--stream-interval", type=int, default=1)
    try:
        tokens: int = parser.parse_known_args(arguments)[0].stream_interval
    except argparse.ArgumentError as error:
        raise EngineError(f"extra_args: {error}") from None
    if tokens < 1:
        raise EngineError(f"extra_args: --stream-interval must be 1 or more, not {tokens}")
    return tokens


async def run_nodes(deployment: Deployment, names: Sequence[str], key: bytes) -> None:
    """Run instances until SIGTERM or SIGINT, or until each was ended by /synthetic/die.

    After a signal what runs may go on for `engine.shutdown_timeout_s`, as with vLLM.

    Raises:
        EngineError: one can't be stood in for, or a port is taken.
    """
    text = Text(deployment.model.path)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    nodes: list[SyntheticNode] = []
    name = ""
    try:
        for name in names:
            nodes.append(SyntheticNode(deployment, deployment.instance(name), key, text))
            nodes[-1].listen()
        # Only now: at this point all engines of this process listen.
        for node in nodes:
            name = node.instance.name
            await node.serve()
        waits = [asyncio.create_task(node.gone.wait()) for node in nodes]
        stop = asyncio.create_task(stopping.wait())
        all_gone = asyncio.gather(*waits)
        await asyncio.wait((stop, all_gone), return_when=asyncio.FIRST_COMPLETED)
        for task in (*waits, stop):
            task.cancel()
        await asyncio.gather(all_gone, stop, return_exceptions=True)
        await asyncio.gather(*(node.end(deployment.engine.shutdown_timeout_s) for node in nodes))
    except OSError as error:
        raise EngineError(f"{name} can't start: {error}") from error
    finally:
        await asyncio.gather(*(node.close() for node in nodes))
