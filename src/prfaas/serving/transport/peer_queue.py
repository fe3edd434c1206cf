"""Queue of everything on its way to one peer: transfers, chunks that its connections share, unanswered frames.

One lock per queue guards all of it, and the queue's part of its transfers. Lock order: queue, then link pacer.
"""

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from prfaas.serving.transport.chunk_schedule import ChunkSchedule
from prfaas.serving.transport.chunk_source import ChunkSource
from prfaas.serving.transport.in_flight import (
    FILLER,
    NOBODY,
    ControlJob,
    ControlQueue,
    InFlightWindow,
    gauges_of,
)
from prfaas.serving.transport.liveness import heartbeat_period_s
from prfaas.serving.transport.offer import Offer
from prfaas.serving.transport.options import Peer, SenderOptions
from prfaas.serving.transport.outgoing import (
    Carrier,
    Chunk,
    OutgoingTransfer,
    PeerAnswer,
    QueueLoad,
    SendPhase,
)
from prfaas.serving.transport.pacing import LinkPacer
from prfaas.serving.transport.peer_liveness import PeerLiveness
from prfaas.serving.transport.sockets import TcpInfo
from prfaas.serving.transport.ticket import DEFAULT_CLASS, TransferClass
from prfaas.serving.transport.wire import END_REGION, FrameType, Header, WireError, text_field

log = logging.getLogger(__name__)

# Assumed pace of an unpaced link; only the order of transfers depends on it.
_UNPACED_BITS_PER_S = 1e10


