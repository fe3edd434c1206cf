"""One transfer on the consumer's side: its regions, its staging, what has arrived, and its phase.

None of the classes here is thread-safe: they belong to a transfer table.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prfaas.serving.transport.protocol.coverage import Coverage
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.options import ReceiverOptions
from prfaas.serving.transport.protocol.region_layout import TransferLayout, expected_regions, resume_points
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.staging import StagedTransfer, StagingLease
from prfaas.serving.transport.protocol.ticket import Ticket, TicketError, checkpoint_id, part_id
from prfaas.serving.transport.protocol.wire import (
    MAX_REGION_BYTES,
    MAX_REGIONS,
    Header,
    TransferPhase,
    TransferStatus,
    WireError,
    read_body,
)

MAX_PIECES = 1 << 16
"""Most intervals in which a transfer's arrived bytes may lie; an honest producer needs few per region."""
_ALIGN_BYTES = 64


class FrameSink(Protocol):
    """A connection as the transfer table sees it; neither method blocks."""

    def post(self, frame: bytes) -> None:
        """Send a frame soon."""

    def shut(self) -> None:
        """Break the connection."""


@dataclass(slots=True, eq=False)
class ProducerSession:
    """One running producer with all its connections."""

    name: str
    session: str
    """New with each start of the producer."""
    connections: list[FrameSink] = field(default_factory=list)
    lost_at_s: float | None = None
    """When its last connection ended, or had its last heartbeat; None while it has one."""
    trouble: str = ""
    """Why this side closed its last connection; empty if it was lost."""
    progressed_at_s: float = 0.0
    """When an END or data last came of any of its transfers."""

    @property
    def key(self) -> tuple[str, str]:
        """Name and session."""
        return self.name, self.session

    def post(self, frame: bytes) -> None:
        """Send a frame on every connection: any of them may be dead unnoticed, and a second copy changes nothing."""
        for connection in self.connections:
            connection.post(frame)

    def same(self, other: "ProducerSession") -> bool:
        """True if both are the same run of the same producer."""
        return self is other or self.key == other.key

    def is_lost(self, now_s: float, resume_s: float) -> bool:
        """True if it has had no connection and no heartbeat for longer than `resume_s`."""
        return self.lost_at_s is not None and now_s - self.lost_at_s > resume_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerFrame:
    """An OPEN, END or ABORT as it comes in."""

    session: ProducerSession
    connection: FrameSink
    header: Header
    body: Mapping[str, Any]
    now_s: float
    unix_s: float
    """The world's time, which tickets expire by."""

    @property
    def transfer_id(self) -> bytes:
        return self.header.transfer_id


@dataclass(slots=True, eq=False)
class ChunkPlace:
    """Destination of one DATA frame's payload while it is read from the socket."""

    header: Header
    """Of the frame: transfer, region, offset and length in bytes."""
    connection: FrameSink
    transfer: "IncomingTransfer | None" = None
    """None: the payload is discarded."""
    pieces: list[memoryview] = field(default_factory=list)
    """The chunk's memory in staging, in order; empty without a transfer."""
    spared_bytes: int = 0
    """Bytes that compression saved on the link."""
    answer: bytes = b""
    """Without a transfer: the frame to answer with (ACK of a doubled chunk, ABORT of a transfer that is over)."""


