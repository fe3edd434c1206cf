"""A peer queue as threads share it: the waits of writers, who is woken after each call, and the engine's transfers."""

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
        self._ready, self._retry = Condition(lock), Condition(lock)
        self.quiet = Condition(lock)
        """Woken when a source is no longer read, or a transfer is over."""
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
            self.quiet.notify_all()
        self._lock.release()

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


class SentTransfer(OutgoingTransfer):
    """The engine's handle of a transfer; thread-safe. Only `recall` and `await_quiescent` wait for the network.

    1. `put` queues bytes as the prefill computes them; `end` says that the prefill has finished.
    2. The transfer completes once all its bytes are acknowledged. The engine polls `phase`, which is cheap.
    3. `abort` gives it up. After that, and after a failure, memory behind its sources may be reused only once
       `await_quiescent` returns True.
    """

    def __init__(
        self,
        shared: SharedQueue | None,
        transfer_id: bytes,
        offer: Offer,
        service: TransferClass = DEFAULT_CLASS,
        owner: OutgoingTransfer | None = None,
    ) -> None:
        """`shared`: the peer's queue; None: there is no such peer, so it fails."""
        super().__init__(transfer_id, offer, service, owner)
        self._shared = shared

    def put(self, region: int, offset: int, source: ChunkSource, *, urgent: bool = False) -> None:
        """Queue all bytes of `source` for [offset, offset + source.nbytes) of `region`.

        They leave in the order of `put`, but urgent ones before all others of the transfer. Ignored once it is over.

        Raises:
            ValueError: outside the region, or over bytes that were put already.
        """
        if self._shared is not None:
            with self._shared as queue:
                queue.put(self, region, offset, source, urgent=urgent)

    def end(self) -> None:
        """Report that the prefill has finished: END overtakes queued data and freezes `overlapped_bytes`. Idempotent.

        The transfer completes when every byte of every region was put and acknowledged; missing bytes may still be
        put after this.
        """
        if self._shared is not None:
            with self._shared as queue:
                queue.end(self, time.monotonic())

    def abort(self, reason: str) -> None:
        """Give up: the transfer is FAILED, its chunks are dropped, an ABORT goes to the consumer. Idempotent."""
        if self._shared is not None:
            with self._shared as queue:
                queue.fail(self, reason, time.monotonic())

    def recall(self, timeout_s: float) -> None:
        """Wait until memory that sources have shown so far is no longer in use.

        Call it after the sources have moved to other memory. A connection that still sends from the old one after
        `timeout_s` is closed: its peer drops the incomplete chunk, which is read and sent again.
        """
        if self._shared is not None:
            with self._shared.quiet:
                recalled = dict(self.reading)
                self._shared.quiet.wait_for(lambda: recalled.keys().isdisjoint(self.reading), timeout_s)
                for chunk in recalled.keys() & self.reading.keys():
                    # From here on the kernel takes nothing more of the chunk: its frame stays incomplete for ever.
                    recalled[chunk].shut()

    def await_quiescent(self, timeout_s: float) -> bool:
        """Wait until the transfer is over and none of its sources is in use any more; False on timeout.

        Only after True may the memory behind the sources of an aborted or failed transfer be reused.
        """
        if self._shared is None:
            return True
        with self._shared.quiet:
            return self._shared.quiet.wait_for(lambda: self.phase.terminal and not self.reading, timeout_s)
