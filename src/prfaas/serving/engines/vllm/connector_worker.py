"""The connector inside a worker: a receiver with its staging, a sender, and the producer and consumer of KV."""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable

import torch

from prfaas.core.kv.rank_shares import RankGrid
from prfaas.core.pool.geometry import PoolGeometry, PoolGeometryError
from prfaas.core.prefix.hashing import seed_of
from prfaas.serving.engines.event_relay import EventRelay
from prfaas.serving.engines.vllm.consumer import KvConsumer
from prfaas.serving.engines.vllm.fingerprint import pool_fingerprint
from prfaas.serving.engines.vllm.layout import KvLayout
from prfaas.serving.engines.vllm.metadata import StepReports, TransferMetadata
from prfaas.serving.engines.vllm.pool_reader import PoolReader
from prfaas.serving.engines.vllm.pool_writer import PoolWriter
from prfaas.serving.engines.vllm.producer import KvProducer
from prfaas.serving.engines.vllm.rank_kv import RankKv
from prfaas.serving.engines.vllm.rank_pages import RankPages, pool_geometry
from prfaas.serving.engines.vllm.settings import ConnectorSettings
from prfaas.serving.engines.vllm.sibling_ranks import page_locked
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.engines.vllm.wire_layout import WireLayout, wire_layouts
from prfaas.serving.pool.client import PoolClient
from prfaas.serving.transport.io.endpoint import KvEndpoint
from prfaas.serving.transport.io.peer_layouts import PeerLayouts
from prfaas.serving.transport.io.receiver import Receiver
from prfaas.serving.transport.io.sibling_staging import SiblingStaging
from prfaas.serving.transport.io.staging_memory import StagingArena, mapped_memory, shared_memory
from prfaas.serving.transport.protocol.options import ReceiverOptions, SenderOptions
from prfaas.serving.transport.protocol.peer_list import ranked
from prfaas.serving.transport.protocol.requests import refuse_request

logger = logging.getLogger(__name__)


class _Joined:
    """Requests for which several things must end before vLLM hears of it."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._failed: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """True if anything is still to end."""
        return bool(self._open)

    def expect(self, request_ids: Iterable[str]) -> None:
        """One more thing must end for each of these."""
        # Not Counter.update: of a mapping, it would add the values.
        for request_id in request_ids:
            self._open[request_id] += 1

    def end(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> tuple[set[str], set[str]]:
        """End one thing of each; returns the requests that are now complete, and those of them that failed."""
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


class PoolWorker:
    """A rank's session with the daemon, what it reads from the pool, and what it writes into it."""

    def __init__(
        self,
        layout: KvLayout,
        geometry: PoolGeometry,
        rank: int,
        client: PoolClient,
        load_wait_s: float,
        stats: ConnectorStats,
    ) -> None:
        """
        Args:
            layout: of this rank's KV.
            geometry: of the pool.
            rank: the tensor-parallel rank.
            client: a session of the kind "worker", which ends with this.
            load_wait_s: a load waits that long at most for pages that come from the SSD.
            stats: where both count.
        """
        pages = RankPages(layout, geometry, rank)
        self._client = client
        self.reader = PoolReader(pages, client, load_wait_s, stats)
        self.writer = PoolWriter(pages, client, stats)

    @classmethod
    def connect(
        cls,
        settings: ConnectorSettings,
        layout: KvLayout,
        geometry: PoolGeometry,
        rank: int,
        stats: ConnectorStats,
    ) -> "PoolWorker":
        """Open the session; a daemon that is not there yet is looked for in the background."""
        assert settings.pool_socket is not None, "an engine without a pool has none to connect to"
        timeout_s = settings.pool.timeout_s
        client = PoolClient(settings.pool_socket, "worker", geometry, rank, timeout_s, settings.name)
        client.connect()
        logger.info("pages of the pool, bytes on a rank by KV group: %s", geometry.groups)
        return cls(layout, geometry, rank, client, settings.transfer.load_wait_s, stats)

    def close(self) -> None:
        """End every thread and the session."""
        self.reader.close()
        self.writer.close()
        self._client.close()


