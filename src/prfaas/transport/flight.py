"""What one live connection has sent and not yet got an answer to."""

from dataclasses import dataclass, field
from typing import Protocol

from prfaas.transport.outgoing import OutgoingTransfer
from prfaas.transport.pacing import Paced
from prfaas.transport.span import Span
from prfaas.transport.wire import FrameType


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
