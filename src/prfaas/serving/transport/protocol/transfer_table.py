"""The consumer's table of transfers: every decision about them is made here.

Frames go to connections in the order of the decisions, so that watchers see phases in order.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from prfaas.serving.transport.protocol.ended_transfers import PartialTransfers, Tombstones
from prfaas.serving.transport.protocol.handshake import PeerIdentity
from prfaas.serving.transport.protocol.incoming import (
    ChunkPlace,
    ForeignTicketError,
    FrameSink,
    IncomingTransfer,
    OpenCheck,
    ProducerFrame,
    ProducerSession,
)
from prfaas.serving.transport.protocol.options import ReceiverOptions
from prfaas.serving.transport.protocol.region_layout import TransferLayout
from prfaas.serving.transport.protocol.staging import StagedTransfer, Staging, StagingLease
from prfaas.serving.transport.protocol.wire import (
    MAX_TRANSFER_BYTES,
    FrameType,
    Header,
    TransferPhase,
    TransferStatus,
    WireError,
    abort,
    ack,
    body_of,
    count_field,
    nack,
    pack_control,
    refuse,
    text_field,
)

_Ending = Literal["failed", "dropped", "broken"]


# The newest and the one before it: another rank, or another transfer of the ticket, may lack the newest.
_KEPT_CHECKPOINTS = 2


class Checkpoints:
    """Checkpoints of a table's transfers: states and windows after some tokens, sent while a prefill goes on.

    With such layers an engine can resume from a partial transfer only after a checkpoint. Each is a small transfer
    beside its own; once complete it is freed or handed over with that. A complete transfer may need it too, if another
    transfer of the ticket breaks.
    """

    def __init__(self, layout: TransferLayout, transfers: Mapping[bytes, IncomingTransfer]) -> None:
        """`transfers`: the table's live ones, by id."""
        self._layout = layout
        self._transfers = transfers

    def check(self, checkpoint: IncomingTransfer) -> None:
        """Check that a checkpoint may be sent; other transfers pass.

        Raises:
            WireError: its producer does not send what it is a checkpoint of.
        """
        if checkpoint.checkpoint_of is not None and self._owner(checkpoint, TransferPhase.RECEIVING) is None:
            raise WireError("the transfer that it is a checkpoint of is not under way")

    def keep(self, checkpoint: IncomingTransfer) -> None:
        """Keep a complete checkpoint: the last two that the engine could resume from stay."""
        # Its transfer may have completed before it, and can use it until it is taken.
        owner = self._owner(checkpoint, TransferPhase.RECEIVING, TransferPhase.COMPLETE)
        if owner is None:
            checkpoint.discard()
            return
        owner.checkpoints[checkpoint.ticket.num_tokens] = checkpoint
        owner.checkpoint_bytes += checkpoint.status().received_bytes
        if owner.phase is TransferPhase.COMPLETE:
            self.mark_usable(owner)
        else:
            self._keep_newest(owner)

    def under_way(self, owner: IncomingTransfer) -> list[IncomingTransfer]:
        """Checkpoints of a transfer that are not complete."""
        owner_id = owner.ticket.transfer_id
        return [each for each in self._transfers.values() if each.checkpoint_of == owner_id]

    def make_room(self, wanting: IncomingTransfer) -> bool:
        """Free a checkpoint for a transfer that is none; False if there is none to free."""
        for owner in self._transfers.values():
            if owner.checkpoints and wanting.checkpoint_of is None:
                owner.discard_checkpoints([min(owner.checkpoints)])
                if owner.phase is TransferPhase.COMPLETE:
                    self.mark_usable(owner)
                return True
        return False

    def mark_usable(self, owner: IncomingTransfer) -> None:
        """Give the status of one that has all bytes resume points, in case another rank or transfer of it breaks."""
        # A checkpoint may have come before its full attention.
        self._keep_newest(owner)
        owner.usable = owner.resume_points(self._layout)

    def _keep_newest(self, owner: IncomingTransfer) -> None:
        ends = owner.resume_points(self._layout).ends
        if len(ends) > _KEPT_CHECKPOINTS:
            owner.discard_checkpoints(
                tokens for tokens in owner.checkpoints if tokens < ends[-_KEPT_CHECKPOINTS]
            )

    def _owner(self, checkpoint: IncomingTransfer, *phases: TransferPhase) -> IncomingTransfer | None:
        """The checkpoint's transfer; None: it is in none of these phases."""
        owner = self._transfers.get(checkpoint.checkpoint_of or b"")
        if owner is None or owner.phase not in phases:
            return None
        return owner if owner.session.same(checkpoint.session) else None


