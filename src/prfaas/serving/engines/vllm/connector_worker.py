"""The connector inside a worker: a receiver with its staging, a sender, and the producer and consumer of KV."""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import KVCacheConfig

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.geometry import PoolGeometry, PoolGeometryError
from prfaas.serving.engines.model_identity import ModelIdentity
from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.drafter import Drafter
from prfaas.serving.engines.vllm.fingerprint import fingerprint, pool_fingerprint
from prfaas.serving.engines.vllm.layout import KvLayout, read_elements, read_packings
from prfaas.serving.engines.vllm.metadata import StepReports, TransferMetadata
from prfaas.serving.engines.vllm.pool_worker import PoolWorker
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.rank_pages import pool_geometry
from prfaas.serving.engines.vllm.settings import ConnectorSettings
from prfaas.serving.engines.vllm.sibling_ranks import (
    gather_of_ranks,
    layer_copies,
    meet_siblings,
    page_locked,
)
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import wire_layouts
from prfaas.serving.transport.endpoint import KvEndpoint
from prfaas.serving.transport.options import ReceiverOptions, SenderOptions
from prfaas.serving.transport.peer_list import ranked
from prfaas.serving.transport.receiver import Receiver
from prfaas.serving.transport.sender import Sender
from prfaas.serving.transport.sibling_staging import SiblingStaging
from prfaas.serving.transport.staging import StagingArena, mapped_memory, shared_memory

logger = logging.getLogger(__name__)


