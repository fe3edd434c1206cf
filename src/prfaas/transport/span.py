"""A stretch of a region that is to be sent: what the queue holds, and, once cut, what a connection carries."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.transport.source import ChunkSource

if TYPE_CHECKING:
    from prfaas.transport.outgoing import OutgoingTransfer


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
