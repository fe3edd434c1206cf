"""Queue of everything on its way to one peer: transfers, chunks that its connections share, unanswered frames."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from prfaas.serving.transport.protocol.chunk_schedule import ChunkSchedule
from prfaas.serving.transport.protocol.chunk_source import ChunkSource
from prfaas.serving.transport.protocol.in_flight import (
    FILLER,
    NOBODY,
    ControlJob,
    ControlQueue,
    InFlightWindow,
)
from prfaas.serving.transport.protocol.liveness import TcpInfo, heartbeat_period_s
from prfaas.serving.transport.protocol.options import Peer, SenderOptions
from prfaas.serving.transport.protocol.outgoing import (
    Carrier,
    Chunk,
    OutgoingTransfer,
    PeerAnswer,
    SendPhase,
)
from prfaas.serving.transport.protocol.pacing import LinkPacer
from prfaas.serving.transport.protocol.peer_liveness import PeerLiveness
from prfaas.serving.transport.protocol.wire import (
    END_REGION,
    FrameType,
    Header,
    WireError,
    parse_control,
    text_field,
)

# Assumed pace of an unpaced link; only the order of transfers depends on it.
_UNPACED_BITS_PER_S = 1e10
_ALL = 1 << 20


class PeerQueue:
    """Queue that one peer's connections pull from, with the state of the peer's transfers.

    1. The engine calls `open`, then `put`, `end` or `fail`.
    2. A connection that is up calls `connected`, then `next_job` again and again, and `read_done` after each chunk.
    3. What comes over it goes to `take_frame`.
    4. After a loss, `disconnected` queues the unanswered frames again. `apply_deadlines` is called while it is `busy`.

    Not thread-safe; time, in seconds of a clock that never goes back, comes in with each call. Whom a call lets go on
    is said by `ready`, `work` and `quiets`.
    """

    def __init__(self, peer: Peer, options: SenderOptions, pacer: LinkPacer, now_s: float) -> None:
        self.peer = peer
        self._counters: Counter[str] = Counter()
        self._options = options
        self._pacer = pacer
        self._transfers: dict[bytes, OutgoingTransfer] = {}
        self._schedule = ChunkSchedule()
        self._controls = ControlQueue()
        self._windows: list[InFlightWindow] = []
        self._numbers = itertools.count()
        self.heartbeat_s = heartbeat_period_s(options.limits.silence_s)
        """While the queue is busy, each connection asks for a job at least this often."""
        self._liveness = PeerLiveness(peer.name, options, now_s)
        self._filler_frames = 0
        self._trouble = self._rejection = ""
        self.closing = False
        self.ready = 0
        """Number of connections that should ask for a job; whoever wakes them sets it to 0."""
        self.work = 0
        """Grows with each transfer: connections that wait before they try again try at once."""
        self.quiets = 0
        """Grows when a source is no longer read, or a transfer is over."""

    @property
    def busy(self) -> bool:
        return bool(self._transfers)

    @property
    def transfers(self) -> Collection[OutgoingTransfer]:
        """The open ones."""
        return self._transfers.values()

    @property
    def acked_bytes(self) -> int:
        """Acknowledged since the start; only grows."""
        return self._counters["acked_bytes"]

    @property
    def connections_up(self) -> int:
        return len(self._windows)

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

    # The engine's calls

    def open(self, transfer: OutgoingTransfer, now_s: float) -> None:
        """Begin a transfer. One that cannot be opened is FAILED, with the reason."""
        try:
            frame = transfer.open_frame()
            reason = "the sender is closed" if self.closing else self.rejection
        except WireError as error:
            reason = str(error)
        if transfer.transfer_id in self._transfers:
            reason = "this transfer is open already"
        if reason:
            transfer.fail(reason)
            return
        transfer.begin(now_s, next(self._numbers))
        if not self._transfers:
            self._liveness.begin(now_s)
        self._transfers[transfer.transfer_id] = transfer
        self._filler_frames = 0
        self._counters["opened"] += 1
        self._controls.open(transfer, frame)
        self._repace(now_s)
        # All: from now on each connection also sends its heartbeats.
        self.ready = _ALL
        self.work += 1

    def put(
        self, transfer: OutgoingTransfer, region: int, offset: int, source: ChunkSource, *, urgent: bool
    ) -> None:
        """Queue all bytes of `source` for [offset, offset + source.nbytes) of `region`; urgent ones leave first.

        Raises:
            ValueError: outside the region, or over bytes that were put already.
        """
        end, sizes = offset + source.nbytes, transfer.region_bytes
        if not 0 <= region < len(sizes):
            raise ValueError(f"region {region} is not one of the {len(sizes)} announced")
        if offset < 0 or end > sizes[region]:
            raise ValueError(f"bytes {offset}..{end} lie outside region {region} of {sizes[region]} bytes")
        if transfer.phase.terminal or end == offset:
            return
        if transfer.coverage[region].overlap_bytes(offset, end):
            raise ValueError(f"bytes {offset}..{end} of region {region} were put already")
        transfer.coverage[region].add(offset, end)
        transfer.put_bytes += end - offset
        number = next(self._numbers)
        chunk = Chunk(transfer, number, region, offset, end, base=offset, source=source, urgent=urgent)
        self._schedule.add(chunk)
        self.ready += 1 + chunk.nbytes // self._options.min_chunk_bytes

    def end(self, transfer: OutgoingTransfer, now_s: float) -> None:
        """Record the end of a prefill: its END overtakes queued data; missing bytes may still be put. Idempotent."""
        if transfer.phase.terminal or transfer.ended:
            return
        transfer.ends(now_s, self._pacer.pace_bits_per_s or _UNPACED_BITS_PER_S)
        self._schedule.place(transfer)
        if transfer.phase is SendPhase.SENDING:
            self._controls.end(transfer)
            self.ready += 1

    def fill(self, nbytes: int, now_s: float) -> None:
        """Send about `nbytes` of filler, unless transfers are open; the next transfer ends it."""
        if self._windows and not self._transfers:
            self._filler_frames = -(-nbytes // len(FILLER.frame))
            self._repace(now_s)
            self.ready = _ALL

    # The calls of a connection

    def connected(self, window: InFlightWindow, now_s: float) -> None:
        """Add a connection that is up."""
        window.sent_at_s = now_s
        for transfer in self._transfers.values() if not self._windows else ():
            if transfer.phase is SendPhase.SENDING:
                self._controls.open(transfer, transfer.open_frame(resume=True))
        self._windows.append(window)
        self._liveness.connected()
        self._rejection = self._trouble = ""
        self._counters["connects"] += 1
        self._repace(now_s)

    def disconnected(self, window: InFlightWindow, trouble: str, now_s: float) -> None:
        """Remove a connection that ended; its unanswered frames go back to the front of the queue."""
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
        self._repace(now_s)
        self.ready = _ALL

    def unreachable(self, trouble: str, answer: PeerAnswer, now_s: float) -> bool:
        """Note that a connection could not be made; a rejection fails the transfers at once.

        Returns:
            Whether it is a rejection that was not known.
        """
        self._trouble = trouble
        self._counters["connect_failures"] += 1
        if self._windows:
            return False
        before = self._rejection
        if answer is PeerAnswer.REJECTED:
            self._rejection = trouble
            for transfer in list(self._transfers.values()):
                self.fail(transfer, trouble, now_s)
        elif answer is PeerAnswer.CLOSED:
            # The engine that rejected this side has ended; the next one may be another.
            self._rejection = ""
        return self._rejection not in ("", before)

    def next_job(self, window: InFlightWindow, now_s: float) -> ControlJob | Chunk | None:
        """What a connection should send now; None: nothing, so far."""
        if self.closing or window.closed:
            return None
        if sign := window.heartbeat(now_s, self.heartbeat_s, busy=self.busy):
            return ControlJob(FrameType.PING, NOBODY, sign)
        if (job := self._controls.take()) is not None:
            window.add_control(job, now_s)
            return job
        chunk = self._schedule.take(window.connection.chunk_bytes, len(self._windows))
        if chunk is not None:
            window.add_chunk(chunk, now_s)
            chunk.transfer.reading[chunk] = window.connection
            return chunk
        if self._filler_frames:
            self._filler_frames -= 1
            self._repace(now_s)
            return FILLER
        return None

    def read_done(self, chunk: Chunk, now_s: float, error: str = "") -> bool:
        """End the use of a chunk's source, which may have failed (`error`). Returns whether to send the chunk."""
        transfer = chunk.transfer
        del transfer.reading[chunk]
        if error:
            self.fail(transfer, error, now_s)
        self.quiets += 1
        return not transfer.phase.terminal

    def close_window(self, window: InFlightWindow) -> None:
        """Note that a connection is broken: nothing more goes out on it."""
        window.closed = True
        self.ready = _ALL

    def take_frame(
        self, window: InFlightWindow, header: Header, payload: bytes | bytearray, now_s: float
    ) -> None:
        """Take a frame of the consumer.

        Raises:
            WireError: a consumer may not send it.
        """
        if header.kind is FrameType.ACK:
            self._acked(window, header, now_s)
        elif header.kind is FrameType.NACK:
            self._nacked(window, header, now_s)
        elif header.kind in (FrameType.PING, FrameType.PONG):
            # A PING is answered; a PONG confirms what was sent before its PING.
            window.heard(header)
            self.ready = _ALL
        elif header.kind is FrameType.ACCEPT:
            self._accepted(header)
        elif header.kind in (FrameType.REFUSE, FrameType.ABORT):
            self._refused(header, parse_control(header, payload), now_s)
        else:
            raise WireError(f"a consumer may not send {header.kind.name}")

    def _acked(self, window: InFlightWindow, header: Header, now_s: float) -> None:
        """Take an ACK: the consumer has verified a chunk, or received END."""
        self._liveness.progressed()
        if header.region == END_REGION:
            job = window.ends.pop(header.transfer_id, None)
            if job is not None:
                job.transfer.end_acked = True
                self._complete_if_done(job.transfer, now_s)
            return
        chunk = window.chunks.pop((header.transfer_id, header.region, header.offset), None)
        if chunk is not None:
            chunk.transfer.acked_bytes += chunk.nbytes
            self._counters["acked_bytes"] += chunk.nbytes
            self._complete_if_done(chunk.transfer, now_s)

    def _nacked(self, window: InFlightWindow, header: Header, now_s: float) -> None:
        """Take a NACK: a chunk arrived damaged and is sent again, up to `max_resends` times."""
        chunk = window.chunks.pop((header.transfer_id, header.region, header.offset), None)
        if chunk is None:
            return
        self._counters["resent_chunks"] += 1
        if chunk.resends >= self._options.max_resends:
            self.fail(chunk.transfer, f"a chunk arrived damaged {chunk.resends + 1} times", now_s)
        else:
            # A copy: the writer may still use the damaged chunk.
            self._schedule.add(replace(chunk, resends=chunk.resends + 1))
            self.ready += 1

    def _accepted(self, header: Header) -> None:
        """Take an ACCEPT: the consumer has room, so queued chunks may leave."""
        transfer = self._answered(header)
        if transfer is None or transfer.phase is not SendPhase.OPENING:
            return
        transfer.phase = SendPhase.SENDING
        self._schedule.place(transfer)
        self._liveness.progressed()
        if transfer.ended:
            self._controls.end(transfer)
        self.ready = _ALL

    def _refused(self, header: Header, body: Mapping[str, Any], now_s: float) -> None:
        """Take a REFUSE or ABORT of the consumer."""
        what = "refused" if header.kind is FrameType.REFUSE else "aborted"
        reason = f"{self.peer.name} {what}: {text_field(body, 'reason')}"
        transfer = self._answered(header)
        if transfer is not None:
            self.fail(transfer, reason, now_s, notify_peer=False)

    # The supervisor's calls

    def apply_deadlines(self, now_s: float, infos: Mapping[Carrier, TcpInfo]) -> dict[Carrier, str]:
        """Fail overdue transfers. Returns the connections to close, and why, as `PeerLiveness.look`."""
        silent = self._liveness.look(now_s, self._windows, infos)
        for window in self._windows:
            window.trouble = silent.get(window.connection, window.trouble)
        open_now = self._transfers.values()
        for transfer, reason in self._liveness.overdue(now_s, open_now, bool(self._windows), self._trouble):
            self.fail(transfer, reason, now_s)
        return silent

    def close(self, now_s: float) -> None:
        """Fail unfinished transfers and let every connection end."""
        self.closing = True
        for transfer in list(self._transfers.values()):
            self.fail(transfer, "the sender shuts down", now_s)
        self.ready = _ALL

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as observers get them."""
        transfers = self._transfers.values()
        pending_bytes = sum(transfer.waiting_bytes for transfer in transfers)
        return {
            "connections": len(self._windows),
            "transfers": dict(Counter(transfer.phase.value for transfer in transfers)),
            "queued_bytes": sum(chunk.nbytes for each in transfers for chunk in each.queued) - pending_bytes,
            "pending_bytes": pending_bytes,
            "in_flight_chunks": sum(len(window.chunks) for window in self._windows),
            "trouble": self._rejection or self._trouble,
            **{name: self._counters[name] for name in _COUNTED},
        }

    def _answered(self, header: Header) -> OutgoingTransfer | None:
        for other in self._windows:
            other.opens.pop(header.transfer_id, None)
        return self._transfers.get(header.transfer_id)

    def _complete_if_done(self, transfer: OutgoingTransfer, now_s: float) -> None:
        done = transfer.end_acked and transfer.acked_bytes == transfer.total_bytes
        if done and not transfer.phase.terminal:
            self._counters["completed"] += 1
            transfer.phase = SendPhase.COMPLETE
            self._finish(transfer, now_s)

    def fail(
        self, transfer: OutgoingTransfer, reason: str, now_s: float, *, notify_peer: bool = True
    ) -> None:
        """Give a transfer up: its chunks are dropped, an ABORT goes to the consumer. Idempotent."""
        if transfer.phase.terminal:
            return
        transfer.fail(reason)
        self._counters["failed"] += 1
        self._finish(transfer, now_s)
        if notify_peer:
            self._controls.abort(transfer)
            self.ready += 1

    def _finish(self, transfer: OutgoingTransfer, now_s: float) -> None:
        """Forget everything about a transfer that is over, so that its sources are not kept alive."""
        del self._transfers[transfer.transfer_id]
        transfer.queued.clear()
        self._controls.forget(transfer)
        for window in self._windows:
            window.forget(transfer)
        self._repace(now_s)
        self.quiets += 1

    def _repace(self, now_s: float) -> None:
        working = self._transfers or self._filler_frames
        connections = [window.connection for window in self._windows] if working else []
        background = all(transfer.service.background for transfer in self._transfers.values())
        self._pacer.update(self, connections, now_s, background=background)


_COUNTED = (
    *("opened", "completed", "failed", "connects", "connect_failures"),
    *("requeued_chunks", "resent_chunks", "acked_bytes"),
)