class Watchers:
    """Observers' connections that watch transfers, until the final phase was sent to them."""

    def __init__(self) -> None:
        self._connections: dict[bytes, dict[FrameSink, float]] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(
        self, connection: FrameSink, transfer_id: bytes, status: TransferStatus | None, lead_s: float
    ) -> None:
        """Send the present status, if there is one, and remember the connection if more can follow.

        `lead_s`: how long before its completion the watcher wants to know of it.
        """
        if status is not None:
            connection.post(_frame(transfer_id, status))
        if status is None or not status.phase.terminal:
            self._connections.setdefault(transfer_id, {})[connection] = lead_s

    def lead_s(self, transfer_id: bytes) -> float:
        """The longest lead time of a transfer's watchers; 0: none wants to know ahead."""
        return max(self._connections.get(transfer_id, {}).values(), default=0.0)

    def has(self, connection: FrameSink, transfer_id: bytes) -> bool:
        """True if the connection still waits for a phase of the transfer."""
        return connection in self._connections.get(transfer_id, ())

    def remove(self, connection: FrameSink, transfer_ids: set[bytes]) -> None:
        """Remove a connection that is gone."""
        for transfer_id in transfer_ids:
            connections = self._connections.get(transfer_id)
            if connections is not None:
                connections.pop(connection, None)
                if not connections:
                    del self._connections[transfer_id]

    def notify(self, transfer_id: bytes, status: TransferStatus) -> None:
        """Send a new status to every connection that watches the transfer."""
        connections = self._connections.get(transfer_id)
        if connections:
            frame = _frame(transfer_id, status)
            for connection in connections:
                connection.post(frame)
            if status.phase.terminal:
                del self._connections[transfer_id]

    def clear(self) -> None:
        """Forget all."""
        self._connections.clear()


def _frame(transfer_id: bytes, status: TransferStatus) -> bytes:
    return pack_control(FrameType.STATUS, transfer_id, body_of(replace(status, reason=status.reason[:4096])))


