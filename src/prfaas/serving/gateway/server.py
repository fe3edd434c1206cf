"""Puts a deployment's gateway together and serves it.

aiohttp towards the clients, a pool of our own on httptools towards the engines (http_pool.py), uvloop below: measured
side by side by bench/gateway.py; an ASGI stack with a second HTTP library costs several times as much.

The parts of one gateway, put together for a deployment.
"""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from prfaas.core.deployment import Deployment, Instance
from prfaas.core.kv import ConfigError, KvModel, model_from_directory
from prfaas.serving.gateway.control_plane import ControlPlane
from prfaas.serving.gateway.decode import Decoding
from prfaas.serving.gateway.decode_hop import DecodeHop
from prfaas.serving.gateway.engine_client import EngineCallError, EngineClient
from prfaas.serving.gateway.kv_transfers import KvTransfers
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.options import GatewayOptions, ThreadOffload
from prfaas.serving.gateway.orchestrator import PrefillOrchestrator
from prfaas.serving.gateway.prefill_hop import PrefillHops, TransferBound
from prfaas.serving.gateway.request_log import RequestLog
from prfaas.serving.gateway.routes import Inspection, Service, Tenants
from prfaas.serving.gateway.stream_resume import StreamResume
from prfaas.serving.gateway.tokenization import LocalTokenizer, Tokenization
from prfaas.serving.gateway.transcript import AnswerText
from prfaas.serving.transport.observer import Observer
from prfaas.serving.transport.ticket import load_key

logger = logging.getLogger(__name__)

OBSERVER_NAME = "gateway"
_INTRODUCTION_RETRY_S = 2.0


class Gateway:
    """Everything behind the HTTP routes of one deployment. Made inside a running event loop."""

    def __init__(
        self,
        deployment: Deployment,
        plane: ControlPlane,
        options: GatewayOptions,
        registry: CollectorRegistry,
    ) -> None:
        """Raises KeyFileError when the deployment's key cannot be read."""
        key = load_key(deployment.security.key_file)
        model = deployment.model
        kv_model = _kv_model(deployment)
        metrics = Metrics(registry)
        bound = TransferBound(deployment, kv_model, options)
        # Whom to ask first: an engine without the role may be busy with prefills.
        can_decode = (i for i in deployment.instances if deployment.can_decode(i))
        self._decoders = sorted(can_decode, key=lambda i: not i.has_role("decode"))
        self._json_threads = ThreadOffload(1, options.inline_json_bytes)
        self._tokenizer_threads = ThreadOffload(options.tokenizer_threads, options.inline_text_chars)
        self._client = EngineClient(options)
        self._transfers = _transfers(deployment.instances, key)
        local = LocalTokenizer.of_model(model.path, self._tokenizer_threads)
        self._tokenizing = Tokenization(local, self._client, model.served_name, options)
        self._hops = PrefillHops(
            key,
            plane=plane,
            client=self._client,
            transfers=self._transfers,
            bound=bound,
            metrics=metrics,
            thread_offload=self._json_threads,
            options=options,
        )
        driver = PrefillOrchestrator(
            model.max_model_len,
            plane=plane,
            hops=self._hops,
            bound=bound,
            tokenizing=self._tokenizing,
            metrics=metrics,
            thread_offload=self._json_threads,
        )
        hop = DecodeHop(
            plane=plane,
            driver=driver,
            client=self._client,
            metrics=metrics,
            thread_offload=self._json_threads,
        )
        continuing = StreamResume(
            model.max_model_len,
            driver=driver,
            hop=hop,
            answer_text=AnswerText(model.path),
            metrics=metrics,
            options=options,
        )
        records = RequestLog(options.kept_records)
        self.service = Service(
            model,
            plane=plane,
            driver=driver,
            decoding=Decoding(
                driver=driver, hop=hop, continuing=continuing, metrics=metrics, options=options
            ),
            tenants=Tenants(key, deployment.security.tenant_header),
            records=records,
            inspection=Inspection(deployment, kv_model, plane, records),
            metrics=metrics,
            thread_offload=self._json_threads,
            options=options,
        )

    async def introduce(self) -> None:
        """Ask a decode engine how it makes token ids, as soon as one answers; then idle."""
        while True:
            for decode in self._decoders:
                if await self._introduced(decode):
                    await asyncio.Event().wait()
            await asyncio.sleep(_INTRODUCTION_RETRY_S)

    async def _introduced(self, decode: Instance) -> bool:
        try:
            await self._tokenizing.check(decode)
        except EngineCallError as error:
            logger.info("waiting for a decode engine: %s", error)
            return False
        return True

    async def close(self) -> None:
        await self._hops.close()
        await self._transfers.close()
        await self._client.close()
        self._json_threads.close()
        self._tokenizer_threads.close()


def _transfers(instances: tuple[Instance, ...], key: bytes) -> KvTransfers:
    """One watcher per instance and rank: any may be sent to. They connect when they are first used."""
    return KvTransfers(
        {
            instance.name: tuple(
                Observer(
                    name=OBSERVER_NAME,
                    key=key,
                    host=instance.host,
                    port=port,
                    peer_name=f"{instance.name}/{rank}",
                )
                for rank, port in enumerate(instance.kv_ports)
            )
            for instance in instances
        }
    )


def _kv_model(deployment: Deployment) -> KvModel | None:
    try:
        return model_from_directory(deployment.model.path, name=deployment.model.served_name)
    except ConfigError as error:
        logger.warning("the KV cache's shape is unknown, so its size is not bounded: %s", error)
        return None


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