class IncomingTransfer:
    """State machine of one transfer: WAITING → RECEIVING → COMPLETE | FAILED.

    1. `accept` gives it staging. For each chunk, `is_duplicate` and `overlapping` check it, `pin` holds its place while
       a connection writes, `unpin` records it if it was verified.
    2. `end` records the producer's END. When all bytes are `covered`, the table calls `complete`.
    3. `hand_over` makes the staging the engine's; `fail` and then `release` give it back.
    4. Meanwhile the engine may read it, and so may other processes (`lend`).
    """

    def __init__(
        self,
        ticket: Ticket,
        region_bytes: tuple[int, ...],
        session: ProducerSession,
        now_s: float,
        uncounted_regions: int = 0,
        cached_tokens: int | None = None,
    ) -> None:
        """`uncounted_regions`: see `ReceiverOptions`; `cached_tokens`: see `TransferStatus`."""
        self.ticket = ticket
        self.region_bytes = region_bytes
        self.session = session
        self.region_starts: list[int] = []
        """Offset of each region in the lease, in bytes."""
        lease_bytes = 0
        for nbytes in region_bytes:
            self.region_starts.append(lease_bytes)
            lease_bytes += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.lease_bytes = lease_bytes
        self.total_bytes = sum(region_bytes)
        self.phase = TransferPhase.WAITING
        self.reason = ""
        self.lease: StagingLease | None = None
        """Its staging: from RECEIVING until it is handed over or freed."""
        self.received_bytes = 0
        """Verified bytes in staging."""
        self._counted_regions = len(region_bytes) - uncounted_regions
        self._uncounted_bytes = sum(region_bytes[self._counted_regions :])
        self._received_uncounted_bytes = 0
        self._spared_bytes = 0
        self.overlapped_bytes = 0
        """Bytes acknowledged before the prefill ended."""
        self.ended = False
        """END has come."""
        self.good_until_s = now_s
        """When its ticket expires."""
        self.usable = ResumePoints()
        """Tokens after which an engine can resume: of a partial transfer, or a complete one beside a partial one."""
        self.opened_at_s = now_s
        self.progressed_at_s = now_s
        """When the phase last changed or a verified chunk last came."""
        self._accepted_at_s = self._computed_from_s = now_s
        self._cached_tokens = cached_tokens
        held_tokens = min(cached_tokens or 0, ticket.num_tokens) - ticket.skip_tokens
        self._cached_bytes = self.total_bytes * max(held_tokens, 0) // ticket.num_tokens
        self._soon = self._dropped = False
        self.checkpoint_of: bytes | None = None
        """Id of the transfer that this one is a checkpoint of; None: it is none."""
        self.checkpoints: dict[int, IncomingTransfer] = {}
        """Complete checkpoints, from which an engine can resume if this one breaks, by their tokens."""
        self.checkpoint_bytes = 0
        """Bytes of all checkpoints that have come, without their pages' digests."""
        self._coverage = [Coverage() for _ in region_bytes]
        self._pieces = 0
        self._arriving: list[ChunkPlace] = []
        self._readers: list[Callable[[], None]] = []

    def status(self, *, taken: bool = False) -> TransferStatus:
        """A snapshot; `taken`: the engine owns the staged bytes."""
        return TransferStatus(
            phase=self.phase,
            reason=self.reason,
            received_bytes=self.received_bytes - self._received_uncounted_bytes,
            total_bytes=self.total_bytes - self._uncounted_bytes,
            overlapped_bytes=self.overlapped_bytes,
            num_tokens=self.ticket.num_tokens,
            skip_tokens=self.ticket.skip_tokens,
            taken=taken,
            soon=self._soon,
            cached_tokens=self._cached_tokens,
            dropped=self._dropped,
            spared_bytes=self._spared_bytes,
            usable_tokens=self.usable.tokens,
            checkpoint_bytes=self.checkpoint_bytes,
            usable_ends=self.usable.ends,
        )

    def accept(self, lease: StagingLease, now_s: float) -> None:
        """WAITING → RECEIVING: it has its staging."""
        self.lease = lease
        self.phase = TransferPhase.RECEIVING
        self._accepted_at_s = self._computed_from_s = self.progressed_at_s = now_s

    def complete(self, now_s: float) -> None:
        """RECEIVING → COMPLETE."""
        self.phase = TransferPhase.COMPLETE
        self.progressed_at_s = now_s
        self._notify_readers()

    def fail(self, reason: str, *, dropped: bool = False, kept: bool = False) -> None:
        """Any phase → FAILED; `dropped`: no longer wanted here; `kept`: its staging stays, as a partial transfer."""
        if not kept:
            self.usable = ResumePoints()
        # The reason first: the table's `state` reads without the lock.
        self.reason, self._dropped = reason, dropped
        self.phase = TransferPhase.FAILED
        self._notify_readers()

    def hand_over(self, on_free: Callable[[StagedTransfer], None], tokens: int = 0) -> StagedTransfer:
        """Make the staging the engine's, with the checkpoint after `tokens`; `on_free`: see `StagedTransfer`."""
        lease, self.lease = self.lease, None
        assert lease is not None
        checkpoint = self.checkpoints.pop(tokens, None)
        self.discard_checkpoints(self.checkpoints)
        return StagedTransfer(
            ticket=self.ticket,
            region_starts=self.region_starts,
            region_bytes=self.region_bytes,
            lease=lease,
            on_free=on_free,
            checkpoint=None if checkpoint is None else checkpoint.hand_over(on_free),
        )

    def lend(self, on_change: Callable[[], None]) -> StagingLease:
        """The staging, to be read until the reader frees it, whatever becomes of the transfer.

        `on_change` is called at each change.
        """
        assert self.lease is not None
        self.lease.share()
        self._readers.append(on_change)
        return self.lease

    def _notify_readers(self) -> None:
        for on_change in self._readers:
            on_change()

    def end(self, overlapped_bytes: int) -> None:
        """Record END, with the bytes that were acknowledged before it."""
        if not self.ended:
            self.ended = True
            # The producer counts what it has sent of digests before its last chunk; a status counts KV alone.
            self.overlapped_bytes = max(overlapped_bytes - self._received_uncounted_bytes, 0)

    def becomes_soon(self, lead_s: float, now_s: float) -> bool:
        """True, once, when its pace so far says that it completes within `lead_s`.

        Before END the producer's cached tokens say nothing of its pace, so only bytes after as many as theirs count.
        Half of what counts must be there, so that a few chunks do not decide.
        """
        if self._soon or self.phase is not TransferPhase.RECEIVING:
            return False
        cached_bytes = 0 if self.ended else self._cached_bytes
        received_bytes, since_s = self.received_bytes - cached_bytes, self._accepted_at_s
        if cached_bytes:
            if received_bytes <= 0:
                self._computed_from_s = now_s
            since_s = self._computed_from_s
        left_bytes = self.total_bytes - self.received_bytes
        if lead_s > 0 and left_bytes <= received_bytes:
            self._soon = left_bytes * (now_s - since_s) <= lead_s * received_bytes
        return self._soon

    def covered_end(self, region: int, start: int) -> int:
        """End of the verified bytes of a region that begin at `start`."""
        return self._coverage[region].end_from(start)

    def covered_ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """All verified bytes, by region."""
        return tuple(coverage.ranges() for coverage in self._coverage)

    def resume_points(self, layout: TransferLayout) -> ResumePoints:
        """Tokens after which an engine could resume if this transfer broke now, or another one of its ticket."""
        return resume_points(layout, self.ticket, self.covered_end, self.checkpoints)

    @property
    def background(self) -> bool:
        """True if it comes after all others."""
        return self.ticket.attributes.service.background

    @property
    def covered(self) -> bool:
        """True if every byte of every region is in place."""
        return self.received_bytes == self.total_bytes

    def overdue(self, options: ReceiverOptions, now_s: float) -> str:
        """The missed deadline, as a sentence; "" if there is none."""
        session = self.session
        if self.phase is TransferPhase.FAILED:
            return ""
        if self.phase is TransferPhase.COMPLETE:
            late = now_s - self.progressed_at_s > options.limits.staging_ttl_s
            return f"nobody took it within {options.limits.staging_ttl_s:g} s" if late else ""
        if session.is_lost(now_s, options.limits.resume_s):
            return (
                f"{session.name} is silent: {session.trouble}"
                if session.trouble
                else f"connection to {session.name} lost"
            )
        if self.phase is TransferPhase.WAITING:
            late = now_s - self.opened_at_s > options.limits.staging_wait_s
            return f"staging was full for {options.limits.staging_wait_s:g} s" if late else ""
        if not self.ended:
            late = now_s - self.progressed_at_s > options.idle_deadline_s
            return f"no progress for {options.idle_deadline_s:g} s" if late else ""
        # Its chunks may wait behind another transfer's, so after END the producer's progress counts, not its own.
        heard_at_s = max(session.progressed_at_s, self.progressed_at_s)
        late = now_s - heard_at_s > options.limits.progress_deadline_s
        return f"no progress for {options.limits.progress_deadline_s:g} s after prefill ended" if late else ""

    def is_duplicate(self, region: int, start: int, end: int) -> bool:
        """True if the chunk is in place already.

        Raises:
            WireError: the chunk cannot belong to this transfer.
        """
        if region >= len(self.region_bytes):
            raise WireError(f"DATA names region {region}, the transfer has {len(self.region_bytes)}")
        if end > self.region_bytes[region] or start >= end:
            raise WireError(
                f"DATA {start}..{end} lies outside region {region} of {self.region_bytes[region]} bytes"
            )
        if self._pieces > MAX_PIECES:
            raise WireError(f"what has come lies in more than {MAX_PIECES} pieces")
        overlap = self._coverage[region].overlap_bytes(start, end)
        if overlap not in (0, end - start):
            # Senders re-send chunks as they cut them; writing half over verified bytes could spoil them.
            raise WireError(f"DATA {start}..{end} of region {region} is half in place already")
        return overlap > 0

    def overlapping(self, region: int, start: int, end: int) -> ChunkPlace | None:
        """A chunk that overlaps this one and is arriving on another connection at this moment; None: there is none."""
        for place in self._arriving:
            other = place.header
            if other.region == region and other.offset < end and start < other.offset + other.length_bytes:
                return place
        return None

    def pin(self, header: Header, connection: FrameSink) -> ChunkPlace:
        """Hold the staging of one chunk while `connection` writes into it."""
        assert self.lease is not None
        pieces = self.lease.views(self.region_starts[header.region] + header.offset, header.length_bytes)
        place = ChunkPlace(header, connection, self, pieces)
        self._arriving.append(place)
        return place

    def unpin(self, place: ChunkPlace, *, verified: bool, now_s: float) -> None:
        """End a `pin`, recording verified bytes; frees the staging if it was kept only for that."""
        self._arriving.remove(place)
        place.pieces.clear()
        if verified:
            start, region = place.header.offset, place.header.region
            coverage = self._coverage[region]
            self._pieces -= len(coverage)
            new_bytes = coverage.add(start, start + place.header.length_bytes)
            self._pieces += len(coverage)
            self.received_bytes += new_bytes
            if region >= self._counted_regions:
                self._received_uncounted_bytes += new_bytes
            elif new_bytes:
                self._spared_bytes += place.spared_bytes
            self.progressed_at_s = now_s
            self._notify_readers()
        if self.phase is TransferPhase.FAILED:
            self.release()

    def release(self) -> None:
        """Free the staging, unless it was handed over or is kept (`PartialTransfers`).

        While a connection writes into it, `unpin` frees it later.
        """
        if self.lease is not None and not self.is_used and not self.usable.tokens:
            self.lease.free()
            self.lease = None
            self.discard_checkpoints(self.checkpoints)

    def discard(self) -> None:
        """Drop a complete checkpoint that is not needed any more."""
        self.fail("it is not needed any more", dropped=True)
        self.release()

    def discard_checkpoints(self, ends: Iterable[int]) -> None:
        """Drop the checkpoints after these numbers of tokens."""
        for tokens in tuple(ends):
            self.checkpoints.pop(tokens).discard()

    @property
    def is_used(self) -> bool:
        """True if a connection writes into its staging."""
        return bool(self._arriving)


