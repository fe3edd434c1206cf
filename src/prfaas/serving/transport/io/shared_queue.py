"""A peer queue as threads share it: the engine's calls, the waits of writers, and who is woken after each call."""

import logging
import time
from threading import Condition, Lock

from prfaas.serving.transport.protocol.chunk_source import ChunkSource
from prfaas.serving.transport.protocol.in_flight import ControlJob, InFlightWindow
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.outgoing import Chunk, OutgoingTransfer, PeerAnswer
from prfaas.serving.transport.protocol.peer_queue import PeerQueue
from prfaas.serving.transport.protocol.ticket import DEFAULT_CLASS, TransferClass

log = logging.getLogger(__name__)


class SharedQueue:
    """A `PeerQueue` of threads. Who enters it uses the queue under the sender's lock, and wakes whom it lets go on."""

    def __init__(self, queue: PeerQueue, lock: Lock) -> None:
        """`lock`: of all queues of a sender, since they share their links' pacers."""
        self.queue = queue
        """Without the lock, to read its properties."""
        self.peer = queue.peer
        self._lock = lock
        self._ready, self._retry, self._quiet = (Condition(lock) for _ in range(3))
        self._work = self._quiets = 0

    def __enter__(self) -> PeerQueue:
        self._lock.acquire()
        return self.queue

    def __exit__(self, *_: object) -> None:
        queue = self.queue
        if queue.ready:
            self._ready.notify(queue.ready)
            queue.ready = 0
        if queue.work != self._work or queue.closing:
            self._work = queue.work
            self._retry.notify_all()
        if queue.quiets != self._quiets:
            self._quiets = queue.quiets
            self._quiet.notify_all()
        self._lock.release()

    # The engine

    def open(
        self,
        transfer_id: bytes,
        offer: Offer,
        service: TransferClass = DEFAULT_CLASS,
        owner: OutgoingTransfer | None = None,
    ) -> OutgoingTransfer:
        """As of the queue."""
        with self as queue:
            return queue.open(transfer_id, offer, service, owner, engine=self, now_s=time.monotonic())

    def put(
        self, transfer: OutgoingTransfer, region: int, offset: int, source: ChunkSource, *, urgent: bool
    ) -> None:
        """As `OutgoingTransfer.put`."""
        with self as queue:
            queue.put(transfer, region, offset, source, urgent=urgent)

    def end(self, transfer: OutgoingTransfer) -> None:
        """As `OutgoingTransfer.end`."""
        with self as queue:
            queue.end(transfer, time.monotonic())

    def abort(self, transfer: OutgoingTransfer, reason: str) -> None:
        """As `OutgoingTransfer.abort`."""
        with self as queue:
            queue.abort(transfer, reason, time.monotonic())

    def await_quiescent(self, transfer: OutgoingTransfer, timeout_s: float) -> bool:
        """As `OutgoingTransfer.await_quiescent`."""
        with self._lock:
            return self._quiet.wait_for(lambda: transfer.phase.terminal and not transfer.reading, timeout_s)

    def recall(self, transfer: OutgoingTransfer, timeout_s: float) -> None:
        """As `OutgoingTransfer.recall`."""
        with self._lock:
            recalled = dict(transfer.reading)
            self._quiet.wait_for(lambda: recalled.keys().isdisjoint(transfer.reading), timeout_s)
            for chunk in recalled.keys() & transfer.reading.keys():
                # From here on the kernel takes nothing more of the chunk: its frame stays incomplete for ever.
                recalled[chunk].shut()

    # A connection's writer

    def unreachable(self, trouble: str, answer: PeerAnswer) -> None:
        """As of the queue; a new rejection is logged."""
        with self as queue:
            is_news = queue.unreachable(trouble, answer, time.monotonic())
        if is_news:
            log.warning("%s", trouble)

    def wait_before_retry(self, seconds: float) -> bool:
        """Back off; new work ends the wait early. Returns whether it did."""
        with self._lock:
            before = self.queue.work
            self._retry.wait_for(lambda: self.queue.closing or self.queue.work > before, seconds)
            return self.queue.work > before

    def next_job(self, window: InFlightWindow) -> ControlJob | Chunk | None:
        """Block until there is something to send; None when this connection or the queue is over."""
        queue = self.queue
        with self._lock:
            while not (queue.closing or window.closed):
                if (job := queue.next_job(window, time.monotonic())) is not None:
                    return job
                self._ready.wait(queue.heartbeat_s if queue.busy else None)
            return None

    def read_done(self, chunk: Chunk, error: str = "") -> bool:
        """As of the queue."""
        with self as queue:
            return queue.read_done(chunk, time.monotonic(), error)
