"""One transfer on the producer's side, as the engine's connector holds it.

Where the bytes of a chunk come from at the producer.

A stretch of a region that is to be sent: what the queue holds, and, once cut, what a connection carries.

What one live connection has sent and not yet got an answer to.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prfaas.serving.transport.coverage import Coverage
from prfaas.serving.transport.pacing import Paced
from prfaas.serving.transport.wire import FrameType

if TYPE_CHECKING:
    from prfaas.serving.transport.peer_queue import Lane


class SourceGone(Exception):
    """The bytes are no longer there (blocks were freed, the request was preempted); fails the transfer."""


class ChunkSource(Protocol):
    """`nbytes` of KV that stay the same until they are acknowledged or the transfer is over and quiescent."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy bytes [start, start + len(out)) into `out`. Called by writer threads, several at once.

        May be called more than once for the same bytes (after a lost connection). Raises SourceGone.
        """


class BytesSource:
    """Bytes that lie in host memory already."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._view[start : start + out.nbytes]


@dataclass(slots=True, eq=False)
class Span:
    """Bytes [start, end) of `region`; `source` holds them from `base` (region offset) on.

    `turn` is the order of `put`: spans go out by turn, then by start, whatever connection they were cut for
    before.
    """

    transfer: "OutgoingTransfer"
    turn: int
    region: int
    start: int
    end: int
    base: int
    source: ChunkSource
    resends: int = 0
    whole: bool = False

    def __lt__(self, other: "Span") -> bool:
        return (self.turn, self.start) < (other.turn, other.start)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def cut(self, nbytes: int) -> "Span":
        """Take a chunk of at most `nbytes` off the front; a chunk once cut stays whole when it is
        sent again.
        """
        if self.whole or self.nbytes <= nbytes:
            self.whole = True
            return self
        end = self.start + nbytes
        chunk = Span(
            self.transfer, self.turn, self.region, self.start, end, self.base, self.source, whole=True
        )
        self.start = end
        return chunk


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
        return self in (SendPhase.COMPLETE, SendPhase.FAILED)


class OutgoingTransfer:
    """Handle of a transfer; thread-safe, and no method waits for the network but `await_quiescent`.

    `phase`, `reason`, `acked_bytes` and `total_bytes` are plain attributes: cheap to read at every engine
    step. The fields below the line belong to the lane and are guarded by its lock.
    """

    def __init__(
        self, lane: "Lane | None", transfer_id: bytes, region_bytes: Sequence[int], opened_at_s: float
    ) -> None:
        self.transfer_id = transfer_id
        self.region_bytes = tuple(region_bytes)
        self.total_bytes = sum(self.region_bytes)
        self.phase = SendPhase.OPENING
        self.reason = ""
        self.acked_bytes = 0
        self.hidden_bytes = 0
        self.put_bytes = 0
        # ---
        self.lane = lane
        self.opened_at_s = opened_at_s
        self.ended = False
        self.end_acked = False
        self.reading = 0
        self.pending: list[Span] = []
        self.coverage = [Coverage() for _ in self.region_bytes]

    def put(self, region: int, offset: int, source: ChunkSource) -> None:
        """Queue all bytes of `source` for [offset, offset + source.nbytes) of `region`, behind what was put
        before.

        Ignored once the transfer is over. Raises ValueError outside the region or over bytes that were put
        already.
        """
        if self.lane is not None:
            self.lane.put(self, region, offset, source)

    def end(self) -> None:
        """Prefill has finished: END goes ahead of all queued data and freezes `hidden_bytes`. Idempotent.

        The transfer completes when every byte of every region has been put and acknowledged; what is still
        missing may be put after this.
        """
        if self.lane is not None:
            self.lane.end(self)

    def abort(self, reason: str) -> None:
        """Give up: the transfer is FAILED, queued chunks and sources are dropped, the consumer is
        told. Idempotent.
        """
        if self.lane is not None:
            self.lane.abort(self, reason)

    def idle(self) -> bool:
        """Nothing of what was put is still needed: all of it is acknowledged, or the transfer is over; and
        nothing reads a source at this moment."""
        return self.reading == 0 and (self.phase.terminal or self.acked_bytes == self.put_bytes)

    def await_quiescent(self, timeout_s: float) -> bool:
        """Wait until the transfer is over and no `read_into` of it runs or will run again; False on timeout.

        Only after True may the memory behind the sources of an aborted or failed transfer be reused.
        """
        return True if self.lane is None else self.lane.await_quiescent(self, timeout_s)

    @classmethod
    def stillborn(cls, transfer_id: bytes, region_bytes: Sequence[int], reason: str) -> "OutgoingTransfer":
        """A transfer that failed before it could begin."""
        transfer = cls(None, transfer_id, region_bytes, 0.0)
        transfer.reason = reason
        transfer.phase = SendPhase.FAILED
        return transfer


class Carrier(Paced, Protocol):
    """A connection as its lane sees it."""

    @property
    def number(self) -> int: ...

    def shut(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class ControlJob:
    """A control frame to send; OPEN and END are sent again if their connection is lost before the answer."""

    kind: FrameType
    transfer: OutgoingTransfer
    frame: bytes


@dataclass(slots=True, eq=False)
class Flight:
    """What one live connection carries unanswered; guarded by its lane's lock."""

    connection: Carrier
    chunks: dict[tuple[bytes, int, int], Span] = field(default_factory=dict)
    controls: dict[tuple[bytes, FrameType], ControlJob] = field(default_factory=dict)
    heard_at_s: float = 0.0
    ended: bool = False

    @property
    def waits(self) -> bool:
        """Whether an answer is due soon (an OPEN may wait long for staging, so it does not count)."""
        return bool(self.chunks) or any(kind is FrameType.END for _, kind in self.controls)

    def forget(self, transfer: OutgoingTransfer) -> None:
        """Drop what belongs to a transfer that is over; late answers to it are ignored."""
        for key in [key for key, span in self.chunks.items() if span.transfer is transfer]:
            del self.chunks[key]
        for kind in (FrameType.OPEN, FrameType.END):
            self.controls.pop((transfer.transfer_id, kind), None)
