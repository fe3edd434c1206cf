"""What one transfer brings of a load: to this rank, or to a sibling whose staging this rank reads."""

from dataclasses import dataclass

from prfaas.serving.engines.vllm.block_load import BlockLoad
from prfaas.serving.engines.vllm.metadata import LoadOrder
from prfaas.serving.engines.vllm.wire_layout import WireLayout
from prfaas.serving.transport.arrival import Arrival
from prfaas.serving.transport.resume_points import ResumePoints
from prfaas.serving.transport.sibling_staging import LentTransfer, SiblingStaging
from prfaas.serving.transport.wire import TransferPhase


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
        self._blocks = BlockLoad(wire, order)
        self._lent: LentTransfer | None = None
        self._ended = False

    @property
    def resume_points(self) -> ResumePoints:
        """From where the request can go on with what has come of it."""
        return ResumePoints() if self._lent is None else self._lent.resume_points

    @property
    def is_there(self) -> bool:
        """Whether all that the order loads of it can be read."""
        return self._ended or ((lent := self._claimed()) is not None and lent.is_there(self._usable_tokens))

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
        if lent.is_there(self._usable_tokens):
            if takes:
                self._blocks.finish(lent)
                self.end()
                return True
        elif lent.phase.terminal:
            why = f"that of rank {self._lender} failed: {lent.reason}"
            if lent.phase is TransferPhase.COMPLETE:
                why = f"that of rank {self._lender} has nothing after {self._usable_tokens} tokens"
            raise GivenUpError(why, ResumePoints() if self._usable_tokens else lent.resume_points)
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

    def _claimed(self) -> LentTransfer | None:
        if self._lent is None:
            self._lent = self._siblings.claim(self._lender, self._transfer_id, self._uses)
        return self._lent