class _Joined:
    """Requests for which several things must end before vLLM hears of it."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._failed: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether anything is still to end."""
        return bool(self._open)

    def expect(self, request_ids: Iterable[str]) -> None:
        """One more thing must end for each of these."""
        # Not Counter.update: of a mapping, it would add the values.
        for request_id in request_ids:
            self._open[request_id] += 1

    def end(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> tuple[set[str], set[str]]:
        """One thing has ended for each of these; returns those of which all has, and those where something failed."""
        ended: set[str] = set()
        for request_id in request_ids:
            if request_id in failed:
                self._failed.add(request_id)
            self._open[request_id] -= 1
            if self._open[request_id] <= 0:
                del self._open[request_id]
                ended.add(request_id)
        gone = ended & self._failed
        self._failed -= gone
        return ended, gone


class ConnectorWorker:
    """Everything that a worker process runs for transfers and the pool; rank r listens at `kv_port + r`."""

    def __init__(
        self,
        receiver: Receiver,
        sender: Sender,
        producer: KvProducer,
        consumer: KvConsumer,
        pool: PoolWorker | None,
        siblings: SiblingStaging | None = None,
    ) -> None:
        """`pool`: None where the machine has none for this engine. `siblings`: None where ranks share no staging."""
        self._receiver = receiver
        self._sender = sender
        self.producer = producer
        self.consumer = consumer
        self.pool = pool
        self._siblings = siblings
        self._loads = _Joined()
        self._sends = _Joined()
        self._lost_loads: set[str] = set()
        self._load_ended = threading.Event()

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
            OSError: the KV port is taken, or a file of the model can't be read.
        """
        drafter = Drafter.of_engine(vllm_config, [name for name in _built(vllm_config) if name in kv_caches])
        copies = layer_copies(kv_cache_config, vllm_config, drafter)
        sockets = meet_siblings(rank, gather_of_ranks) if copies else {}
        layout = KvLayout.of_engine(
            kv_cache_config,
            kv_caches,
            _built_order(vllm_config),
            read_packings(vllm_config),
            read_elements(vllm_config),
            drafter,
            copies if sockets else None,
        )
        digests = settings.transfer.page_digests
        model = vllm_config.model_config
        identity = ModelIdentity.of(
            # Weights that come out of an object store: the directory has only the other files.
            model.model_weights or model.model,
            model.tokenizer,
            model.revision,
            model.tokenizer_revision,
        )
        marks = fingerprint(
            layout,
            vllm_config,
            identity,
            get_conv_state_layout(),
            page_digests=digests,
            convert_kv=settings.convert_kv,
        )
        ranks = vllm_config.parallel_config.tensor_parallel_size
        geometry = _pool_geometry(settings, layout, ranks, pool_fingerprint(marks, layout, ranks))
        wires = wire_layouts(layout, settings.name, rank, ranks, page_digests=digests)
        logger.info("KV layout of %s: %s; pages: %s", settings.name, marks, wires.reported)
        on_device = any(tensor.device.type == "cuda" for tensor in _tensors(kv_caches))
        memory_fd, buffer = shared_memory(settings.staging_bytes) if sockets else (None, None)
        if on_device:
            buffer = _pinned(settings.staging_bytes) if buffer is None else page_locked(buffer)
        arena = StagingArena(settings.staging_bytes, settings.transfer_block_bytes, buffer)
        options = ReceiverOptions(limits=settings.transfer, uncounted_regions=int(digests))
        endpoint = KvEndpoint.of(
            name=ranked(settings.name, rank),
            key=key,
            host=settings.kv_host,
            port=settings.kv_port + rank,
            fingerprint=marks,
            tls=settings.tls,
            peer_list=settings.peer_list(rank, ranks),
            arena=arena,
            layout=wires,
            sender_options=SenderOptions(limits=settings.transfer),
            receiver_options=options,
            more_stats={
                "drops_last_block": _drops_last_block(vllm_config, kv_cache_config, layout),
                "own_last_tokens": _own_last_tokens(vllm_config),
            }.copy,
        )
        receiver, sender = endpoint.receiver, endpoint.sender
        siblings = None
        if memory_fd is not None:
            siblings = SiblingStaging(
                *(arena, memory_fd, receiver, sockets, options),
                map_memory=_mapped_and_locked if on_device else mapped_memory,
            )
            lend = siblings.begin
            wires.on_begin = lambda transfer_id, wire: lend(transfer_id, wire.readers)
        receiver.start()
        sender.start()
        stats = ConnectorStats()
        pool = None if geometry is None else PoolWorker.connect(settings, layout, geometry, rank, stats)
        worker = cls(
            receiver,
            sender,
            KvProducer(layout, wires, sender, settings.transfer.lease_s, stats),
            KvConsumer(wires, receiver, settings.transfer, stats, siblings=siblings),
            pool,
            siblings,
        )
        worker.consumer.on_end = worker._load_ended.set
        if pool is not None:
            pool.reader.on_end = worker._load_ended.set
        return worker

    # What takes part of a transfer and of the pool. The step loop calls each once a step, in this order.

    def settle(self, orders: TransferMetadata) -> None:
        """Before the engine writes over blocks that this step gives to others."""
        if self.pool is not None:
            self.pool.writer.settle(orders.preempted)

    def order_loads(self, orders: TransferMetadata) -> None:
        """Begin this step's loads."""
        self._loads.expect(load.request_id for load in orders.loads)
        self._loads.expect(load.request_id for load in orders.pool_loads)
        if self.pool is not None:
            self.pool.reader.order(orders.pool_loads)
        else:
            self._lost_loads.update(load.request_id for load in orders.pool_loads)
        self.consumer.order(orders.loads, orders.drops)

    def store(self, orders: TransferMetadata) -> None:
        """Begin to copy what this step has completed into the pool."""
        if self.pool is not None:
            self.pool.writer.order(orders.pool_stores)

    def hold(self, orders: TransferMetadata) -> None:
        """Take note of finished requests whose blocks wait for us."""
        self._sends.expect(orders.held)
        self.producer.hold(orders.held)
        if self.pool is not None:
            self._sends.expect(orders.held)
            self.pool.writer.hold(orders.held)

    def finished(self) -> set[str]:
        """Held requests whose blocks vLLM may free now; each is named once."""
        done, _ = self._sends.end(self.producer.finished())
        if self.pool is not None:
            done |= self._sends.end(self.pool.writer.finished())[0]
        return done

    def loaded(self) -> tuple[set[str], set[str]]:
        """Requests all of whose loads have ended, and those of them that failed; each is named once."""
        ended, failed = self._loads.end(*self.consumer.results())
        if self.pool is not None:
            results = self.pool.reader.results()
        else:
            results, self._lost_loads = (self._lost_loads, self._lost_loads), set()
        more_ended, more_failed = self._loads.end(*results)
        return ended | more_ended, failed | more_failed

    def rest(self, longest_s: float) -> None:
        """Wait for a load to end; not at all where nothing is open, as in the step after a request's last."""
        if self._loads.is_waiting or self._sends.is_waiting:
            self._load_ended.wait(longest_s)
            self._load_ended.clear()

    def take_reports(self) -> StepReports | None:
        """What there is to tell of the loads that have ended since the last call, and of what is sent now."""
        times = self.pool.reader.take_times() if self.pool is not None else None
        usable, ready = self.consumer.take_usable(), self.producer.ready_for_checkpoints()
        if not usable and not ready:
            return times
        return StepReports(times.loads if times is not None else {}, usable, ready)

    def take_stats(self) -> ConnectorStats | None:
        """Counters since the last call, None when nothing happened."""
        stats = self.producer.stats
        if stats.is_empty():
            return None
        fresh = ConnectorStats()
        self.producer.stats = self.consumer.stats = fresh
        if self.pool is not None:
            self.pool.reader.stats = self.pool.writer.stats = fresh
        return stats

    def close(self) -> None:
        """End every thread and socket, free the staging."""
        if self.pool is not None:
            self.pool.close()
        self.consumer.close()
        if self._siblings is not None:
            self._siblings.close()
        self._sender.close()
        self._receiver.close()


def _pool_geometry(
    settings: ConnectorSettings, layout: KvLayout, ranks: int, fingerprint: str
) -> PoolGeometry | None:
    """The pages of this engine's pool; None where it has none, of which the log tells the reason."""
    if settings.pool_socket is None:
        return None
    try:
        return pool_geometry(layout, fingerprint, ranks)
    except PoolGeometryError as error:
        logger.warning("%s uses no pool: %s", settings.name, error)
        return None


def _built_order(vllm_config: VllmConfig) -> Sequence[str]:
    """The layers' names as the model was built; none with speculative decoding, which rewrites states after a step."""
    return () if vllm_config.speculative_config is not None else _built(vllm_config)


def _built(vllm_config: VllmConfig) -> Sequence[str]:
    return tuple(getattr(vllm_config.compilation_config, "static_forward_context", ()))


def _drops_last_block(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layout: KvLayout) -> bool:
    """Whether vLLM computes the last full-attention block of a prefix hit anew, for EAGLE and MTP.

    Their drafters start from hidden states, which no block has. vLLM drops it in the groups of the drafter's layers,
    and in all groups if none is marked (read in 0.32: `v1/core/kv_cache_coordinator.py`).
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle_block_drop():
        return False
    full = {region.group.index for region in layout.regions if region.group.kind is GroupKind.FULL}
    marked = {index for index, group in enumerate(kv_cache_config.kv_cache_groups) if group.is_eagle_group}
    return bool(full & marked if marked else full)


def _own_last_tokens(vllm_config: VllmConfig) -> int:
    """How many last tokens of a prompt this engine computes itself, whatever is moved to it.

    It samples from the last one. With several modules for multi-token prediction vLLM's later steps go back over the
    tokens that these look ahead by, and have hidden states only of those that it has computed: as NIXL's connector does
    (read in 0.32: `_prefill_backoff` of nixl/base_scheduler.py).
    """
    looked_ahead: int = vllm_config.num_prefill_lookahead_tokens
    return max(1, looked_ahead - 1)


def _tensors(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [
        tensor
        for layer in kv_caches.values()
        for tensor in ([layer] if isinstance(layer, torch.Tensor) else layer)
    ]


def _mapped_and_locked(fd: int, nbytes: int) -> memoryview:
    return page_locked(mapped_memory(fd, nbytes))


def _pinned(nbytes: int) -> memoryview:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
