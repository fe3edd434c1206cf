"""The parts of one gateway, put together for a deployment."""

import asyncio
import hashlib
import logging
import math

from prfaas.deployment import Deployment, Instance
from prfaas.gateway.driver import Driver, DriverSettings
from prfaas.gateway.engine_client import EngineClient, EngineError
from prfaas.gateway.health import HealthWatch
from prfaas.gateway.instances import InstancePool
from prfaas.gateway.local_tokenizer import LocalTokenizer
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.offloop import OffLoop
from prfaas.gateway.options import GatewayOptions
from prfaas.gateway.prefixes import Prefixes
from prfaas.gateway.service import Service
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

    def __init__(self, deployment: Deployment, options: GatewayOptions) -> None:
        """Raises KeyFileError when the deployment's key cannot be read."""
        key = load_key(deployment.security.key_file)
        model = deployment.model
        kv_model = _kv_model(deployment)
        # Without knowing the layers, assume those that limit what may be reused.
        is_hybrid = kv_model is None or kv_model.is_hybrid
        self.metrics = Metrics()
        self.json_threads = OffLoop(1, options.inline_json_bytes)
        self.tokenizer_threads = OffLoop(options.tokenizer_threads, options.inline_text_chars)
        self.client = EngineClient(options)
        self.pool = InstancePool(
            deployment.instances,
            frozenset((link.source, link.target) for link in deployment.links),
            is_hybrid=is_hybrid,
            can_skip=kv_model is not None and not kv_model.has_window,
        )
        self.prefixes = Prefixes(self.client, options, seed=_seed(key))
        self.health = HealthWatch(self.pool, self.client, self.prefixes, self.metrics, options)
        self.transfers = _transfers(deployment.with_role("decode"), key)
        local = LocalTokenizer.of_model(model.path, self.tokenizer_threads)
        self.tokenizing = Tokenizing(local, self.client, model.served_name, options)
        self.decoders = deployment.with_role("decode")
        self.driver = Driver(
            DriverSettings(model.served_name, model.max_model_len, _threshold_tokens(deployment), key),
            pool=self.pool,
            client=self.client,
            transfers=self.transfers,
            bound=TransferBound(deployment, kv_model, options),
            tokenizing=self.tokenizing,
            prefixes=self.prefixes,
            health=self.health,
            metrics=self.metrics,
            offloop=self.json_threads,
            options=options,
        )
        self.service = Service(
            model=model.served_name,
            max_model_len=model.max_model_len,
            driver=self.driver,
            client=self.client,
            pool=self.pool,
            health=self.health,
            metrics=self.metrics,
            offloop=self.json_threads,
            options=options,
        )

    async def introduce(self) -> None:
        """Ask a decode engine what is needed of it, as soon as one answers; then idle."""
        while True:
            for decode in self.decoders:
                if await self._introduced(decode):
                    await asyncio.Event().wait()
            await asyncio.sleep(_INTRODUCTION_RETRY_S)

    async def _introduced(self, decode: Instance) -> bool:
        try:
            await self.prefixes.learn(decode)
            await self.tokenizing.check(decode)
        except EngineError as error:
            logger.info("waiting for a decode engine: %s", error)
            return False
        return True

    async def close(self) -> None:
        await self.driver.close()
        await self.transfers.close()
        await self.client.close()
        self.json_threads.close()
        self.tokenizer_threads.close()


def _transfers(decoders: tuple[Instance, ...], key: bytes) -> Transfers:
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
            for instance in decoders
        }
    )


def _kv_model(deployment: Deployment) -> KvModel | None:
    try:
        return model_from_directory(deployment.model.path, name=deployment.model.served_name)
    except ConfigError as error:
        logger.warning("the KV cache's shape is unknown, so it is taken for a hybrid one: %s", error)
        return None


def _threshold_tokens(deployment: Deployment) -> float:
    return {"local": math.inf, "offload": 0.0}.get(
        deployment.routing.policy, deployment.routing.threshold_tokens
    )


def _seed(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"prfaas-prefix").digest(), "little")
