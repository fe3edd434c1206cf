"""One transfer on the producer's side: the engine's handle, and the chunks it is cut into.

The bytes of a transfer stay with the engine until a connection sends or copies them: a `ChunkSource` is a
promise to deliver them. Order of the parts below: chunk, then transfer.
"""

import enum
from collections.abc import Collection
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


class TransferQueue(Protocol):
    """The queue of a transfer as its engine uses it, through the transfer."""

    def put(
        self, transfer: "OutgoingTransfer", region: int, offset: int, source: ChunkSource, *, urgent: bool
    ) -> None: ...

    def end(self, transfer: "OutgoingTransfer") -> None: ...

    def abort(self, transfer: "OutgoingTransfer", reason: str) -> None: ...

    def recall(self, transfer: "OutgoingTransfer", timeout_s: float) -> None: ...

    def await_quiescent(self, transfer: "OutgoingTransfer", timeout_s: float) -> bool: ...


class OutgoingTransfer:
    """Handle of a transfer, as thread-safe as its queue; only `recall` and `await_quiescent` wait for the network.

    1. `put` queues bytes as the prefill computes them; `end` says that the prefill has finished.
    2. The transfer completes once all its bytes are acknowledged. The engine polls `phase`, which is cheap.
    3. `abort` gives it up. After that, and after a failure, memory behind its sources may be reused only once
       `await_quiescent` returns True.
    """

    def __init__(
        self,
        queue: TransferQueue | None,
        transfer_id: bytes,
        offer: Offer,
        opened_at_s: float,
        service: TransferClass = DEFAULT_CLASS,
        number: int = 0,
    ) -> None:
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
        self.queue = queue
        """None: it failed before it could begin."""
        self.opened_at_s = opened_at_s
        self.owner: OutgoingTransfer | None = None
        """The transfer of which it is a checkpoint; None: it is none."""
        self.ended = False
        self.end_acked = False
        self.reading: dict[Chunk, Carrier] = {}
        """Chunks whose source is in use at this moment, with the connection that uses it."""
        self.service = service
        self.place: SendOrder = order_of_open(opened_at_s, number)
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

    @classmethod
    def failed(cls, transfer_id: bytes, offer: Offer, reason: str) -> "OutgoingTransfer":
        """A transfer that failed before it could begin."""
        transfer = cls(None, transfer_id, offer, 0.0)
        transfer.reason = reason
        transfer.phase = SendPhase.FAILED
        return transfer

    def open_frame(self, *, resume: bool = False) -> bytes:
        """The OPEN frame; `resume`: the consumer has accepted the transfer before.

        Raises:
            WireError: there are too many regions.
        """
        return pack_control(FrameType.OPEN, self.transfer_id, body_of(replace(self.offer, resume=resume)))

    def put(self, region: int, offset: int, source: ChunkSource, *, urgent: bool = False) -> None:
        """Queue all bytes of `source` for [offset, offset + source.nbytes) of `region`.

        They leave in the order of `put`, but urgent ones before all others of the transfer. Ignored once it is over.

        Raises:
            ValueError: outside the region, or over bytes that were put already.
        """
        if self.queue is None:
            return
        end = offset + source.nbytes
        if not 0 <= region < len(self.region_bytes):
            raise ValueError(f"region {region} is not one of the {len(self.region_bytes)} announced")
        if offset < 0 or end > self.region_bytes[region]:
            raise ValueError(
                f"bytes {offset}..{end} lie outside region {region} of {self.region_bytes[region]} bytes"
            )
        self.queue.put(self, region, offset, source, urgent=urgent)

    def ends(self, now_s: float, bits_per_s: float) -> None:
        """For the queue only: move it to its place among transfers whose prefill has ended."""
        self.ended = True
        self.overlapped_bytes = self.acked_bytes
        self.place = order_of_ended(now_s, self.total_bytes - self.acked_bytes, bits_per_s, self.place[2])

    def end(self) -> None:
        """Report that the prefill has finished: END overtakes queued data and freezes `overlapped_bytes`. Idempotent.

        The transfer completes when every byte of every region was put and acknowledged; missing bytes may still be
        put after this.
        """
        if self.queue is not None:
            self.queue.end(self)

    def abort(self, reason: str) -> None:
        """Give up: the transfer is FAILED, its chunks are dropped, an ABORT goes to the consumer. Idempotent."""
        if self.queue is not None:
            self.queue.abort(self, reason)

    def idle(self) -> bool:
        """True if no source is needed: none is in use, and all bytes are acknowledged or the transfer is over."""
        return not self.reading and (self.phase.terminal or self.acked_bytes == self.put_bytes)

    def recall(self, timeout_s: float) -> None:
        """Wait until memory that sources have shown so far is no longer in use.

        Call it after the sources have moved to other memory. A connection that still sends from the old one after
        `timeout_s` is closed: its peer drops the incomplete chunk, which is read and sent again.
        """
        if self.queue is not None:
            self.queue.recall(self, timeout_s)

    def await_quiescent(self, timeout_s: float) -> bool:
        """Wait until the transfer is over and none of its sources is in use any more; False on timeout.

        Only after True may the memory behind the sources of an aborted or failed transfer be reused.
        """
        return True if self.queue is None else self.queue.await_quiescent(self, timeout_s)


class Carrier(Paced, Protocol):
    """A connection as its queue sees it."""

    @property
    def number(self) -> int: ...

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk to cut for it at its present rate."""

    def shut(self) -> None: ...


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """Load of a queue."""

    queued_bytes: int
    """Produced and not acknowledged yet."""
    waiting_bytes: int
    """Of `queued_bytes`: those held back until the consumer has room."""
    background_bytes: int
    """Of `queued_bytes`: those of background transfers."""
    open_bytes: int
    """`queued_bytes`, and bytes that the open transfers have still to produce."""
    acked_bytes_total: int
    """Acknowledged since the start; only grows."""
    connections_up: int

    @classmethod
    def of(
        cls, transfers: Collection[OutgoingTransfer], acked_bytes_total: int, connections_up: int
    ) -> "QueueLoad":
        """Sum the open transfers of a queue."""
        return cls(
            queued_bytes=sum(t.put_bytes - t.acked_bytes for t in transfers),
            waiting_bytes=sum(t.waiting_bytes for t in transfers),
            background_bytes=sum(t.put_bytes - t.acked_bytes for t in transfers if t.service.background),
            open_bytes=sum(t.total_bytes - t.acked_bytes for t in transfers),
            acked_bytes_total=acked_bytes_total,
            connections_up=connections_up,
        )


class PeerAnswer(enum.Enum):
    """A peer's answer to a connection that did not come up."""

    REJECTED = "rejected"
    """It will not have this side: wrong key, other layout. That stays so until one of the two restarts."""
    CLOSED = "closed"
    """Nobody listens there."""
    NOTHING = "nothing"
