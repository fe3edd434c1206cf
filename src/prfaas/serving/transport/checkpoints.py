"""Checkpoints at the consumer: what layers with a state or a window hold after some tokens of a transfer.

With such layers an engine can't go on from just any token of a transfer that broke. A checkpoint is a small transfer
beside that one, sent while its prefill goes on. Once complete it belongs to the transfer: it is freed with it, or
handed over with it. A complete transfer has use for it too, for another part of the KV may break.
"""

from collections.abc import Mapping

from prfaas.serving.transport.incoming import IncomingTransfer
from prfaas.serving.transport.region_layout import TransferLayout
from prfaas.serving.transport.wire import TransferPhase, WireError

# The newest, and the one before it: another part, or another rank of the engine, may not have got the newest.
_KEPT = 2


class Checkpoints:
    """Those of the transfers of one table. Not thread-safe: the table's lock guards them."""

    def __init__(self, layout: TransferLayout, transfers: Mapping[bytes, IncomingTransfer]) -> None:
        """`transfers`: the table's live ones, by id."""
        self._layout = layout
        self._transfers = transfers

    def check(self, checkpoint: IncomingTransfer) -> None:
        """Whether a transfer may be sent, if it is a checkpoint.

        Raises:
            WireError: its producer does not send what it is a checkpoint of.
        """
        if checkpoint.checkpoint_of is not None and self._owner(checkpoint, TransferPhase.RECEIVING) is None:
            raise WireError("the transfer that it is a checkpoint of is not under way")

    def keep(self, checkpoint: IncomingTransfer) -> None:
        """One has come: of those that the engine could go on from now the last two stay."""
        # Its transfer may have been the faster one, and has use for it until it is taken.
        owner = self._owner(checkpoint, TransferPhase.RECEIVING, TransferPhase.COMPLETE)
        if owner is None:
            checkpoint.discard()
            return
        owner.checkpoints[checkpoint.ticket.num_tokens] = checkpoint
        owner.checkpoint_bytes += checkpoint.status().received_bytes
        if owner.phase is TransferPhase.COMPLETE:
            self.mark_usable(owner)
        else:
            self._keep_newest(owner)

    def under_way(self, owner: IncomingTransfer) -> list[IncomingTransfer]:
        """Those of a transfer that have not come."""
        owner_id = owner.ticket.transfer_id
        return [each for each in self._transfers.values() if each.checkpoint_of == owner_id]

    def make_room(self, wanting: IncomingTransfer) -> bool:
        """Free one for a transfer that is no checkpoint; False if there is none."""
        for owner in self._transfers.values():
            if owner.checkpoints and wanting.checkpoint_of is None:
                owner.discard_checkpoints([min(owner.checkpoints)])
                if owner.phase is TransferPhase.COMPLETE:
                    self.mark_usable(owner)
                return True
        return False

    def mark_usable(self, owner: IncomingTransfer) -> None:
        """A transfer is complete: its status says from where an engine can go on if another part or rank breaks."""
        # A checkpoint may have come before its full attention.
        self._keep_newest(owner)
        owner.usable = owner.resume_points(self._layout)

    def _keep_newest(self, owner: IncomingTransfer) -> None:
        ends = owner.resume_points(self._layout).ends
        if len(ends) > _KEPT:
            owner.discard_checkpoints(tokens for tokens in owner.checkpoints if tokens < ends[-_KEPT])

    def _owner(self, checkpoint: IncomingTransfer, *phases: TransferPhase) -> IncomingTransfer | None:
        """None: it is in none of these phases."""
        owner = self._transfers.get(checkpoint.checkpoint_of or b"")
        if owner is None or owner.phase not in phases:
            return None
        return owner if owner.session.same(checkpoint.session) else None
