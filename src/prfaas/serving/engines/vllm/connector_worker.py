"""The connector inside a worker: a receiver with its staging, a sender, and the producer and consumer of KV."""

import logging
from collections.abc import Mapping, Sequence

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import KVCacheConfig

from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.layout import KvLayout, fingerprint
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.settings import ConnectorSettings
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.transport.options import Peer, ReceiverOptions, SenderOptions
from prfaas.serving.transport.receiver import Receiver
from prfaas.serving.transport.sender import Sender
from prfaas.serving.transport.staging import StagingArena

logger = logging.getLogger(__name__)


def ranked(name: str, rank: int) -> str:
    """The name of one tensor-parallel rank of an instance on the wire."""
    return f"{name}/{rank}"


class ConnectorWorker:
    """Everything that a worker process runs for transfers; rank r listens at `kv_port + r`."""

    def __init__(
        self, receiver: Receiver, sender: Sender, producer: KvProducer, consumer: KvConsumer
    ) -> None:
        self._receiver = receiver
        self._sender = sender
        self.producer = producer
        self.consumer = consumer

    @classmethod
    def start(
        cls,
        settings: ConnectorSettings,
        key: bytes,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        rank: int,
    ) -> "ConnectorWorker":
        """Open the KV port, connect to the peers, pre-fault the staging arena.

        Args:
            settings: this instance's part of the deployment.
            key: of the deployment, 32 bytes.
            vllm_config: for the fingerprint.
            kv_cache_config: the engine's KV cache groups.
            kv_caches: the KV tensor or tensors of every layer, by the layer's name.
            rank: the tensor-parallel rank of this worker.

        Raises:
            TlsFileError: this instance's certificate can't be used.
            LayoutError: a group or tensor that can't be moved as pages.
            OSError: the KV port is taken.
        """
        layout = KvLayout.of_engine(kv_cache_config, kv_caches, _built_order(vllm_config))
        digests = settings.page_digests
        marks = fingerprint(layout, vllm_config, get_conv_state_layout(), page_digests=digests)
        digest_plan = layout.digest_plan(rank) if digests else None
        logger.info("KV layout of %s: %s", settings.name, marks)
        on_device = any(tensor.device.type == "cuda" for tensor in _tensors(kv_caches))
        arena = StagingArena(
            settings.staging_bytes,
            settings.transfer_block_bytes,
            _pinned(settings.staging_bytes) if on_device else None,
        )
        peers = {
            ranked(name, rank): Peer(
                name=ranked(name, rank),
                host=peer.host,
                port=peer.kv_port + rank,
                link=peer.link,
                connections=peer.connections,
                bandwidth_bits_per_s=peer.bandwidth_bits_per_s,
                on_demand=peer.on_demand,
                encrypted=peer.encrypted,
                compressed=peer.compressed,
                share_bits_per_s=peer.share_bits_per_s,
            )
            for name, peer in settings.peers.items()
        }
        tls = settings.tls
        sender = Sender(
            name=ranked(settings.name, rank),
            key=key,
            peers=peers,
            fingerprint=marks,
            options=SenderOptions(
                silence_s=settings.silence_s,
                resume_s=settings.resume_s,
                progress_deadline_s=settings.progress_deadline_s,
                user_timeout_s=settings.user_timeout_s,
                keepalive_s=settings.keepalive_s,
                checksums=settings.checksums,
                # The other side may let a transfer wait for staging; its answer comes after that.
                accept_deadline_s=settings.staging_wait_s + 10.0,
            ),
            tls=tls,
        )
        receiver = Receiver(
            name=ranked(settings.name, rank),
            key=key,
            host=settings.kv_host,
            port=settings.kv_port + rank,
            arena=arena,
            layout=digest_plan or layout,
            fingerprint=marks,
            producers=[ranked(name, rank) for name in settings.producers],
            options=ReceiverOptions(
                staging_wait_s=settings.staging_wait_s,
                ttl_s=settings.staging_ttl_s,
                silence_s=settings.silence_s,
                resume_s=settings.resume_s,
                progress_deadline_s=settings.progress_deadline_s,
                uncounted_regions=int(digests),
                user_timeout_s=settings.user_timeout_s,
                keepalive_s=settings.keepalive_s,
            ),
            sender_telemetry=sender.telemetry,
            tls=tls,
            plain_peers=settings.plain_peers,
            on_probe=sender.probe,
            on_pace=sender.pace,
        )
        receiver.start()
        sender.start()
        stats = ConnectorStats()
        return cls(
            receiver,
            sender,
            KvProducer(layout, sender, settings.lease_s, stats, digest_plan),
            KvConsumer(layout, receiver, settings.load_wait_s, settings.staging_ttl_s, stats, digest_plan),
        )

    def take_stats(self) -> ConnectorStats | None:
        """Counters since the last call, None when nothing happened."""
        stats = self.producer.stats
        if stats.is_empty():
            return None
        self.producer.stats = self.consumer.stats = ConnectorStats()
        return stats

    def close(self) -> None:
        """End every thread and socket, free the staging."""
        self.consumer.close()
        self._sender.close()
        self._receiver.close()


def _built_order(vllm_config: VllmConfig) -> Sequence[str]:
    """The layers' names as the model was built; none with speculative decoding, which rewrites states after a step."""
    if vllm_config.speculative_config is not None:
        return ()
    return tuple(getattr(vllm_config.compilation_config, "static_forward_context", ()))


def _tensors(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [
        tensor
        for layer in kv_caches.values()
        for tensor in ([layer] if isinstance(layer, torch.Tensor) else layer)
    ]


def _pinned(nbytes: int) -> memoryview:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
