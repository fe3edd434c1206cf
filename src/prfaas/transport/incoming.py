"""One transfer on the consumer's side: its regions, its staging, what has arrived, and its phase."""

from dataclasses import dataclass, field
from typing import Protocol

from prfaas.transport.coverage import Coverage
from prfaas.transport.options import ReceiverOptions
from prfaas.transport.staging import StagingLease
from prfaas.transport.status import TransferPhase, TransferStatus
from prfaas.transport.ticket import Ticket
from prfaas.transport.wire import WireError

_ALIGN_BYTES = 64


class FrameSink(Protocol):
    """A connection as the book of transfers sees it; neither method blocks."""

    def post(self, frame: bytes) -> None: ...

    def shut(self) -> None: ...


@dataclass(slots=True, eq=False)
class ProducerSession:
    """One running producer: all its connections, and when it was last heard."""

    name: str
    session: str
    links: list[FrameSink] = field(default_factory=list)
    lost_at_s: float | None = None
    moved_at_s: float = 0.0

    def same(self, other: "ProducerSession") -> bool:
        return (self.name, self.session) == (other.name, other.session)


@dataclass(slots=True, eq=False)
class ChunkPlace:
    """Where the payload of one DATA frame goes while it is read from the socket.

    With a transfer: into `pieces` of its staging. Without: to be drained, then answered with `answer` (an ACK
    of a doubled chunk, an ABORT for a transfer that is over).
    """

    pieces: list[memoryview]
    region: int
    start: int
    end: int
    link: FrameSink
    transfer: "IncomingTransfer | None" = None
    answer: bytes = b""


class IncomingTransfer:
    """State machine WAITING → RECEIVING → COMPLETE | FAILED. Not thread-safe: the book's lock guards it."""

    def __init__(
        self, ticket: Ticket, region_bytes: tuple[int, ...], session: ProducerSession, now_s: float
    ) -> None:
        self.ticket = ticket
        self.region_bytes = region_bytes
        self.session = session
        self.region_starts: list[int] = []
        lease_bytes = 0
        for nbytes in region_bytes:
            self.region_starts.append(lease_bytes)
            lease_bytes += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.lease_bytes = lease_bytes
        self.total_bytes = sum(region_bytes)
        self.phase = TransferPhase.WAITING
        self.reason = ""
        self.lease: StagingLease | None = None
        self.received_bytes = 0
        self.hidden_bytes = 0
        self.ended = False
        self.opened_at_s = now_s
        self.moved_at_s = now_s
        self._coverage = [Coverage() for _ in region_bytes]
        self._arriving: list[ChunkPlace] = []

    def status(self, *, taken: bool = False) -> TransferStatus:
        return TransferStatus(
            phase=self.phase,
            reason=self.reason,
            received_bytes=self.received_bytes,
            total_bytes=self.total_bytes,
            hidden_bytes=self.hidden_bytes,
            num_tokens=self.ticket.num_tokens,
            skip_tokens=self.ticket.skip_tokens,
            taken=taken,
        )

    @property
    def covered(self) -> bool:
        return self.received_bytes == self.total_bytes

    def overdue(self, options: ReceiverOptions, now_s: float) -> str:
        """Why the transfer must end now, as a sentence; "" as long as every deadline is kept."""
        session = self.session
        if self.phase is TransferPhase.COMPLETE:
            late = now_s - self.moved_at_s > options.ttl_s
            return f"nobody took it within {options.ttl_s:g} s" if late else ""
        if session.lost_at_s is not None and now_s - session.lost_at_s > options.reconnect_grace_s:
            return f"connection to {session.name} lost"
        if self.phase is TransferPhase.WAITING:
            late = now_s - self.opened_at_s > options.staging_wait_s
            return f"staging was full for {options.staging_wait_s:g} s" if late else ""
        # Its chunks may wait behind another transfer's, so after END the producer's progress counts, not its own.
        heard_at_s = max(session.moved_at_s, self.moved_at_s)
        if self.ended and now_s - heard_at_s > options.progress_deadline_s:
            return f"no progress for {options.progress_deadline_s:g} s after prefill ended"
        if now_s - self.moved_at_s > options.idle_deadline_s:
            return f"no progress for {options.idle_deadline_s:g} s"
        return ""

    def is_duplicate(self, region: int, start: int, end: int) -> bool:
        """Whether the chunk is in place already; raises WireError for a chunk that cannot belong here."""
        if region >= len(self.region_bytes):
            raise WireError(f"DATA names region {region}, the transfer has {len(self.region_bytes)}")
        if end > self.region_bytes[region] or start >= end:
            raise WireError(
                f"DATA {start}..{end} lies outside region {region} of {self.region_bytes[region]} bytes"
            )
        overlap = self._coverage[region].overlap_bytes(start, end)
        if overlap not in (0, end - start):
            # Senders re-send chunks as they cut them; writing half over verified bytes could spoil them.
            raise WireError(f"DATA {start}..{end} of region {region} is half in place already")
        return overlap > 0

    def rival(self, region: int, start: int, end: int) -> ChunkPlace | None:
        """A chunk that is arriving right now on another connection and overlaps this one."""
        for place in self._arriving:
            if place.region == region and place.start < end and start < place.end:
                return place
        return None

    def pin(self, region: int, start: int, end: int, link: FrameSink) -> ChunkPlace:
        """Hold the staging of one chunk while a connection writes into it."""
        assert self.lease is not None
        pieces = self.lease.views(self.region_starts[region] + start, end - start)
        place = ChunkPlace(pieces, region, start, end, link, transfer=self)
        self._arriving.append(place)
        return place

    def unpin(self, place: ChunkPlace, *, verified: bool, now_s: float) -> None:
        """The connection no longer writes; frees the staging if it was held back only for that."""
        self._arriving.remove(place)
        place.pieces.clear()
        if verified:
            self.received_bytes += self._coverage[place.region].add(place.start, place.end)
            self.moved_at_s = now_s
        if self.phase is TransferPhase.FAILED:
            self.release()

    def release(self) -> None:
        """Free the staging unless a connection still writes into it (then `unpin` does) or it was
        handed over.
        """
        if self.lease is not None and not self._arriving:
            self.lease.free()
            self.lease = None