class PeerQueue:
    """Queue that the writers of one peer's connections pull from, with the state of the peer's transfers.

    1. The engine calls `open`, then `put`, `end` or `abort` through the `OutgoingTransfer`.
    2. A writer that has connected calls `connected`, then `next_job` in a loop, and `read_done` after each chunk.
    3. The connection's reader calls `accepted`, `acked`, `nacked`, `refused` and `heard`.
    4. After a loss, `disconnected` queues the unanswered frames again. The supervisor calls `apply_deadlines`.
    """

    def __init__(
        self, peer: Peer, options: SenderOptions, pacer: LinkPacer, on_work: Callable[[], None]
    ) -> None:
        self.peer = peer
        self._counters: Counter[str] = Counter()
        self._options = options
        self._pacer = pacer
        self._on_work = on_work
        self._lock = threading.Lock()
        self._ready, self._retry, self._quiet = (threading.Condition(self._lock) for _ in range(3))
        self._transfers: dict[bytes, OutgoingTransfer] = {}
        self._schedule = ChunkSchedule()
        self._controls = ControlQueue()
        self._windows: list[InFlightWindow] = []
        self._numbers = itertools.count()
        self._work = 0
        self._ping_s = heartbeat_period_s(options.limits.silence_s)
        self._liveness = PeerLiveness(peer.name, options)
        self._filler_frames = 0
        self._trouble = self._rejection = ""
        self.closing = False

    @property
    def busy(self) -> bool:
        return bool(self._transfers)

    @property
    def rejection(self) -> str:
        """Why the peer rejects this side; empty if it does not."""
        return "" if self._windows else self._rejection

    @property
    def silent(self) -> str:
        """Why the path to the peer was given up; empty if it was not, or was not used."""
        return "" if self._windows else self._liveness.silent

    @property
    def stalled(self) -> str:
        """Why the peer counts as stalled (it owes an answer); empty otherwise."""
        return self._liveness.stalled if self._windows and self._transfers else ""

    # The engine's calls, through OutgoingTransfer

    def open(
        self,
        transfer_id: bytes,
        offer: Offer,
        service: TransferClass = DEFAULT_CLASS,
        owner: OutgoingTransfer | None = None,
    ) -> OutgoingTransfer:
        """Begin a transfer, or a checkpoint of `owner`. One that cannot be opened is FAILED, with the reason."""
        now_s, number = time.monotonic(), next(self._numbers)
        transfer = OutgoingTransfer(self, transfer_id, offer, now_s, service, number)
        transfer.owner = owner
        try:
            frame = transfer.open_frame()
        except WireError as error:
            return OutgoingTransfer.failed(transfer_id, offer, str(error))
        with self._lock:
            reason = "the sender is closed" if self.closing else self.rejection
            if transfer_id in self._transfers:
                reason = "this transfer is open already"
            if reason:
                return OutgoingTransfer.failed(transfer_id, offer, reason)
            if not self._transfers:
                self._liveness.begin()
            self._transfers[transfer_id] = transfer
            self._filler_frames = 0
            self._counters["opened"] += 1
            self._controls.open(transfer, frame)
            self._repace()
            # All: from now on each writer also sends its connection's heartbeats.
            self._ready.notify_all()
            # Writers that wait before they reconnect try at once for new work.
            self._work += 1
            self._retry.notify_all()
        self._on_work()
        return transfer

    def put(
        self, transfer: OutgoingTransfer, region: int, offset: int, source: ChunkSource, *, urgent: bool
    ) -> None:
        """Queue bytes of a transfer, as `OutgoingTransfer.put`."""
        end = offset + source.nbytes
        with self._lock:
            if transfer.phase.terminal or end == offset:
                return
            if transfer.coverage[region].overlap_bytes(offset, end):
                raise ValueError(f"bytes {offset}..{end} of region {region} were put already")
            transfer.coverage[region].add(offset, end)
            transfer.put_bytes += end - offset
            number = next(self._numbers)
            chunk = Chunk(transfer, number, region, offset, end, base=offset, source=source, urgent=urgent)
            self._schedule.add(chunk)
            self._ready.notify(1 + chunk.nbytes // self._options.min_chunk_bytes)

    def end(self, transfer: OutgoingTransfer) -> None:
        """Record the end of the prefill, as `OutgoingTransfer.end`."""
        with self._lock:
            if transfer.phase.terminal or transfer.ended:
                return
            transfer.ends(time.monotonic(), self._pacer.pace_bits_per_s or _UNPACED_BITS_PER_S)
            self._schedule.place(transfer)
            if transfer.phase is SendPhase.SENDING:
                self._controls.end(transfer)
                self._ready.notify()

    def abort(self, transfer: OutgoingTransfer, reason: str) -> None:
        """Give a transfer up, as `OutgoingTransfer.abort`."""
        with self._lock:
            self._fail(transfer, reason)

    def fill(self, nbytes: int) -> None:
        """Send about `nbytes` of filler, unless transfers are open; the next transfer ends it."""
        with self._lock:
            if self._windows and not self._transfers:
                self._filler_frames = -(-nbytes // len(FILLER.frame))
                self._repace()
                self._ready.notify_all()

    def await_quiescent(self, transfer: OutgoingTransfer, timeout_s: float) -> bool:
        """Wait until a transfer's sources are free, as `OutgoingTransfer.await_quiescent`."""
        with self._lock:
            return self._quiet.wait_for(lambda: transfer.phase.terminal and not transfer.reading, timeout_s)

    def recall(self, transfer: OutgoingTransfer, timeout_s: float) -> None:
        """Wait until old memory is no longer read, as `OutgoingTransfer.recall`."""
        with self._lock:
            recalled = dict(transfer.reading)
            self._quiet.wait_for(lambda: recalled.keys().isdisjoint(transfer.reading), timeout_s)
            for chunk in recalled.keys() & transfer.reading.keys():
                # From here on the kernel takes nothing more of the chunk: its frame stays incomplete for ever.
                recalled[chunk].shut()

    # The calls of a connection's writer

    def connected(self, window: InFlightWindow) -> None:
        """Add a connection that is up."""
        with self._lock:
            window.sent_at_s = time.monotonic()
            for transfer in self._transfers.values() if not self._windows else ():
                if transfer.phase is SendPhase.SENDING:
                    self._controls.resume(transfer)
            self._windows.append(window)
            self._liveness.connected()
            self._rejection = self._trouble = ""
            self._counters["connects"] += 1
            self._repace()

    def disconnected(self, window: InFlightWindow, trouble: str) -> None:
        """Remove a connection that ended; its unanswered frames go back to the front of the queue."""
        with self._lock:
            self._windows.remove(window)
            self._trouble = window.trouble or trouble
            self._controls.again((*window.ends.values(), *window.aborts.values()))
            for each in (window, *self._windows):
                # The consumer answers an OPEN on any connection: the answer may be lost with this one.
                self._controls.again(each.opens.values())
                each.opens.clear()
            for chunk in window.chunks.values():
                self._schedule.add(chunk)
            self._counters["requeued_chunks"] += len(window.chunks)
            self._repace()
            self._ready.notify_all()

    def unreachable(self, trouble: str, answer: PeerAnswer) -> None:
        """Note that a connection could not be made; a rejection fails the transfers at once."""
        with self._lock:
            self._trouble = trouble
            self._counters["connect_failures"] += 1
            if self._windows:
                return
            if answer is PeerAnswer.REJECTED:
                if trouble != self._rejection:
                    log.warning("%s", trouble)
                self._rejection = trouble
                for transfer in list(self._transfers.values()):
                    self._fail(transfer, trouble)
            elif answer is PeerAnswer.CLOSED:
                # The engine that rejected this side has ended; the next one may be another.
                self._rejection = ""

    def wait_before_retry(self, seconds: float) -> bool:
        """Back off; new work ends the wait early. Returns whether it did."""
        with self._lock:
            before = self._work
            self._retry.wait_for(lambda: self.closing or self._work > before, seconds)
            return self._work > before

    def next_job(self, window: InFlightWindow) -> ControlJob | Chunk | None:
        """Block until there is something to send; None when this connection or the queue is over."""
        with self._lock:
            while not (self.closing or window.closed):
                now_s, busy = time.monotonic(), self.busy
                sign = window.heartbeat(now_s, self._ping_s, busy=busy)
                if sign:
                    return ControlJob(FrameType.PING, NOBODY, sign)
                if (job := self._controls.take()) is not None:
                    window.add_control(job, now_s)
                    return job
                chunk = self._schedule.take(window.connection.chunk_bytes, len(self._windows))
                if chunk is not None:
                    window.add_chunk(chunk, time.monotonic())
                    chunk.transfer.reading[chunk] = window.connection
                    return chunk
                if self._filler_frames:
                    self._filler_frames -= 1
                    self._repace()
                    return FILLER
                self._ready.wait(self._ping_s if busy else None)
            return None

    def read_done(self, chunk: Chunk, error: str = "") -> bool:
        """End the use of a chunk's source, which may have failed (`error`). Returns whether to send the chunk."""
        with self._lock:
            transfer = chunk.transfer
            del transfer.reading[chunk]
            if error:
                self._fail(transfer, error)
            self._quiet.notify_all()
            return not transfer.phase.terminal

    def close_window(self, window: InFlightWindow) -> None:
        """Wake the writer of a broken connection."""
        with self._lock:
            window.closed = True
            self._ready.notify_all()

    # The calls of a connection's reader

    def acked(self, window: InFlightWindow, header: Header) -> None:
        """Take an ACK: the consumer has verified a chunk, or received END."""
        with self._lock:
            self._liveness.progressed()
            if header.region == END_REGION:
                job = window.ends.pop(header.transfer_id, None)
                if job is not None:
                    job.transfer.end_acked = True
                    self._complete_if_done(job.transfer)
                return
            chunk = window.chunks.pop((header.transfer_id, header.region, header.offset), None)
            if chunk is not None:
                chunk.transfer.acked_bytes += chunk.nbytes
                self._counters["acked_bytes"] += chunk.nbytes
                self._complete_if_done(chunk.transfer)

    def nacked(self, window: InFlightWindow, header: Header) -> None:
        """Take a NACK: a chunk arrived damaged and is sent again, up to `max_resends` times."""
        with self._lock:
            chunk = window.chunks.pop((header.transfer_id, header.region, header.offset), None)
            if chunk is None:
                return
            self._counters["resent_chunks"] += 1
            if chunk.resends >= self._options.max_resends:
                self._fail(chunk.transfer, f"a chunk arrived damaged {chunk.resends + 1} times")
            else:
                # A copy: the writer may still use the damaged chunk.
                self._schedule.add(replace(chunk, resends=chunk.resends + 1))
                self._ready.notify()

    def accepted(self, header: Header) -> None:
        """Take an ACCEPT: the consumer has room, so queued chunks may leave."""
        with self._lock:
            transfer = self._answered(header)
            if transfer is None or transfer.phase is not SendPhase.OPENING:
                return
            transfer.phase = SendPhase.SENDING
            self._schedule.place(transfer)
            self._liveness.progressed()
            if transfer.ended:
                self._controls.end(transfer)
            self._ready.notify_all()

    def refused(self, header: Header, body: Mapping[str, Any]) -> None:
        """Take a REFUSE or ABORT of the consumer."""
        what = "refused" if header.kind is FrameType.REFUSE else "aborted"
        reason = f"{self.peer.name} {what}: {text_field(body, 'reason')}"
        with self._lock:
            transfer = self._answered(header)
            if transfer is not None:
                self._fail(transfer, reason, notify_peer=False)

    def heard(self, window: InFlightWindow, header: Header) -> None:
        """Take a PING, which is answered, or a PONG, which confirms what was sent before its PING."""
        with self._lock:
            window.heard(header)
            self._ready.notify_all()

    # The supervisor's calls

    def apply_deadlines(self, now_s: float, infos: Mapping[Carrier, TcpInfo]) -> dict[Carrier, str]:
        """Fail overdue transfers. Returns the connections to close, and why, as `PeerLiveness.look`."""
        with self._lock:
            silent = self._liveness.look(now_s, self._windows, infos)
            for window in self._windows:
                window.trouble = silent.get(window.connection, window.trouble)
            open_now = self._transfers.values()
            for transfer, reason in self._liveness.overdue(
                now_s, open_now, bool(self._windows), self._trouble
            ):
                self._fail(transfer, reason)
            return silent

    def close(self) -> None:
        """Fail unfinished transfers and let every writer end."""
        with self._lock:
            self.closing = True
            for transfer in list(self._transfers.values()):
                self._fail(transfer, "the sender shuts down")
            self._ready.notify_all()
            self._retry.notify_all()

    def load(self) -> QueueLoad:
        """The queue's load; cheap enough for ten calls a second."""
        with self._lock:
            return QueueLoad.of(self._transfers.values(), self._counters["acked_bytes"], len(self._windows))

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as observers get them."""
        with self._lock:
            gauges = gauges_of(self._transfers.values(), self._windows)
            counters = {name: self._counters[name] for name in _COUNTED}
            return gauges | {"trouble": self._rejection or self._trouble} | counters

    # Under the lock

    def _answered(self, header: Header) -> OutgoingTransfer | None:
        for other in self._windows:
            other.opens.pop(header.transfer_id, None)
        return self._transfers.get(header.transfer_id)

    def _complete_if_done(self, transfer: OutgoingTransfer) -> None:
        done = transfer.end_acked and transfer.acked_bytes == transfer.total_bytes
        if done and not transfer.phase.terminal:
            self._counters["completed"] += 1
            self._finish(transfer, SendPhase.COMPLETE)

    def _fail(self, transfer: OutgoingTransfer, reason: str, *, notify_peer: bool = True) -> None:
        if transfer.phase.terminal:
            return
        transfer.reason = reason
        self._counters["failed"] += 1
        self._finish(transfer, SendPhase.FAILED)
        if notify_peer:
            self._controls.abort(transfer)
            self._ready.notify()

    def _finish(self, transfer: OutgoingTransfer, phase: SendPhase) -> None:
        """Forget everything about the transfer, so that its sources are not kept alive."""
        transfer.phase = phase
        del self._transfers[transfer.transfer_id]
        transfer.queued.clear()
        self._controls.forget(transfer)
        for window in self._windows:
            window.forget(transfer)
        self._repace()
        self._quiet.notify_all()

    def _repace(self) -> None:
        working = self._transfers or self._filler_frames
        connections = [window.connection for window in self._windows] if working else []
        background = all(transfer.service.background for transfer in self._transfers.values())
        self._pacer.update(self, connections, background=background)


_COUNTED = (
    *("opened", "completed", "failed", "connects", "connect_failures"),
    *("requeued_chunks", "resent_chunks", "acked_bytes"),
)
