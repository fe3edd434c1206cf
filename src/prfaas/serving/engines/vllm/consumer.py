"""The connector inside a decode worker: staged KV goes into the blocks that vLLM gave the request."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.serving.engines.page_digests import DigestPlan, PageDigestError, PendingSums
from prfaas.serving.engines.vllm.layout import EngineRegion, KvLayout
from prfaas.serving.engines.vllm.metadata import LoadOrder
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.transport.receiver import Receiver
from prfaas.serving.transport.staging import StagedTransfer
from prfaas.serving.transport.wire import TransferPhase, TransferStatus

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _HeldTransfer:
    """A transfer taken out of the receiver; freed when its last use is over, or its time to live."""

    transfer: StagedTransfer
    uses_left: int
    """Requests that have not loaded it yet."""
    expires_at_s: float
    loading: int = 0
    """Loads that read it at this moment."""


@dataclass(frozen=True, slots=True)
class _RunningLoad:
    """One load in the hands of the loading thread."""

    order: LoadOrder
    held: _HeldTransfer


@dataclass(frozen=True, slots=True)
class _LoadResult:
    """What has become of a load."""

    load: _RunningLoad
    loaded_bytes: int | None
    """None: it failed."""
    digests_differ: bool = False
    """It failed since a page was not the one that the prefill engine computed."""


class KvConsumer:
    """Loads are asynchronous: one thread copies, the step loop only looks at what has become of them.

    Every ordered load is reported exactly once, as done or as failed; a failed one makes vLLM prefill the
    request locally (`kv_load_failure_policy=recompute`). A transfer can serve several requests (`n` > 1).
    """

    def __init__(
        self,
        layout: KvLayout,
        receiver: Receiver,
        load_wait_s: float,
        staging_ttl_s: float,
        stats: ConnectorStats,
        digest_plan: DigestPlan | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`digest_plan`: None where transfers come without digests of their pages."""
        self._layout = layout
        self._receiver = receiver
        self._digest_plan = digest_plan
        self._load_wait_s = load_wait_s
        self._staging_ttl_s = staging_ttl_s
        self.stats = stats
        self._now_s = now_s
        self._waiting: dict[str, tuple[LoadOrder, float]] = {}  # by request id, with the time of the order
        self._held: dict[bytes, _HeldTransfer] = {}
        self._failed_orders: set[str] = set()
        self._loads: queue.SimpleQueue[_RunningLoad | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_LoadResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_loads, name="prfaas-load", daemon=True)
        self._thread.start()

    def order(self, loads: Sequence[LoadOrder], drops: Sequence[tuple[bytes, str]]) -> None:
        """Accept this step's loads, and the transfers (id, reason) that a request here will not take."""
        for transfer_id, reason in drops:
            held = self._held.get(transfer_id)
            if held is None:
                self._receiver.drop(transfer_id, reason)
            else:
                held.uses_left -= 1
                self._release(transfer_id, held)
        for load in loads:
            self._waiting[load.request_id] = (load, self._now_s())

    def results(self) -> tuple[set[str], set[str]]:
        """What has become of the ordered loads.

        Returns:
            Requests whose load has ended, and those of them that failed; each request is named once.
        """
        for order, ordered_at_s in list(self._waiting.values()):
            self._start_if_ready(order, ordered_at_s)
        ended, failed = set(self._failed_orders), set(self._failed_orders)
        self._failed_orders.clear()
        while not self._results.empty():
            result = self._results.get()
            order, held = result.load.order, result.load.held
            held.loading -= 1
            ended.add(order.request_id)
            self.stats.add("digest_mismatches", result.digests_differ)
            if result.loaded_bytes is None:
                failed.add(order.request_id)
            else:
                self.stats.add("loads_completed")
                self.stats.add("bytes_loaded", result.loaded_bytes)
            self._release(order.ticket.transfer_id, held)
        self._expire()
        self.stats.add("loads_failed", len(failed))
        return ended, failed

    def close(self) -> None:
        """Stop the loading thread and free what is still staged."""
        self._loads.put(None)
        self._thread.join(timeout=10)
        for held in self._held.values():
            held.transfer.free()
        self._held.clear()

    def _start_if_ready(self, order: LoadOrder, ordered_at_s: float) -> None:
        """Hand a load whose transfer is complete to the loading thread, or give it up."""
        transfer_id = order.ticket.transfer_id
        held = self._held.get(transfer_id)
        if held is None or held.uses_left < 1:
            held = self._take(order)
        if held is not None:
            held.uses_left -= 1
            held.loading += 1
            self._loads.put(_RunningLoad(order, held))
        else:
            reason = _obstacle(self._receiver.state(transfer_id))
            if not reason and self._now_s() - ordered_at_s < self._load_wait_s:
                return
            if not reason:
                reason = f"KV still incomplete after {self._load_wait_s:g} s"
                self._receiver.drop(transfer_id, reason)
            logger.warning("request %s prefills locally: %s", order.request_id, reason)
            self._failed_orders.add(order.request_id)
        del self._waiting[order.request_id]

    def _take(self, order: LoadOrder) -> _HeldTransfer | None:
        ticket = order.ticket
        transfer = self._receiver.take(ticket.transfer_id)
        if transfer is None:
            return None
        held = _HeldTransfer(transfer, ticket.uses, self._now_s() + self._staging_ttl_s)
        self._held[ticket.transfer_id] = held
        return held

    def _release(self, transfer_id: bytes, held: _HeldTransfer) -> None:
        if held.uses_left <= 0 and held.loading == 0 and self._held.pop(transfer_id, None) is not None:
            held.transfer.free()

    def _expire(self) -> None:
        for transfer_id, held in list(self._held.items()):
            if self._now_s() > held.expires_at_s:
                held.uses_left = 0
                self._release(transfer_id, held)

    def _run_loads(self) -> None:
        while (load := self._loads.get()) is not None:
            try:
                result = _LoadResult(load, self._load(load.order, load.held.transfer))
            except PageDigestError as error:
                order = load.order
                logger.error(
                    "request %s prefills locally: in its KV from %s, %s",
                    *(order.request_id, order.ticket.producer, error),
                )
                result = _LoadResult(load, None, digests_differ=True)
            except Exception:
                logger.exception("loading the KV of request %s failed", load.order.request_id)
                result = _LoadResult(load, None)
            self._results.put(result)

    def _load(self, order: LoadOrder, staged: StagedTransfer) -> int:
        """KV of one request from staging into the engine's blocks; returns the bytes copied.

        The way from the wire to here: `ReceiverConnection._receive_chunk`, until the transfer is complete.
        """
        loaded_bytes = 0
        sums: list[tuple[EngineRegion, int, PendingSums]] = []
        runs = {run.group: run for run in order.runs}
        for region in self._layout.regions:
            # 1. The layer's blocks that are to be filled: those that the engine does not hold already.
            run = runs[region.group.index]
            # 2. Where the first of them lies in the region, which may begin earlier.
            skipped = region.group.first_block(order.ticket.num_tokens, order.ticket.skip_tokens)
            offset = (run.first_block - skipped) * region.page_bytes
            # 3. Page by page from staging into the engine's memory.
            for block in run.block_ids:
                if block == 0:
                    raise RuntimeError(f"layer {region.layer_name}: a block to load is vLLM's null block")
                region.pages.write(block, staged.region_views(region.index, offset, region.page_bytes))
                offset += region.page_bytes
            loaded_bytes += len(run.block_ids) * region.page_bytes
            # 4. The sums of what is in the blocks then; a device computes them behind the copies.
            if self._digest_plan is not None and run.block_ids:
                sums.append((region, run.first_block, region.pages.sums(run.block_ids, loaded=True)))
        # 5. The request may run once every copy is in place, and every page is what the prefill engine computed.
        for region in self._layout.regions:
            region.pages.flush()
        if self._digest_plan is not None:
            digests = self._digest_plan.of_transfer(staged.transfer_id, staged.num_tokens, staged.skip_tokens)
            for region, first_block, pending in sums:
                digests.check(staged, region.index, first_block, pending.wait())
        return loaded_bytes


def _obstacle(status: TransferStatus | None) -> str:
    """Why a transfer that could not be taken never will be; "" while it may still be."""
    if status is None:
        return "its transfer is unknown or has expired"
    if status.phase is TransferPhase.FAILED:
        return f"its transfer failed: {status.reason}"
    if status.taken:
        return "its transfer was used already"
    return ""
