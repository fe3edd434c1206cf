"""One transfer on the producer's side, as the engine's connector holds it."""

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prfaas.transport.coverage import Coverage
from prfaas.transport.source import ChunkSource
from prfaas.transport.span import Span

if TYPE_CHECKING:
    from prfaas.transport.lane import Lane


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
