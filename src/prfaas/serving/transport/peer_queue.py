"""Everything on its way to one peer: its transfers, the common queue of its connections, what is in flight.

One lock per lane guards all of it, the lane's part of its transfers included. Lock order: lane, then link
pacer.
"""

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from prfaas.serving.transport.options import Peer, SenderOptions
from prfaas.serving.transport.outgoing import (
    Carrier,
    ChunkSource,
    ControlJob,
    Flight,
    OutgoingTransfer,
    SendPhase,
    Span,
)
from prfaas.serving.transport.pacing import LinkPacer
from prfaas.serving.transport.wire import END_REGION, FrameType, Header, WireError, pack_control, text_field


class Lane:
    """The queue that the writers of one peer's connections pull from, and the fate of its transfers."""

    def __init__(
        self, peer: Peer, options: SenderOptions, pacer: LinkPacer, on_work: Callable[[], None]
    ) -> None:
        self.peer = peer
        self.counters: Counter[str] = Counter()
        self._options = options
        self._pacer = pacer
        self._on_work = on_work
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._retry = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)
        self._transfers: dict[bytes, OutgoingTransfer] = {}
        self._queue: list[Span] = []
        self._controls: deque[ControlJob] = deque()
        self._flights: list[Flight] = []
        self._turn = 0
        self._lost_at_s = time.monotonic()
        self._moved_at_s = 0.0
        self._trouble = ""
        self._rejected = False
        self._closing = False

    @property
    def busy(self) -> bool:
        return bool(self._transfers)

    # The engine's calls, through OutgoingTransfer

    def open(self, transfer_id: bytes, sealed: str, region_bytes: Sequence[int]) -> OutgoingTransfer:
        """Begin a transfer; whatever is wrong shows in its phase and reason."""
        transfer = OutgoingTransfer(self, transfer_id, region_bytes, time.monotonic())
        try:
            frame = pack_control(
                FrameType.OPEN, transfer_id, {"ticket": sealed, "regions": list(transfer.region_bytes)}
            )
        except WireError as error:
            return OutgoingTransfer.stillborn(transfer_id, region_bytes, str(error))
        with self._lock:
            reason = ""
            if self._closing:
                reason = "the sender is closed"
            elif transfer_id in self._transfers:
                reason = "this transfer is open already"
            elif self._rejected and not self._flights:
                reason = self._trouble
            if reason:
                return OutgoingTransfer.stillborn(transfer_id, region_bytes, reason)
            if not self._transfers:
                self._moved_at_s = time.monotonic()
            self._transfers[transfer_id] = transfer
            self.counters["opened"] += 1
            self._controls.append(ControlJob(FrameType.OPEN, transfer, frame))
            self._repace()
            self._ready.notify()
            # Whoever waits before connecting again tries at once for new work.
            self._retry.notify_all()
        self._on_work()
        return transfer

    def put(self, transfer: OutgoingTransfer, region: int, offset: int, source: ChunkSource) -> None:
        nbytes = source.nbytes
        if not 0 <= region < len(transfer.region_bytes):
            raise ValueError(f"region {region} is not one of the {len(transfer.region_bytes)} announced")
        end = offset + nbytes
        if offset < 0 or end > transfer.region_bytes[region]:
            raise ValueError(
                f"bytes {offset}..{end} lie outside region {region} of {transfer.region_bytes[region]} bytes"
            )
        with self._lock:
            if transfer.phase.terminal or nbytes == 0:
                return
            if transfer.coverage[region].overlap_bytes(offset, end):
                raise ValueError(f"bytes {offset}..{end} of region {region} were put already")
            transfer.coverage[region].add(offset, end)
            transfer.put_bytes += nbytes
            self._turn += 1
            span = Span(transfer, self._turn, region, offset, end, offset, source)
            if transfer.phase is SendPhase.OPENING:
                transfer.pending.append(span)
            else:
                heapq.heappush(self._queue, span)
                self._ready.notify(1 + nbytes // self._options.min_chunk_bytes)

    def end(self, transfer: OutgoingTransfer) -> None:
        with self._lock:
            if transfer.phase.terminal or transfer.ended:
                return
            transfer.ended = True
            transfer.hidden_bytes = transfer.acked_bytes
            if transfer.phase is SendPhase.SENDING:
                self._send_end(transfer)

    def abort(self, transfer: OutgoingTransfer, reason: str) -> None:
        with self._lock:
            if not transfer.phase.terminal:
                self._fail(transfer, reason)

    def await_quiescent(self, transfer: OutgoingTransfer, timeout_s: float) -> bool:
        with self._lock:
            return self._quiet.wait_for(
                lambda: transfer.phase.terminal and transfer.reading == 0, max(0.0, timeout_s)
            )

    # The calls of a connection's writer

    def connected(self, flight: Flight) -> None:
        with self._lock:
            flight.heard_at_s = time.monotonic()
            self._flights.append(flight)
            self._rejected = False
            self._trouble = ""
            self.counters["connects"] += 1
            self._repace()

    def disconnected(self, flight: Flight, trouble: str) -> None:
        """A live connection ended: what it carried goes back to the front of the queue."""
        with self._lock:
            self._flights.remove(flight)
            self._trouble = trouble
            if not self._flights:
                self._lost_at_s = time.monotonic()
            for job in flight.controls.values():
                self._controls.appendleft(job)
            for span in flight.chunks.values():
                heapq.heappush(self._queue, span)
            self.counters["requeued_chunks"] += len(flight.chunks)
            self._repace()
            self._ready.notify_all()

    def unreachable(self, trouble: str, *, rejected: bool) -> None:
        """A connection could not be made; a rejection (wrong key, other layout) fails the transfers
        at once.
        """
        with self._lock:
            self._trouble = trouble
            self.counters["connect_failures"] += 1
            if rejected and not self._flights:
                self._rejected = True
                for transfer in list(self._transfers.values()):
                    self._fail(transfer, trouble)

    def wait_before_retry(self, seconds: float) -> bool:
        """Back off; new work ends the wait early. False when the lane closes."""
        with self._lock:
            if not self._closing:
                self._retry.wait(seconds)
            return not self._closing

    def next_job(self, flight: Flight, chunk_bytes: Callable[[], int]) -> ControlJob | Span | None:
        """Block until there is something to send; None when this connection or the lane is over."""
        with self._lock:
            while not (self._closing or flight.ended):
                if self._controls:
                    job = self._controls.popleft()
                    if job.kind is not FrameType.ABORT:
                        if not flight.waits:
                            flight.heard_at_s = time.monotonic()
                        flight.controls[job.transfer.transfer_id, job.kind] = job
                    return job
                if self._queue:
                    span = self._queue[0].cut(chunk_bytes())
                    if span is self._queue[0]:
                        heapq.heappop(self._queue)
                    if not flight.waits:
                        flight.heard_at_s = time.monotonic()
                    flight.chunks[span.transfer.transfer_id, span.region, span.start] = span
                    span.transfer.reading += 1
                    return span
                self._ready.wait()
            return None

    def read_done(self, span: Span, error: str) -> bool:
        """The writer has copied the chunk, or could not (`error`). Returns whether to send it."""
        with self._lock:
            transfer = span.transfer
            transfer.reading -= 1
            if error and not transfer.phase.terminal:
                self._fail(transfer, error)
            if transfer.phase.terminal:
                self._quiet.notify_all()
                return False
            return True

    def end_flight(self, flight: Flight) -> None:
        """The connection is broken: its writer must not wait for work any more."""
        with self._lock:
            flight.ended = True
            self._ready.notify_all()

    # The calls of a connection's reader

    def acked(self, flight: Flight, header: Header) -> None:
        with self._lock:
            flight.heard_at_s = self._moved_at_s = time.monotonic()
            if header.region == END_REGION:
                job = flight.controls.pop((header.transfer_id, FrameType.END), None)
                if job is not None:
                    job.transfer.end_acked = True
                    self._complete_if_done(job.transfer)
                return
            span = flight.chunks.pop((header.transfer_id, header.region, header.offset), None)
            if span is not None:
                span.transfer.acked_bytes += span.nbytes
                self.counters["acked_bytes"] += span.nbytes
                self._complete_if_done(span.transfer)

    def nacked(self, flight: Flight, header: Header) -> None:
        with self._lock:
            flight.heard_at_s = time.monotonic()
            span = flight.chunks.pop((header.transfer_id, header.region, header.offset), None)
            if span is None:
                return
            self.counters["resent_chunks"] += 1
            span.resends += 1
            if span.resends > self._options.max_resends:
                self._fail(span.transfer, f"a chunk arrived damaged {span.resends} times")
            else:
                heapq.heappush(self._queue, span)
                self._ready.notify()

    def accepted(self, flight: Flight, header: Header) -> None:
        with self._lock:
            transfer = self._answered(flight, header)
            if transfer is None or transfer.phase is not SendPhase.OPENING:
                return
            transfer.phase = SendPhase.SENDING
            for span in transfer.pending:
                heapq.heappush(self._queue, span)
            transfer.pending.clear()
            self._moved_at_s = time.monotonic()
            if transfer.ended:
                self._send_end(transfer)
            self._ready.notify_all()

    def refused(self, flight: Flight, header: Header, body: Mapping[str, Any]) -> None:
        """REFUSE or ABORT from the consumer."""
        what = "refused" if header.kind is FrameType.REFUSE else "aborted"
        reason = f"{self.peer.name} {what}: {text_field(body, 'reason')}"
        with self._lock:
            transfer = self._answered(flight, header)
            if transfer is not None:
                self._fail(transfer, reason, tell_peer=False)

    # The supervisor's calls

    def check(self, now_s: float, moved: Collection[Carrier]) -> list[Carrier]:
        """Apply the deadlines; returns the connections to close. `moved`: those whose peer's kernel
        took bytes.
        """
        options = self._options
        with self._lock:
            stuck: list[Carrier] = []
            for flight in self._flights:
                if flight.connection in moved:
                    flight.heard_at_s = self._moved_at_s = now_s
                elif flight.waits and now_s - flight.heard_at_s > options.progress_deadline_s:
                    stuck.append(flight.connection)
            unfinished = False
            for transfer in list(self._transfers.values()):
                age_s = now_s - transfer.opened_at_s
                if not self._flights and min(age_s, now_s - self._lost_at_s) > options.reconnect_grace_s:
                    self._fail(transfer, f"{self.peer.name} unreachable: {self._trouble or 'no answer'}")
                elif transfer.phase is not SendPhase.OPENING:
                    unfinished |= transfer.ended or transfer.acked_bytes < transfer.put_bytes
                elif age_s > options.accept_deadline_s:
                    limit_s = options.accept_deadline_s
                    self._fail(transfer, f"{self.peer.name} did not accept within {limit_s:g} s")
            # A transfer may wait long behind another's chunks, so progress is the lane's, not a transfer's.
            if not unfinished:
                self._moved_at_s = now_s
            elif now_s - self._moved_at_s > options.transfer_deadline_s:
                for transfer in list(self._transfers.values()):
                    self._fail(transfer, f"no progress for {options.transfer_deadline_s:g} s")
            return stuck

    def close(self) -> None:
        """Fail what is unfinished and let every writer end."""
        with self._lock:
            self._closing = True
            for transfer in list(self._transfers.values()):
                self._fail(transfer, "the sender shuts down")
            self._ready.notify_all()
            self._retry.notify_all()

    def load(self) -> dict[str, int]:
        """What the lane has to do: cheap enough to ask ten times a second."""
        with self._lock:
            transfers = self._transfers.values()
            return {
                "queued_bytes": sum(t.put_bytes - t.acked_bytes for t in transfers),
                "waiting_bytes": sum(span.nbytes for t in transfers for span in t.pending),
                "open_bytes": sum(t.total_bytes - t.acked_bytes for t in transfers),
                "acked_bytes": self.counters["acked_bytes"],
                "connections": len(self._flights),
            }

    def stats(self) -> dict[str, Any]:
        with self._lock:
            phases = Counter(transfer.phase.value for transfer in self._transfers.values())
            return {
                "connections": len(self._flights),
                "transfers": dict(phases),
                "queued_bytes": sum(span.nbytes for span in self._queue),
                "pending_bytes": sum(s.nbytes for t in self._transfers.values() for s in t.pending),
                "in_flight_chunks": sum(len(flight.chunks) for flight in self._flights),
                "trouble": self._trouble,
                **{name: self.counters[name] for name in _COUNTED},
            }

    # Under the lock

    def _send_end(self, transfer: OutgoingTransfer) -> None:
        body = {"total_bytes": transfer.total_bytes, "hidden_bytes": transfer.hidden_bytes}
        frame = pack_control(FrameType.END, transfer.transfer_id, body)
        self._controls.append(ControlJob(FrameType.END, transfer, frame))
        self._ready.notify()

    def _answered(self, flight: Flight, header: Header) -> OutgoingTransfer | None:
        flight.heard_at_s = time.monotonic()
        for other in self._flights:
            other.controls.pop((header.transfer_id, FrameType.OPEN), None)
        return self._transfers.get(header.transfer_id)

    def _complete_if_done(self, transfer: OutgoingTransfer) -> None:
        done = transfer.end_acked and transfer.acked_bytes == transfer.total_bytes
        if done and not transfer.phase.terminal:
            self.counters["completed"] += 1
            self._finish(transfer, SendPhase.COMPLETE)

    def _fail(self, transfer: OutgoingTransfer, reason: str, *, tell_peer: bool = True) -> None:
        if transfer.phase.terminal:
            return
        transfer.reason = reason
        self.counters["failed"] += 1
        self._finish(transfer, SendPhase.FAILED)
        if tell_peer:
            frame = pack_control(FrameType.ABORT, transfer.transfer_id, {"reason": reason[:4096]})
            self._controls.append(ControlJob(FrameType.ABORT, transfer, frame))
            self._ready.notify()

    def _finish(self, transfer: OutgoingTransfer, phase: SendPhase) -> None:
        """Forget everything about the transfer, so that its sources are not kept alive."""
        transfer.phase = phase
        del self._transfers[transfer.transfer_id]
        transfer.pending.clear()
        if any(span.transfer is transfer for span in self._queue):
            self._queue = [span for span in self._queue if span.transfer is not transfer]
            heapq.heapify(self._queue)
        if any(job.transfer is transfer for job in self._controls):
            self._controls = deque(job for job in self._controls if job.transfer is not transfer)
        for flight in self._flights:
            flight.forget(transfer)
        self._repace()
        self._quiet.notify_all()

    def _repace(self) -> None:
        self._pacer.update(self, [flight.connection for flight in self._flights] if self._transfers else [])


_COUNTED = (
    "opened",
    "completed",
    "failed",
    "connects",
    "connect_failures",
    "requeued_chunks",
    "resent_chunks",
    "acked_bytes",
)
