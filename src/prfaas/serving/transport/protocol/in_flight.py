"""Control frames that wait for a connection, and the window of frames that a connection has in flight."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from prfaas.serving.transport.protocol.liveness import Liveness
from prfaas.serving.transport.protocol.offer import Offer
from prfaas.serving.transport.protocol.outgoing import Carrier, Chunk, OutgoingTransfer, SendPhase
from prfaas.serving.transport.protocol.wire import (
    NO_TRANSFER,
    FrameType,
    Header,
    abort,
    pack_control,
    ping,
    pong,
)

# A peer that is away for long has forgotten the transfers that failed meanwhile.
_MAX_JOBS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class ControlJob:
    """A control frame to send; OPEN and END are sent again if their connection is lost before the answer."""

    kind: FrameType
    transfer: OutgoingTransfer
    frame: bytes

    @property
    def is_early(self) -> bool:
        """True for the OPEN of a checkpoint whose transfer was not accepted yet: the consumer would refuse it."""
        owner = self.transfer.owner
        return owner is not None and owner.phase is SendPhase.OPENING and self.kind is FrameType.OPEN


NOBODY = OutgoingTransfer(NO_TRANSFER, Offer("", ()))
"""Stands for the transfer of frames that belong to none."""
_FILLER_CHARS = 60_000
FILLER = ControlJob(
    FrameType.FILLER,
    NOBODY,
    pack_control(FrameType.FILLER, body={"filler": "0" * _FILLER_CHARS}),
)
"""A frame of filler, which probes a link's bandwidth; it belongs to no transfer."""


@dataclass(slots=True, eq=False)
class InFlightWindow:
    """Frames of one live connection that are not answered yet."""

    connection: Carrier
    chunks: dict[tuple[bytes, int, int], Chunk] = field(default_factory=dict)
    """By transfer id, region and start."""
    opens: dict[bytes, ControlJob] = field(default_factory=dict)
    """OPEN frames by transfer id."""
    ends: dict[bytes, ControlJob] = field(default_factory=dict)
    """END frames by transfer id."""
    aborts: dict[int, ControlJob] = field(default_factory=dict)
    """ABORT frames by the number of the PING behind them, whose PONG confirms them."""
    liveness: Liveness = field(default_factory=Liveness)
    sent_at_s: float = 0.0
    """When the last frame was sent."""
    pings: int = 0
    """The number of the last PING."""
    pongs: int = 0
    """The number of the last PONG."""
    asked: Header | None = None
    """The peer's unanswered PING."""
    trouble: str = ""
    """Why this side closes the connection."""
    closed: bool = False
    """The connection is broken: nothing more goes out on it."""

    @property
    def awaits_answer(self) -> bool:
        """True if the peer owes an answer soon. An OPEN may wait long for staging, so it does not count."""
        return bool(self.chunks or self.ends) or self.pongs < self.pings

    def add_chunk(self, chunk: Chunk, now_s: float) -> None:
        """Record a chunk that is about to be sent."""
        self.sent_at_s = now_s
        self.chunks[chunk.transfer.transfer_id, chunk.region, chunk.start] = chunk

    def add_control(self, job: ControlJob, now_s: float) -> None:
        """Record a control frame that is about to be sent."""
        self.sent_at_s = now_s
        if job.kind is FrameType.ABORT:
            self.aborts[self.pings + 1] = job
        elif job.kind is FrameType.OPEN:
            self.opens[job.transfer.transfer_id] = job
        else:
            self.ends[job.transfer.transfer_id] = job

    def heartbeat(self, now_s: float, period_s: float, *, busy: bool) -> bytes:
        """The PONG or PING that is due now, empty if none is.

        Args:
            now_s: now.
            period_s: a PING is due this long after the last frame.
            busy: transfers are open; otherwise only an ABORT needs one.
        """
        asked, self.asked = self.asked, None
        if asked is not None:
            return pong(asked)
        if (busy and now_s - self.sent_at_s >= period_s) or self.pings + 1 in self.aborts:
            self.sent_at_s = now_s
            self.pings += 1
            return ping(self.pings)
        return b""

    def heard(self, header: Header) -> None:
        """Take a PING or a PONG."""
        if header.kind is FrameType.PING:
            self.asked = header
            return
        self.pongs = max(self.pongs, min(header.offset, self.pings))
        for before in [before for before in self.aborts if before <= self.pongs]:
            del self.aborts[before]

    def forget(self, transfer: OutgoingTransfer) -> None:
        """Drop what belongs to a transfer that is over; late answers to it are ignored."""
        for key in [key for key, chunk in self.chunks.items() if chunk.transfer is transfer]:
            del self.chunks[key]
        self.opens.pop(transfer.transfer_id, None)
        self.ends.pop(transfer.transfer_id, None)


class ControlQueue:
    """Control frames that wait for a connection, in order."""

    def __init__(self) -> None:
        self._jobs: deque[ControlJob] = deque()

    def open(self, transfer: OutgoingTransfer, frame: bytes) -> None:
        """Announce a transfer with its OPEN frame, or ask whether the consumer still knows it."""
        self._jobs.append(ControlJob(FrameType.OPEN, transfer, frame))

    def end(self, transfer: OutgoingTransfer) -> None:
        """Say that the prefill of the transfer has finished."""
        body = {"total_bytes": transfer.total_bytes, "overlapped_bytes": transfer.overlapped_bytes}
        frame = pack_control(FrameType.END, transfer.transfer_id, body)
        self._jobs.append(ControlJob(FrameType.END, transfer, frame))

    def abort(self, transfer: OutgoingTransfer) -> None:
        """Report to the consumer that the transfer failed, and why."""
        if len(self._jobs) < _MAX_JOBS:
            frame = abort(transfer.transfer_id, transfer.reason)
            self._jobs.append(ControlJob(FrameType.ABORT, transfer, frame))

    def again(self, jobs: Iterable[ControlJob]) -> None:
        """Send frames once more, before all others: they may have been lost."""
        self._jobs.extendleft(jobs)

    def take(self) -> ControlJob | None:
        """The next one that may leave; None: there is none."""
        for index, job in enumerate(self._jobs):
            if not job.is_early:
                del self._jobs[index]
                return job
        return None

    def forget(self, transfer: OutgoingTransfer) -> None:
        """The transfer is over: drop what was to be said of it."""
        if any(job.transfer is transfer for job in self._jobs):
            self._jobs = deque(job for job in self._jobs if job.transfer is not transfer)