class TransferTable:
    """All transfers of a receiver: live ones, those waiting for staging, ended ones, their watchers and producers.

    Not thread-safe; time, in seconds of a clock that never goes back, comes in with each call.

    1. A producer's connections call `connected`, then `open`, `place_chunk` and `finish_chunk` for each chunk, `end`
       or `aborted` (`take_frame`), and at last `disconnected`.
    2. `_admit` gives staging to waiting transfers, whenever some becomes free.
    3. The engine polls `state`, then calls `take` once for the complete transfer, or `drop` if it gives up. A transfer
       that has its staging can be lent to it.
    4. Observers `watch` transfers: each new phase is posted to them. `sweep` applies the deadlines.
    """

    def __init__(
        self, *, name: str, key: bytes, arena: Staging, layout: TransferLayout, options: ReceiverOptions
    ) -> None:
        self._name = name
        self._open_check = OpenCheck(name, key, layout, options)
        self._arena = arena
        self._options = options
        self._transfers: dict[bytes, IncomingTransfer] = {}
        self._checkpoints = Checkpoints(layout, self._transfers)
        self._waiting: deque[IncomingTransfer] = deque()
        self._tombstones = Tombstones(options.max_tombstones)
        self._partials = PartialTransfers(layout, options.keep_partial_s, self._tombstones)
        self.watchers = Watchers()
        self._sessions: dict[tuple[str, str], ProducerSession] = {}
        self._counters: Counter[str] = Counter()

    @property
    def staging_bytes(self) -> int:
        """Size of the staging of all transfers."""
        return self._arena.total_bytes

    # Connections

    def connected(self, identity: PeerIdentity, connection: FrameSink) -> ProducerSession:
        """Add a producer's connection, and return its session."""
        new = ProducerSession(name=identity.name, session=identity.session)
        session = self._sessions.setdefault(new.key, new)
        session.connections.append(connection)
        session.lost_at_s = None
        return session

    def disconnected(
        self, session: ProducerSession, connection: FrameSink, heard_at_s: float, trouble: str = ""
    ) -> None:
        """Remove a producer's connection, last heard of at `heard_at_s`; `trouble`: why this side closed it."""
        session.connections.remove(connection)
        if not session.connections:
            session.lost_at_s = heard_at_s
            session.trouble = trouble
        for transfer in self._transfers.values():
            # An ACCEPT may have been lost with it; a second one changes nothing.
            if transfer.session is session and transfer.phase is TransferPhase.RECEIVING:
                transfer.session.post(pack_control(FrameType.ACCEPT, transfer.ticket.transfer_id))

    def awaited(self) -> set[tuple[str, str]]:
        """Name and session of the producers with unfinished transfers, which must send heartbeats."""
        return {each.session.key for each in self._transfers.values() if not each.phase.terminal}

    # Frames of a producer

    def take_frame(self, frame: ProducerFrame) -> None:
        """Take an OPEN, END or ABORT of a producer.

        Raises:
            WireError: no honest producer would send it.
        """
        if frame.header.kind is FrameType.OPEN:
            self._open(frame)
        elif frame.header.kind is FrameType.END:
            self._end(frame)
        else:
            self._aborted(frame)

    def _open(self, frame: ProducerFrame) -> None:
        """Accept, queue for staging, or refuse with a sentence."""
        transfer_id, resumes, now_s = frame.transfer_id, frame.body.get("resume") is True, frame.now_s
        live = self._transfers.get(transfer_id)
        over = self._tombstones.get(transfer_id)
        known = live if live is not None and live.session.same(frame.session) else None
        whole = resumes and live is None and over is not None and over.phase is TransferPhase.COMPLETE
        if known is not None or whole:
            # Sent again after a lost connection; one that waits for staging is answered when it is admitted.
            if known is None or known.phase is not TransferPhase.WAITING:
                frame.connection.post(pack_control(FrameType.ACCEPT, transfer_id))
            return
        try:
            if resumes and live is None and over is None:
                raise WireError(f"{self._name} does not know the transfer: it was restarted")
            if live is not None or over is not None:
                raise WireError("this transfer id was used already")
            transfer = self._open_check.transfer(frame)
            self._check_room(transfer)
        except ValueError as error:
            self._counters["refused"] += not frame.body.get("checkpoint")
            frame.connection.post(refuse(transfer_id, str(error)))
            if live is None and over is None and not isinstance(error, ForeignTicketError):
                self.report(transfer_id, TransferStatus.refused(str(error)), frame.now_s, was_here=False)
            return
        self._counters["opened"] += transfer.checkpoint_of is None
        self._transfers[transfer_id] = transfer
        self._waiting.append(transfer)
        self.admit(now_s)
        if transfer.phase is TransferPhase.WAITING and transfer.checkpoint_of is not None:
            self._fail(transfer, "no staging is free for a checkpoint", now_s)
        elif transfer.phase is TransferPhase.WAITING:
            self.watchers.notify(transfer_id, transfer.status())

    def _check_room(self, transfer: IncomingTransfer) -> None:
        self._checkpoints.check(transfer)
        if self._arena.blocks_for(transfer.lease_bytes) > self._arena.total_blocks:
            most = self._arena.total_bytes
            raise WireError(f"{transfer.total_bytes} bytes can never fit into staging of {most}")
        if len(self._waiting) >= self._options.max_waiting:
            raise WireError(f"{len(self._waiting)} transfers wait for staging already")

    def admit(self, now_s: float) -> None:
        """Give staging to waiting transfers, since some may have become free: in order, background ones last.

        One that fits may pass an older one that does not, until that one has waited for long. Copies of prefixes and
        checkpoints may not: nobody waits for them.
        """
        while (found := self._next(now_s)) is not None:
            transfer, lease = found
            self._waiting.remove(transfer)
            transfer.accept(lease, now_s)
            transfer_id = transfer.ticket.transfer_id
            transfer.session.post(pack_control(FrameType.ACCEPT, transfer_id))
            self.watchers.notify(transfer_id, transfer.status())

    def _next(self, now_s: float) -> tuple[IncomingTransfer, StagingLease] | None:
        passes = False
        for transfer in sorted(self._waiting, key=lambda each: each.background):
            if passes and (transfer.background or transfer.checkpoint_of is not None):
                continue
            lease = self._arena.allocate(transfer.lease_bytes)
            while lease is None and (self._partials.make_room() or self._checkpoints.make_room(transfer)):
                lease = self._arena.allocate(transfer.lease_bytes)
            if lease is not None:
                return transfer, lease
            if now_s - transfer.opened_at_s > self._options.passed_for_s:
                return None
            passes = True
        return None

    def place_chunk(
        self, session: ProducerSession, connection: FrameSink, header: Header, now_s: float
    ) -> ChunkPlace | None:
        """The destination of the payload behind a DATA header.

        None: another connection, which is being shut, still writes there. Ask again once it has called `finish_chunk`
        or `abandon_chunk`.

        Raises:
            WireError: no honest sender would send this chunk; its transfer has failed already.
        """
        region, start, end = header.region, header.offset, header.offset + header.length_bytes
        transfer = self._transfers.get(header.transfer_id)
        if transfer is None:
            return ChunkPlace(header, connection, answer=self._tombstones.answer(header))
        if not transfer.session.same(session):
            raise WireError(f"{session.name} sent DATA of another producer's transfer")
        try:
            if transfer.phase is TransferPhase.WAITING:
                raise WireError("DATA came before ACCEPT")
            if transfer.is_duplicate(region, start, end):
                return ChunkPlace(header, connection, answer=ack(header))
        except WireError as error:
            self._fail(transfer, str(error), now_s)
            raise
        if (overlapping := transfer.overlapping(region, start, end)) is not None:
            # The sender gave that connection up; its late bytes must not overwrite this chunk.
            overlapping.connection.shut()
            return None
        return transfer.pin(header, connection)

    def finish_chunk(self, place: ChunkPlace, now_s: float, *, verified: bool) -> None:
        """Record and answer a chunk whose payload is in place (verified), damaged, or was discarded."""
        header = place.header
        if place.transfer is None:
            place.connection.post(place.answer if verified else nack(header))
            return
        transfer = place.transfer
        transfer.unpin(place, verified=verified, now_s=now_s)
        self._counters["received_bytes"] += header.length_bytes
        if transfer.phase is TransferPhase.FAILED:
            place.connection.post(abort(header.transfer_id, transfer.reason))
            self.admit(now_s)
        elif verified:
            transfer.session.progressed_at_s = now_s
            # Complete before the ACK, so that a transfer is complete here when its producer says so.
            self._complete_if_done(transfer, now_s)
            place.connection.post(ack(header))
            if transfer.becomes_soon(self.watchers.lead_s(header.transfer_id), now_s):
                self.watchers.notify(header.transfer_id, transfer.status())
        else:
            self._counters["checksum_failures"] += 1
            place.connection.post(nack(header))

    def abandon_chunk(self, place: ChunkPlace, now_s: float) -> None:
        """Undo `place_chunk`: the connection ended inside the payload."""
        if place.transfer is not None:
            place.transfer.unpin(place, verified=False, now_s=now_s)
            self.admit(now_s)

    def _end(self, frame: ProducerFrame) -> None:
        """The prefill is over at the producer; chunks may still be on their way."""
        header, now_s = frame.header, frame.now_s
        total = count_field(frame.body, "total_bytes", MAX_TRANSFER_BYTES)
        overlapped = count_field(frame.body, "overlapped_bytes", MAX_TRANSFER_BYTES)
        transfer = self._transfers.get(header.transfer_id)
        if transfer is None:
            frame.connection.post(self._tombstones.answer(header))
            return
        if not transfer.session.same(frame.session):
            raise WireError(f"{frame.session.name} sent END of another producer's transfer")
        if total != transfer.total_bytes or overlapped > total:
            reason = f"END says {overlapped} of {total} bytes, the transfer has {transfer.total_bytes}"
            self._fail(transfer, reason, now_s)
            raise WireError(reason)
        if not transfer.ended:
            transfer.end(overlapped)
            transfer.session.progressed_at_s = now_s
        self._complete_if_done(transfer, now_s)
        frame.connection.post(ack(header))

    def _aborted(self, frame: ProducerFrame) -> None:
        reason = f"producer aborted: {text_field(frame.body, 'reason')}"
        transfer = self._transfers.get(frame.transfer_id)
        if transfer is None and self._tombstones.get(frame.transfer_id) is None:
            # It replaces its OPEN, or has overtaken it on another connection.
            status = TransferStatus.refused(reason)
            self.report(frame.transfer_id, status, frame.now_s, was_here=False)
        # An ABORT that crossed the last byte changes nothing.
        if transfer is None or not transfer.session.same(frame.session) or transfer.phase.terminal:
            return
        self._fail(transfer, reason, frame.now_s, notify_producer=False, how="broken")

    # Observers

    def watch(self, connection: FrameSink, transfer_id: bytes, lead_s: float, now_s: float) -> None:
        """Send the present status, if there is one, each later phase, and a notice `lead_s` before the end."""
        if (transfer := self._transfers.get(transfer_id)) is not None:
            transfer.becomes_soon(lead_s, now_s)
        self.watchers.add(connection, transfer_id, self._status(transfer_id), lead_s)

    # The engine

    def live(self, transfer_id: bytes) -> IncomingTransfer | None:
        """A transfer that is waiting, arriving, or complete and not taken."""
        return self._transfers.get(transfer_id)

    def state(self, transfer_id: bytes) -> TransferStatus | None:
        """Status of a transfer, also for a while after it is over; None when the id is unknown."""
        return self._status(transfer_id, to_engine=True)

    def take(
        self,
        transfer_id: bytes,
        now_s: float,
        on_free: Callable[[StagedTransfer], None],
        *,
        broken_tokens: int = 0,
    ) -> StagedTransfer | None:
        """The staged bytes of a COMPLETE transfer, once; the caller must free them. None otherwise.

        Args:
            transfer_id: which.
            now_s: now.
            on_free: as of `StagedTransfer`.
            broken_tokens: take only the first tokens, up to this resume point (`TransferStatus.resume_points`),
                because this transfer or another one of its ticket broke.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return self._partials.take(transfer_id, broken_tokens, on_free)
        is_there = not broken_tokens or transfer.status().resume_points.allows(broken_tokens)
        if transfer.phase is not TransferPhase.COMPLETE or not is_there:
            return None
        self._record_ended(transfer, now_s, taken=True)
        self._counters["taken"] += 1
        return transfer.hand_over(on_free, broken_tokens)

    def drop(self, transfer_id: bytes, reason: str, now_s: float, *, keep: bool = False) -> None:
        """Give a transfer up: free its staging unless taken, notify the producer, refuse the id from now on.

        `keep`: a complete transfer stays, and an incomplete one becomes a partial transfer.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and not (keep and transfer.phase is TransferPhase.COMPLETE):
            self._counters["dropped"] += not keep
            self._fail(transfer, reason, now_s, how="broken" if keep else "dropped")
        elif transfer is None and self._tombstones.get(transfer_id) is None:
            self.report(transfer_id, TransferStatus.refused(reason, dropped=True), now_s)
        elif not keep:
            self._partials.forget(transfer_id)

    def report(
        self, transfer_id: bytes, status: TransferStatus, now_s: float, *, was_here: bool = True
    ) -> None:
        """Record the final status of a transfer that was never admitted, or came by NIXL, and tell its watchers."""
        until_s = now_s + self._options.tombstone_s
        self._tombstones.put(transfer_id, status, until_s, was_here=was_here)
        self.watchers.notify(transfer_id, status)

    def sweep(self, now_s: float) -> None:
        """Apply every deadline."""
        for transfer in list(self._transfers.values()):
            reason = transfer.overdue(self._options, now_s)
            if reason:
                self._counters["expired"] += transfer.phase is TransferPhase.COMPLETE
                self._counters["refused"] += transfer.phase is TransferPhase.WAITING
                self._fail(transfer, reason, now_s, how="failed" if transfer.phase.terminal else "broken")
        for session in list(self._sessions.values()):
            if session.is_lost(now_s, self._options.limits.resume_s):
                del self._sessions[session.key]
        self._tombstones.sweep(now_s)
        self._partials.sweep(now_s)
        self.admit(now_s)

    def close(self, now_s: float) -> None:
        """Fail and free everything; every connection must have ended."""
        while self._transfers:
            self._fail(next(iter(self._transfers.values())), f"{self._name} shuts down", now_s)
        self._partials.clear()
        self.watchers.clear()
        self._sessions.clear()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as observers get them."""
        phases = Counter(transfer.phase.value for transfer in self._transfers.values())
        return {
            **self._arena.gauges(),
            "transfers": {phase.value: phases[phase.value] for phase in TransferPhase},
            "tombstones": len(self._tombstones),
            "watched": len(self.watchers),
            "producer_sessions": len(self._sessions),
            **{name: self._counters[name] for name in _COUNTED},
        }

    def _status(self, transfer_id: bytes, *, to_engine: bool = False) -> TransferStatus | None:
        if (transfer := self._transfers.get(transfer_id)) is not None:
            return transfer.status()
        return self._partials.without_lost_tokens(
            transfer_id, self._tombstones.get(transfer_id), to_engine=to_engine
        )

    def _complete_if_done(self, transfer: IncomingTransfer, now_s: float) -> None:
        if transfer.phase is TransferPhase.RECEIVING and transfer.ended and transfer.covered:
            if transfer.checkpoint_of is None:
                # First, since engines read the phase and these without the lock.
                self._checkpoints.mark_usable(transfer)
            transfer.complete(now_s)
            if transfer.checkpoint_of is not None:
                self._counters["checkpoints"] += 1
                self._record_ended(transfer, now_s, taken=True)
                self._checkpoints.keep(transfer)
            else:
                self._counters["completed"] += 1
                self.watchers.notify(transfer.ticket.transfer_id, transfer.status())
            self.admit(now_s)

    def _fail(
        self,
        transfer: IncomingTransfer,
        reason: str,
        now_s: float,
        *,
        notify_producer: bool = True,
        how: _Ending = "failed",
    ) -> None:
        was, transfer_id = transfer.phase, transfer.ticket.transfer_id
        kept = how == "broken" and self._partials.keep(transfer, now_s)
        self._counters["kept"] += kept
        transfer.fail(reason, dropped=how == "dropped", kept=kept)
        self._counters["failed"] += transfer.checkpoint_of is None
        if was is TransferPhase.WAITING:
            self._waiting.remove(transfer)
        frame_of = {TransferPhase.WAITING: refuse, TransferPhase.RECEIVING: abort}.get(was)
        if notify_producer and frame_of is not None:
            transfer.session.post(frame_of(transfer_id, reason))
        self._record_ended(transfer, now_s, taken=False)
        self.watchers.notify(transfer_id, transfer.status())
        transfer.release()
        for checkpoint in self._checkpoints.under_way(transfer):
            self._fail(checkpoint, "the transfer that it is a checkpoint of has failed", now_s)
        self.admit(now_s)

    def _record_ended(self, transfer: IncomingTransfer, now_s: float, *, taken: bool) -> None:
        transfer_id = transfer.ticket.transfer_id
        del self._transfers[transfer_id]
        # As long as the ticket is good, a replayed OPEN must find the tombstone.
        until_s = max(now_s + self._options.tombstone_s, transfer.good_until_s)
        self._tombstones.put(transfer_id, transfer.status(taken=taken), until_s)


_COUNTED: tuple[str, ...] = ("opened", "refused", "completed", "taken", "failed", "dropped", "expired")
_COUNTED += ("kept", "checkpoints", "received_bytes", "checksum_failures")