class ConnectorWorker:
    """Everything that a worker process runs for transfers and the pool; rank r listens at `kv_port + r`.

    Ranks are numbered through all stages of a pipeline.
    """

    def __init__(
        self,
        endpoint: KvEndpoint,
        events: EventRelay | None,
        producer: KvProducer,
        consumer: KvConsumer,
        pool: PoolWorker | None,
        siblings: SiblingStaging | None = None,
    ) -> None:
        """`events`: None on all ranks but the first. `pool`: None where the machine has none for this engine.
        `siblings`: None where ranks share no staging."""
        self._endpoint = endpoint
        self._events = events
        self.producer = producer
        self.consumer = consumer
        self.pool = pool
        self._siblings = siblings
        self._loads = _Joined()
        self._sends = _Joined()
        self._lost_loads: set[str] = set()
        self._load_ended = threading.Event()

    @classmethod
    def start(cls, settings: ConnectorSettings, key: bytes, kv: RankKv, rank: int) -> "ConnectorWorker":
        """Open the KV port, connect to the peers, pre-fault the staging arena.

        Args:
            settings: this instance's part of the deployment.
            key: of the deployment, 32 bytes.
            kv: what this rank keeps.
            rank: the tensor-parallel rank of this worker, in its stage.

        Raises:
            TlsFileError: this instance's certificate can't be used.
            OSError: the KV port is taken.
        """
        digests, number = settings.transfer.page_digests, kv.stage.number * kv.ranks + rank
        wires = wire_layouts(kv.layout, settings.name, number, kv.ranks, page_digests=digests, stage=kv.stage)
        logger.info("KV layout of %s: %s; pages: %s", settings.name, kv.marks, wires.reported)
        memory_fd, arena = _staging(settings, kv)
        options = ReceiverOptions(limits=settings.transfer, uncounted_regions=int(digests))
        events = None
        if number == 0 and settings.events is not None:
            events = EventRelay(settings.name, settings.events, seed_of(key))
        endpoint = KvEndpoint.of(
            name=ranked(settings.name, number),
            key=key,
            host=settings.kv_host,
            port=settings.kv_port + number,
            fingerprint=kv.marks,
            tls=settings.tls,
            peer_list=settings.peer_list(number, RankGrid(kv.ranks, kv.stage.count)),
            arena=arena,
            layout=wires,
            sender_options=SenderOptions(limits=settings.transfer),
            receiver_options=options,
            on_request=refuse_request if events is None else events.take,
            more_stats=kv.told.copy,
        )
        receiver, sender = endpoint.receiver, endpoint.sender
        siblings = None if memory_fd is None else _siblings(kv, arena, memory_fd, receiver, options, wires)
        receiver.start()
        sender.start()
        if events is not None:
            events.start()
        stats = ConnectorStats()
        geometry = _pool_geometry(settings, kv)
        pool = None if geometry is None else PoolWorker.connect(settings, kv.layout, geometry, rank, stats)
        worker = cls(
            endpoint,
            events,
            KvProducer(kv.layout, wires, sender, settings.transfer.lease_s, stats),
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
        """Reports on the loads that have ended since the last call, and on present sends."""
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
        self._endpoint.sender.close()
        self._endpoint.receiver.close()
        if self._events is not None:
            self._events.close()


def _pool_geometry(settings: ConnectorSettings, kv: RankKv) -> PoolGeometry | None:
    """The pages of this engine's pool; None where it has none, of which the log tells the reason."""
    if settings.pool_socket is None:
        return None
    if kv.stage.count > 1:
        logger.warning("%s uses no pool: its stages have other layers each", settings.name)
        return None
    try:
        return pool_geometry(kv.layout, pool_fingerprint(kv.marks, kv.layout, kv.ranks), kv.ranks)
    except PoolGeometryError as error:
        logger.warning("%s uses no pool: %s", settings.name, error)
        return None


def _staging(settings: ConnectorSettings, kv: RankKv) -> tuple[int | None, StagingArena]:
    """The memory for what arrives, and the descriptor by which sibling ranks map it; None: it is not shared."""
    nbytes = settings.staging_bytes
    memory_fd, buffer = shared_memory(nbytes) if kv.sockets else (None, None)
    if kv.on_device:
        buffer = _pinned(nbytes) if buffer is None else page_locked(buffer)
    return memory_fd, StagingArena(nbytes, settings.transfer_block_bytes, buffer)


def _siblings(
    kv: RankKv,
    arena: StagingArena,
    memory_fd: int,
    receiver: Receiver,
    options: ReceiverOptions,
    wires: PeerLayouts[WireLayout],
) -> SiblingStaging:
    """The staging that sibling ranks share; each transfer that they read is lent to them as it begins."""
    map_memory = _mapped_and_locked if kv.on_device else mapped_memory
    siblings = SiblingStaging(arena, memory_fd, receiver, kv.sockets, options, map_memory=map_memory)
    lend = siblings.begin
    wires.on_begin = lambda transfer_id, wire: lend(transfer_id, wire.readers)
    return siblings


def _mapped_and_locked(fd: int, nbytes: int) -> memoryview:
    return page_locked(mapped_memory(fd, nbytes))


def _pinned(nbytes: int) -> memoryview:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
