"""The plugin that unmodified vLLM loads: `kv_connector_module_path: prfaas.serving.engines.vllm.connector`."""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats, PromMetric, PromMetricT
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from prfaas.serving.descriptors import raise_descriptor_limit
from prfaas.serving.engines.vllm.connector_scheduler import ConnectorScheduler
from prfaas.serving.engines.vllm.connector_worker import ConnectorWorker
from prfaas.serving.engines.vllm.layout import read_groups
from prfaas.serving.engines.vllm.metadata import NixlRead, TransferMetadata
from prfaas.serving.engines.vllm.pool_scheduler import PoolScheduler
from prfaas.serving.engines.vllm.rank_kv import RankKv
from prfaas.serving.engines.vllm.settings import ConnectorSettings, SettingsError
from prfaas.serving.engines.vllm.stats import ConnectorPromMetrics, ConnectorStats
from prfaas.serving.logs import LogSettings, set_up_logging
from prfaas.serving.secret_files import load_key
from prfaas.serving.transport.protocol.wire import TransferPhase

if TYPE_CHECKING:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# While transfers are open and nothing is to be computed, vLLM steps a thousand times a second, which takes half of a
# core from those that compute, where these are CPUs. So there such a step waits for a load to end; a new request comes
# later by half of it.
_IDLE_STEP_S = 0.01

NIXL_KV_LAYOUT = "LBHNC"
"""vLLM 0.32's `NixlBaseConnector.get_required_kvcache_layout`; layer, block, head, token, content."""

COMPLETED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def _answer_on_error(answer: T) -> Callable[[Callable[P, R]], Callable[P, R | T]]:
    """Log an exception of a callback and return `answer` in its place."""

    def guard(callback: Callable[P, R]) -> Callable[P, R | T]:
        @functools.wraps(callback)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | T:
            try:
                return callback(*args, **kwargs)
            except Exception:
                logger.exception(
                    "the KV connector failed in a callback; the request falls back to a local prefill"
                )
                return answer

        return guarded

    return guard


