"""One transfer on the producer's side, and the chunks it is cut into.

The bytes of a transfer stay with the engine until a connection sends or copies them: a `ChunkSource` is a
promise to deliver them. Order of the parts below: chunk, then transfer.
"""

import enum
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.core.link.send_order import SendOrder, order_of_ended, order_of_open
from prfaas.serving.transport.protocol.chunk_source import ChunkSource
from prfaas.serving.transport.protocol.coverage import Coverage
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.pacing import Paced
from prfaas.serving.transport.protocol.ticket import DEFAULT_CLASS, TransferClass
from prfaas.serving.transport.protocol.wire import FrameType, body_of, pack_control


@dataclass(slots=True, eq=False)
class Chunk:
    """Bytes [start, end) of one region, to be sent: urgent ones first, then by `sequence`, then by `start`."""

    transfer: "OutgoingTransfer"
    sequence: int
    """The order of `put`; it stays when a chunk is sent again on another connection."""
    region: int
    start: int
    """Offset in the region, in bytes."""
    end: int
    base: int
    """Offset in the region at which `source` begins, in bytes."""
    source: ChunkSource
    resends: int = 0
    """How often the consumer reported it damaged."""
    urgent: bool = False
    """It overtakes chunks that are not urgent."""
    whole: bool = False
    """It was sent before: it must be sent again uncut, since the consumer compares ranges."""

    def __lt__(self, other: "Chunk") -> bool:
        return (not self.urgent, self.sequence, self.start) < (not other.urgent, other.sequence, other.start)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def cut(self, nbytes: int) -> "Chunk":
        """Take at most `nbytes` off the front, as a chunk of its own; self if that is all of it."""
        if self.whole or self.end - self.start <= nbytes:
            self.whole = True
            return self
        end = self.start + nbytes
        front = replace(self, end=end, resends=0, whole=True)
        self.start = end
        return front


class SendPhase(enum.StrEnum):
    """OPENING until the consumer accepts → SENDING → COMPLETE, or FAILED from either; the last two are
    final.
    """

    OPENING = "opening"
    SENDING = "sending"
    COMPLETE = "complete"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self is SendPhase.COMPLETE or self is SendPhase.FAILED


class OutgoingTransfer:
    """State of one transfer in its peer's queue, which alone changes it; the engine's handle is a `SentTransfer`."""

    def __init__(
        self,
        transfer_id: bytes,
        offer: Offer,
        service: TransferClass = DEFAULT_CLASS,
        owner: "OutgoingTransfer | None" = None,
    ) -> None:
        """`owner`: the transfer of which it is a checkpoint; None: it is none."""
        self.transfer_id = transfer_id
        self.offer = offer
        """The fields of its OPEN."""
        self.region_bytes = offer.regions
        """Size of each region, in bytes."""
        self.total_bytes = sum(self.region_bytes)
        self.phase = SendPhase.OPENING
        self.reason = ""
        """Why it FAILED, else empty."""
        self.acked_bytes = 0
        """Bytes that lie verified at the consumer."""
        self.overlapped_bytes = 0
        """Bytes acknowledged before the prefill ended; 0 until `end`."""
        self.put_bytes = 0
        """Bytes that the engine has produced."""

        # For the queue only.
        self.owner = owner
        self.opened_at_s = 0.0
        self.ended = False
        self.end_acked = False
        self.reading: dict[Chunk, Carrier] = {}
        """Chunks whose source is in use at this moment, with the connection that uses it."""
        self.service = service
        self.place: SendOrder = order_of_open(0.0, 0)
        """Its place among the transfers of its tenant."""
        self.listed_at: SendOrder | None = None
        """Its place in the schedule; None: it is not listed."""
        self.queued: list[Chunk] = []
        """A heap of chunks to send, once the consumer has accepted."""
        self.coverage = [Coverage() for _ in self.region_bytes]

    @property
    def waiting_bytes(self) -> int:
        """Bytes put before the consumer has accepted."""
        return sum(chunk.nbytes for chunk in self.queued) if self.phase is SendPhase.OPENING else 0

    def begin(self, now_s: float, number: int) -> None:
        """Take a place in a queue, where `number` is its own."""
        self.opened_at_s = now_s
        self.place = order_of_open(now_s, number)

    def fail(self, reason: str) -> None:
        """Any phase → FAILED."""
        self.reason = reason
        self.phase = SendPhase.FAILED

    def open_frame(self, *, resume: bool = False) -> bytes:
        """The OPEN frame; `resume`: the consumer has accepted the transfer before.

        Raises:
            WireError: there are too many regions.
        """
        return pack_control(FrameType.OPEN, self.transfer_id, body_of(replace(self.offer, resume=resume)))

    def ends(self, now_s: float, bits_per_s: float) -> None:
        """Move it to its place among transfers whose prefill has ended."""
        self.ended = True
        self.overlapped_bytes = self.acked_bytes
        self.place = order_of_ended(now_s, self.total_bytes - self.acked_bytes, bits_per_s, self.place[2])

    def idle(self) -> bool:
        """True if no source is needed: none is in use, and all bytes are acknowledged or the transfer is over."""
        return not self.reading and (self.phase.terminal or self.acked_bytes == self.put_bytes)


class Carrier(Paced, Protocol):
    """A connection as its queue sees it."""

    @property
    def number(self) -> int: ...

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk to cut for it at its present rate."""

    def shut(self) -> None: ...


class PeerAnswer(enum.Enum):
    """A peer's answer to a connection that did not come up."""

    REJECTED = "rejected"
    """It will not have this side: wrong key, other layout. That stays so until one of the two restarts."""
    CLOSED = "closed"
    """Nobody listens there."""
    NOTHING = "nothing"
