"""What one transfer brings of a load: to this rank, or to a sibling whose staging this rank reads."""

from dataclasses import dataclass

from prfaas.serving.engines.vllm.block_load import BlockLoad
from prfaas.serving.engines.vllm.metadata import LoadOrder
from prfaas.serving.engines.vllm.wire_layout import WireLayout
from prfaas.serving.transport.io.received_transfers import Arrival
from prfaas.serving.transport.io.sibling_staging import LentTransfer, SiblingStaging
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.wire import TransferPhase


class GivenUpError(Exception):
    """A load that will not be: the transfer is gone, late or of no use."""

    def __init__(
        self, obstacle: str, usable: ResumePoints = ResumePoints(), *, unwanted: bool = False
    ) -> None:
        super().__init__(obstacle)
        self.usable = usable
        self.unwanted = unwanted


@dataclass(slots=True, eq=False)
class LoadPart:
    """What one transfer brings of a load: all of it, or some heads where more ranks of the producer have them."""

    transfer_id: bytes
    blocks: BlockLoad | None = None
    """None: nothing was loaded yet."""
    arrival: Arrival | None = None
    """The transfer while it arrives; None before and after that."""
    loaded_bytes: int | None = None
    """None: it has not ended."""
    borrowed: "BorrowedPart | None" = None
    """It is a transfer to a sibling; None: to this rank."""


class BorrowedPart:
    """The part of a load that is read out of a sibling's staging. The loading thread's own."""

    def __init__(
        self, siblings: SiblingStaging, lender: int, transfer_id: bytes, wire: WireLayout, order: LoadOrder
    ) -> None:
        """
        Args:
            siblings: lends it.
            lender: the sibling's rank.
            transfer_id: of the transfer to the sibling.
            wire: what this rank reads of it.
            order: the load.
        """
        self._siblings = siblings
        self._lender = lender
        self._transfer_id = transfer_id
        self._usable_tokens = order.usable_tokens
        self._uses = order.ticket.attributes.uses
        self._wire = wire
        self._blocks = BlockLoad(wire, order)
        self._lent: LentTransfer | None = None
        self._ended = False

    @property
    def resume_points(self) -> ResumePoints:
        """From where the request can go on with what has come of it."""
        lent = self._claimed()
        return ResumePoints() if lent is None else ResumePoints(self._come_tokens(lent))

    @property
    def is_there(self) -> bool:
        """Whether all that the order loads of it can be read."""
        if self._ended:
            return True
        lent = self._claimed()
        return lent is not None and self._has_come(lent)

    def load(self, *, takes: bool) -> bool:
        """Fill what is there; True once that is all of it, and it was checked. `takes`: it may end.

        Raises:
            GivenUpError: it will not come.
            PageDigestError: a page is another one.
        """
        lent = self._claimed()
        if lent is None:
            if self._siblings.is_refused(self._lender, self._transfer_id):
                raise GivenUpError(f"rank {self._lender} has its transfer no more")
            return False
        if self._has_come(lent):
            if takes:
                self._blocks.finish(lent)
                self.end()
            return takes
        if lent.phase.terminal:
            raise GivenUpError(f"that of rank {self._lender} failed: {lent.reason}", self.resume_points)
        if not self._usable_tokens:
            self._blocks.fill_arrived(lent)
        return False

    def end(self, *, used: bool = True) -> None:
        """Read no more of it; idempotent. `used`: the request won't ask again."""
        if self._ended:
            return
        self._ended = True
        self._blocks.flush()
        if self._lent is not None:
            self._siblings.release(self._lent, used=used)
        elif used:
            self._siblings.refuse(self._lender, self._transfer_id)

    def _has_come(self, lent: LentTransfer) -> bool:
        if self._usable_tokens:
            return self._come_tokens(lent) >= self._usable_tokens
        return lent.phase is TransferPhase.COMPLETE

    def _come_tokens(self, lent: LentTransfer) -> int:
        if not lent.region_bytes:
            return 0
        return self._wire.lent_tokens(lent.num_tokens, lent.skip_tokens, lent.covered_end)

    def _claimed(self) -> LentTransfer | None:
        if self._lent is None:
            self._lent = self._siblings.claim(self._lender, self._transfer_id, self._uses)
        return self._lent
