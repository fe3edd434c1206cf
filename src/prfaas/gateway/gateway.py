"""The parts of one gateway, put together for a deployment."""

import asyncio
import logging

from prometheus_client import CollectorRegistry

from prfaas.deployment import Deployment, Instance
from prfaas.gateway.answer_text import AnswerText
from prfaas.gateway.continuing import Continuing
from prfaas.gateway.decode_hop import DecodeHop
from prfaas.gateway.decoding import Decoding
from prfaas.gateway.driver import Driver
from prfaas.gateway.engine_client import EngineClient, EngineError
from prfaas.gateway.hops import Hops
from prfaas.gateway.inspection import Inspection
from prfaas.gateway.local_tokenizer import LocalTokenizer
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.offloop import OffLoop
from prfaas.gateway.options import GatewayOptions
from prfaas.gateway.plane import ControlPlane
from prfaas.gateway.records import Records
from prfaas.gateway.service import Service
from prfaas.gateway.tenants import Tenants
from prfaas.gateway.tokenizing import Tokenizing
from prfaas.gateway.transfer_bound import TransferBound
from prfaas.gateway.transfers import Transfers
from prfaas.kvmodel import ConfigError, KvModel, model_from_directory
from prfaas.transport.keyfile import load_key
from prfaas.transport.observer import Observer

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
        self._json_threads = OffLoop(1, options.inline_json_bytes)
        self._tokenizer_threads = OffLoop(options.tokenizer_threads, options.inline_text_chars)
        self._client = EngineClient(options)
        self._transfers = _transfers(deployment.instances, key)
        local = LocalTokenizer.of_model(model.path, self._tokenizer_threads)
        self._tokenizing = Tokenizing(local, self._client, model.served_name, options)
        self._hops = Hops(
            key,
            plane=plane,
            client=self._client,
            transfers=self._transfers,
            bound=bound,
            metrics=metrics,
            offloop=self._json_threads,
            options=options,
        )
        driver = Driver(
            model.max_model_len,
            plane=plane,
            hops=self._hops,
            bound=bound,
            tokenizing=self._tokenizing,
            metrics=metrics,
            offloop=self._json_threads,
        )
        hop = DecodeHop(
            plane=plane, driver=driver, client=self._client, metrics=metrics, offloop=self._json_threads
        )
        continuing = Continuing(
            model.max_model_len,
            driver=driver,
            hop=hop,
            answer_text=AnswerText(model.path),
            metrics=metrics,
            options=options,
        )
        records = Records(options.kept_records)
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
            offloop=self._json_threads,
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
        except EngineError as error:
            logger.info("waiting for a decode engine: %s", error)
            return False
        return True

    async def close(self) -> None:
        await self._hops.close()
        await self._transfers.close()
        await self._client.close()
        self._json_threads.close()
        self._tokenizer_threads.close()


def _transfers(instances: tuple[Instance, ...], key: bytes) -> Transfers:
    """One watcher per instance and rank: any may be sent to. They connect when they are first used."""
    return Transfers(
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
