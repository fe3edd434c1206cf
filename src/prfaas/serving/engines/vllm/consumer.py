"""The connector inside a decode worker: staged KV goes into the blocks that vLLM gave the request."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.serving.engines.vllm.layout import KVLayout
from prfaas.serving.engines.vllm.metadata import Load, TransferMetadata
from prfaas.serving.engines.vllm.stats import ConnectorStats
from prfaas.serving.transport.receiver import Receiver
from prfaas.serving.transport.staging import StagedTransfer
from prfaas.serving.transport.status import TransferPhase

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Staged:
    """A transfer taken out of the receiver; freed when its last use is over or its time to live."""

    transfer: StagedTransfer
    uses_left: int
    expires_at_s: float
    busy: int = 0


class ConsumingSide:
    """Loads are asynchronous: one thread copies, the step loop only looks at what has become of them.

    Every ordered load is reported exactly once, as done or as failed; a failed one makes vLLM prefill the
    request locally (`kv_load_failure_policy=recompute`). A transfer can serve several requests (`n` > 1).
    """

    def __init__(
        self,
        layout: KVLayout,
        receiver: Receiver,
        load_wait_s: float,
        staging_ttl_s: float,
        stats: ConnectorStats,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._receiver = receiver
        self._load_wait_s = load_wait_s
        self._staging_ttl_s = staging_ttl_s
        self.stats = stats
        self._now_s = now_s
        self._waiting: dict[str, tuple[Load, float]] = {}
        self._staged: dict[bytes, _Staged] = {}
        self._jobs: queue.SimpleQueue[tuple[Load, _Staged] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Load, _Staged, int]] = queue.SimpleQueue()
        self._failed_orders: set[str] = set()
        self._thread = threading.Thread(target=self._run_loads, name="prfaas-load", daemon=True)
        self._thread.start()

    def order(self, orders: TransferMetadata) -> None:
        """Accept this step's loads and drops."""
        for transfer_id, reason in orders.drops:
            self._drop(transfer_id, reason)
        for load in orders.loads:
            self._waiting[load.request_id] = (load, self._now_s())

    def results(self) -> tuple[set[str], set[str]]:
        """(requests whose load has ended, those of them that failed); each request is named once."""
        self._start_ready_loads()
        ended, failed = set(self._failed_orders), set(self._failed_orders)
        self._failed_orders.clear()
        while not self._results.empty():
            load, staged, loaded_bytes = self._results.get()
            staged.busy -= 1
            ended.add(load.request_id)
            if loaded_bytes < 0:
                failed.add(load.request_id)
            else:
                self.stats.add("loads_completed")
                self.stats.add("bytes_loaded", loaded_bytes)
            self._release(load.ticket.transfer_id, staged)
        self._expire()
        self.stats.add("loads_failed", len(failed))
        return ended, failed

    def close(self) -> None:
        """Stop the loading thread and free what is still staged."""
        self._jobs.put(None)
        self._thread.join(timeout=10)
        for staged in self._staged.values():
            staged.transfer.free()
        self._staged.clear()

    def live_loads(self) -> int:
        """Loads ordered and not yet reported, and transfers still held."""
        return len(self._waiting) + len(self._staged)

    def _start_ready_loads(self) -> None:
        for request_id, (load, since_s) in list(self._waiting.items()):
            staged = self._take(load)
            if isinstance(staged, str):
                logger.warning("request %s prefills locally: %s", request_id, staged)
                self._failed_orders.add(request_id)
            elif staged is None:
                if self._now_s() - since_s < self._load_wait_s:
                    continue
                reason = f"KV still incomplete after {self._load_wait_s:g} s"
                logger.warning("request %s prefills locally: %s", request_id, reason)
                self._receiver.drop(load.ticket.transfer_id, reason)
                self._failed_orders.add(request_id)
            else:
                staged.uses_left -= 1
                staged.busy += 1
                self._jobs.put((load, staged))
            del self._waiting[request_id]

    def _take(self, load: Load) -> _Staged | str | None:
        """The staged transfer of a load, None while it is arriving, or why there will be none."""
        transfer_id = load.ticket.transfer_id
        staged = self._staged.get(transfer_id)
        if staged is not None and staged.uses_left > 0:
            return staged
        status = self._receiver.state(transfer_id)
        if status is None:
            return "its transfer is unknown or has expired"
        if status.phase is TransferPhase.FAILED:
            return f"its transfer failed: {status.reason}"
        if status.phase is not TransferPhase.COMPLETE:
            return None
        transfer = self._receiver.take(transfer_id)
        if transfer is None:
            return "its transfer was used or dropped already"
        expires_at_s = self._now_s() + self._staging_ttl_s
        staged = self._staged[transfer_id] = _Staged(transfer, load.ticket.uses, expires_at_s)
        return staged

    def _drop(self, transfer_id: bytes, reason: str) -> None:
        staged = self._staged.get(transfer_id)
        if staged is None:
            self._receiver.drop(transfer_id, reason)
            return
        staged.uses_left -= 1
        self._release(transfer_id, staged)

    def _release(self, transfer_id: bytes, staged: _Staged) -> None:
        if staged.uses_left <= 0 and staged.busy == 0 and self._staged.pop(transfer_id, None) is not None:
            staged.transfer.free()

    def _expire(self) -> None:
        for transfer_id, staged in list(self._staged.items()):
            if self._now_s() > staged.expires_at_s:
                staged.uses_left = 0
                self._release(transfer_id, staged)

    def _run_loads(self) -> None:
        while (job := self._jobs.get()) is not None:
            load, staged = job
            try:
                loaded_bytes = self._load(load, staged.transfer)
            except Exception:
                logger.exception("loading the KV of request %s failed", load.request_id)
                loaded_bytes = -1
            self._results.put((load, staged, loaded_bytes))

    def _load(self, load: Load, staged: StagedTransfer) -> int:
        """Copy staging to the request's blocks; returns the bytes copied."""
        ticket, loaded_bytes = load.ticket, 0
        runs = {run.group: run for run in load.runs}
        for index, region in enumerate(self._layout.regions):
            run, pages = runs[region.group.index], self._layout.pages[index]
            staged_first = region.group.first_block(ticket.num_tokens, ticket.skip_tokens)
            for position, block in enumerate(run.block_ids, start=run.first_block - staged_first):
                if block == 0:
                    raise RuntimeError(f"layer {region.layer_name}: a block to load is vLLM's null block")
                offset = position * region.page_bytes
                pages.write(block, staged.region_views(index, offset, region.page_bytes))
                loaded_bytes += region.page_bytes
        for pages in self._layout.pages:
            pages.flush()
        return loaded_bytes