def _check_parallelism(vllm_config: VllmConfig) -> None:
    """See that each rank has all tokens of its heads and layers, in one batch. Raises SettingsError."""
    parallel = vllm_config.parallel_config
    sizes = {
        "decode-context-parallel-size": parallel.decode_context_parallel_size,
        "prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    for option, size in sizes.items():
        if size > 1:
            raise SettingsError(f"KVCache is not moved with --{option} {size}; start the engine with 1")
    if parallel.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
        raise SettingsError(
            "KVCache of stages is not moved with --speculative-config; start the engine without"
        )
    if parallel.use_ubatching:
        # A layer's hook comes for the first half of the batch, before the other one is computed.
        raise SettingsError(
            "KVCache is not moved with --enable-dbo or --ubatch-size; start the engine without"
        )


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV between engines by ticket; every engine can produce and consume (`kv_both`).

    vLLM ends the server on any exception in a callback, so each one is caught here, logged, and answered
    with what costs a local prefill at most.

    The way of KV to the wire: `wait_for_layer_load` or `save_kv_layer`, at the latest `wait_for_save` →
    `KvProducer._queue_layer` → the peer's queue → `SenderConnection._send_chunk`. From the wire:
    `ReceiverConnection._receive_chunk` → staging → `get_transfer_results` → `KvConsumer._load` → the blocks that vLLM
    gave the request.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # vLLM has no handler for our loggers, and would write warnings bare and nothing below them.
        set_up_logging(LogSettings.of_environment())
        logger.info("file descriptors: %d at most", raise_descriptor_limit())
        self.settings = ConnectorSettings.parse(self._kv_transfer_config.kv_connector_extra_config)
        _check_parallelism(vllm_config)
        self._key = load_key(self.settings.key_file)
        self._groups = read_groups(kv_cache_config)
        self._scheduling: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._writing_first: frozenset[str] = frozenset()
        if role is KVConnectorRole.SCHEDULER:
            pool = PoolScheduler.of_engine(self.settings, kv_cache_config, self._groups)
            ranks = vllm_config.parallel_config.world_size
            self._scheduling = ConnectorScheduler(
                self.settings.name, self._key, self._groups, pool, ranks=ranks
            )

    # ---- engine properties

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A transfer brings the linear state, so the engine may keep a longer full-attention hit."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Where engines of the deployment have NIXL, the layout that NIXL asks for: all engines' blocks are alike."""
        config = vllm_config.kv_transfer_config
        is_beside = config is not None and config.get_from_extra_config("nixl_beside", False)
        if not is_beside or vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return NIXL_KV_LAYOUT

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """False: transfers read and write the blocks where they lay when the engine started (asked by vLLM 0.33)."""
        return False

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """All groups are loaded; zeroing one of their pages would race with the load."""
        return tuple(group.index for group in self._groups)

    # ---- scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        pool = self._scheduler().pool
        if pool is not None:
            pool.reconciled_hit = lambda request: kv_cache_manager.get_computed_blocks(request)[1]

    @_answer_on_error(None)
    def on_new_request(self, request: "Request") -> None:
        self._scheduler().on_new_request(request)

    @_answer_on_error((0, False))
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduler().num_external_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        # Errors are not caught: vLLM would wait forever for a load that was never ordered.
        self._scheduler().update_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._step_orders(scheduler_output) or TransferMetadata()

    @_answer_on_error(None)
    def _step_orders(self, scheduler_output: SchedulerOutput) -> TransferMetadata:
        return self._scheduler().build_metadata(scheduler_output)

    @_answer_on_error(None)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        scheduler = self._scheduler()
        scheduler.update(connector_output)
        if scheduler.pool is not None:
            scheduler.pool.update(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_answer_on_error((False, None))
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler().request_finished(request, aborted=request.status not in COMPLETED), None

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # vLLM's attention on CPUs uses AMX and asks no leave for it (0.32). Only a large product of oneDNN does, and
        # behind KV that was loaded the first step may be one token: an illegal instruction ended the engine.
        if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        self._writing_first = _writing_first(self._vllm_config)
        rank = get_tensor_model_parallel_rank()
        kv = RankKv.of_engine(self.settings, self._vllm_config, self._kv_cache_config, kv_caches, rank)
        self._worker = ConnectorWorker.start(self.settings, self._key, kv, rank)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        orders = _orders(kv_connector_metadata)
        self._of_worker(lambda worker: worker.settle(orders))
        self._of_worker(lambda worker: worker.producer.detach(orders.preempted))

    @_answer_on_error(None)
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._ready_worker().order_loads(_orders(self._get_connector_metadata()))

    @_answer_on_error(None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer's attention. Loads are asynchronous: a request is scheduled after its load has ended.

        But most layers have written what this step adds to their KV by now, so it leaves while they attend to it.
        """
        sends = _orders(self._get_connector_metadata()).sends
        if sends and layer_name in self._writing_first:
            self._ready_worker().producer.save_layer(sends, layer_name)

    @_answer_on_error(None)
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        sends = _orders(self._get_connector_metadata()).sends
        if sends:
            self._ready_worker().producer.save_layer(sends, layer_name)

    def wait_for_save(self) -> None:
        orders = _orders(self._get_connector_metadata())
        self._of_worker(lambda worker: worker.producer.end_step(orders.sends))
        self._of_worker(lambda worker: worker.store(orders))
        self._of_worker(lambda worker: worker.hold(orders))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, (ended, failed) = self._ended()
        if not (sent or ended) and self._is_idle():
            self._of_worker(lambda worker: worker.rest(_IDLE_STEP_S))
            sent, (ended, failed) = self._ended()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=ended, failed_recving=failed
        )

    def _tell_pulled(self, pull: NixlRead, phase: TransferPhase) -> None:
        """Tell the gateway how far KV is that another connector of this engine loads."""
        self._of_worker(lambda worker: worker.consumer.tell_pulled(pull, phase))

    def _is_idle(self) -> bool:
        """Whether nothing is computed in this step, on cores that other engines may compute on.

        Not so for a rank of a data-parallel group: the others would wait for it.
        """
        is_alone = self._vllm_config.parallel_config.data_parallel_size == 1
        is_told = current_platform.is_cpu() and is_alone and self.has_connector_metadata()
        return is_told and _orders(self._get_connector_metadata()).is_idle

    def _ended(self) -> tuple[set[str], tuple[set[str], set[str]]]:
        sent, loaded = self._of_worker(ConnectorWorker.finished), self._of_worker(ConnectorWorker.loaded)
        return sent or set(), loaded or (set(), set())

    @_answer_on_error(None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._ready_worker().take_reports()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is not None:
            return self._worker.take_stats()
        pool = self._scheduling.pool if self._scheduling is not None else None
        return pool.take_stats() if pool is not None else None

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        if self._scheduling is not None and self._scheduling.pool is not None:
            self._scheduling.pool.close()

    # ---- statistics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ConnectorStats(data=data) if data is not None else ConnectorStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _scheduler(self) -> ConnectorScheduler:
        if self._scheduling is None:
            raise RuntimeError("a scheduler callback came to the worker's connector")
        return self._scheduling

    @_answer_on_error(None)
    def _of_worker(self, call: Callable[[ConnectorWorker], T]) -> T:
        """One part of a callback, with its own guard: a failure of it must not keep the others from being done."""
        return call(self._ready_worker())

    def _ready_worker(self) -> ConnectorWorker:
        if self._worker is None:
            raise RuntimeError("a worker callback came before register_kv_caches")
        return self._worker


def _writing_first(vllm_config: VllmConfig) -> frozenset[str]:
    """Layers that write their KV before they attend to it (read in 0.32: `forward` of both classes)."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    layers = vllm_config.compilation_config.static_forward_context
    return frozenset(
        name
        for name, layer in layers.items()
        if (isinstance(layer, Attention) and not layer.attn_backend.forward_includes_kv_cache_update)
        or (isinstance(layer, MLAAttention) and layer.hisparse_cache is None)
    )


def _orders(metadata: KVConnectorMetadata) -> TransferMetadata:
    if not isinstance(metadata, TransferMetadata):
        raise TypeError(f"metadata of another connector: {type(metadata).__name__}")
    return metadata
