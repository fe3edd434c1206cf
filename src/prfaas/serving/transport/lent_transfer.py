"""A transfer in the staging of another rank of the same engine, as this rank reads it."""

from collections.abc import Sequence

from prfaas.serving.transport.sibling_frames import Came, Lent
from prfaas.serving.transport.staging import MappedArena, StagedRegions, StagedTransfer
from prfaas.serving.transport.wire import TransferPhase


class LentTransfer(StagedRegions):
    """A sibling's transfer, read here while it arrives and once it is complete."""

    checkpoint: StagedTransfer | None = None
    """None: layers that have checkpoints travel to each rank."""

    def __init__(self, lent: Lent, arena: MappedArena, lender: int) -> None:
        lease = arena.lease(lent.lease_bytes, lent.blocks)
        super().__init__(lease, lent.region_starts, lent.region_bytes)
        self.lender = lender
        self.transfer_id = lent.transfer_id
        self.num_tokens = lent.num_tokens
        self.skip_tokens = lent.skip_tokens
        self.phase = TransferPhase.RECEIVING
        self.reason = ""
        self._covered: tuple[tuple[tuple[int, int], ...], ...] = ((),) * len(lent.region_bytes)
        self._is_kept = False
        self.readers = 0
        """Loads that read it at this moment."""
        self.uses_left: int | None = None
        """Requests that have not loaded it yet; None: none has come."""
        self.since_s = 0.0
        """When it has ended, or was read last."""
        self.given_back = False

    def came(self, came: Came) -> None:
        """The lender tells how far it is."""
        self._covered, self._is_kept, self.reason = came.covered, came.is_kept, came.reason
        self.phase = came.phase

    def covered_end(self, region: int, start: int) -> int:
        """Where the verified bytes of a region from `start` on end, as far as the lender has told."""
        return next((end for first, end in self._covered[region] if first <= start < end), start)

    def ends(self, starts: Sequence[tuple[int, int]]) -> list[int]:
        """As `Arrival.ends`."""
        return [self.covered_end(region, start) for region, start in starts]

    def wanted_for_s(self, ttl_s: float, keep_s: float) -> float:
        """How long after its end a load may still come."""
        if self.phase is TransferPhase.COMPLETE:
            return ttl_s
        return keep_s if self._is_kept else 0.0