class ForeignTicketError(TicketError):
    """The ticket is another producer's: what its holder says of the transfer is nothing to that."""


@dataclass(frozen=True, slots=True)
class OpenCheck:
    """Check of an OPEN: its ticket, the names in it, and the regions that both sides expect."""

    name: str
    """The consumer's."""
    key: bytes
    """Of the deployment, 32 bytes."""
    layout: TransferLayout
    """Gives the regions that the consumer expects."""
    options: ReceiverOptions

    def transfer(self, frame: ProducerFrame) -> IncomingTransfer:
        """The transfer that an OPEN opens, if its ticket allows it.

        Raises:
            ValueError: with the sentence to refuse the OPEN with.
        """
        offer, session = read_body(Offer, frame.body), frame.session
        ticket = Ticket.unseal(offer.ticket, self.key, frame.unix_s)
        whole_id = part_id(ticket.transfer_id, offer.part)
        if checkpoint_id(whole_id, offer.checkpoint) != frame.transfer_id:
            raise TicketError("ticket belongs to another transfer")
        if not _is_rank_of(self.name, ticket.consumer):
            raise TicketError(f"ticket names consumer {ticket.consumer}, this is {self.name}")
        if not _is_rank_of(session.name, ticket.producer):
            raise ForeignTicketError(f"ticket names producer {ticket.producer}, the peer is {session.name}")
        ours = expected_regions(self.layout, ticket, offer, session.name)
        if len(ours) > MAX_REGIONS or not all(0 <= nbytes <= MAX_REGION_BYTES for nbytes in ours):
            raise WireError("this side's own regions are out of bounds")
        _raise_if_different(ours, offer.regions, self.name, session.name)
        if offer.checkpoint:
            ticket = replace(ticket, num_tokens=offer.checkpoint, skip_tokens=0)
        transfer = IncomingTransfer(
            *(replace(ticket, transfer_id=frame.transfer_id), ours, session, frame.now_s),
            uncounted_regions=self.options.uncounted_regions,
            cached_tokens=offer.cached_tokens,
        )
        transfer.checkpoint_of = whole_id if offer.checkpoint else None
        transfer.good_until_s = frame.now_s + ticket.expires_at_s - frame.unix_s
        return transfer


def _is_rank_of(name: str, instance: str) -> bool:
    """True if `name` is `instance` itself or one of its ranks ("pd-0/1" of "pd-0")."""
    return name == instance or name.rpartition("/")[0] == instance


def _raise_if_different(ours: tuple[int, ...], theirs: tuple[int, ...], name: str, peer: str) -> None:
    if len(ours) != len(theirs):
        raise WireError(f"{peer} announced {len(theirs)} regions, {name} expects {len(ours)}")
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            raise WireError(f"{peer} announced {other} bytes in region {index}, {name} expects {mine}")
