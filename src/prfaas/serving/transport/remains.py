"""What has come of transfers that broke: kept for a while, since an engine can go on from it.

Not thread-safe: the transfer table's lock guards it.
"""

from collections.abc import Callable
from dataclasses import replace

from prfaas.serving.transport.incoming import IncomingTransfer
from prfaas.serving.transport.region_layout import TransferLayout
from prfaas.serving.transport.resume_points import ResumePoints
from prfaas.serving.transport.staging import StagedTransfer
from prfaas.serving.transport.tombstones import Tombstones
from prfaas.serving.transport.wire import TransferStatus


class Remains:
    """Broken transfers with their staging, the oldest first.

    They are in nobody's way: who needs their staging has it.
    """

    def __init__(self, layout: TransferLayout, keep_s: float, tombstones: Tombstones) -> None:
        """`keep_s`: an engine that has not taken one by then does not want it. `tombstones`: learn of what is taken."""
        self._layout = layout
        self._keep_s = keep_s
        self._tombstones = tombstones
        self._kept: dict[bytes, tuple[IncomingTransfer, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, transfer: IncomingTransfer, now_s: float) -> bool:
        """Keep what has come of a transfer that is about to fail. False: nobody could go on from it."""
        if transfer.lease is None or transfer.checkpoint_of is not None:
            return False
        transfer.usable = transfer.resume_points(self._layout)
        transfer.discard_checkpoints(transfer.checkpoints.keys() - set(transfer.usable.ends))
        if transfer.usable.tokens:
            self._kept[transfer.ticket.transfer_id] = (transfer, now_s + self._keep_s)
        return bool(transfer.usable.tokens)

    def take(self, transfer_id: bytes, tokens: int, on_free: Callable[[], None]) -> StagedTransfer | None:
        """Hand the staging over, once, to go on after `tokens`.

        None while a connection still writes into it, or the engine reads it; and where it can't go on from there.
        """
        found = self._kept.get(transfer_id)
        if found is None or found[0].is_used or not found[0].status().resume_points.allows(tokens):
            return None
        del self._kept[transfer_id]
        self._tombstones.mark_taken(transfer_id)
        return found[0].hand_over(on_free, tokens)

    def forget(self, transfer_id: bytes) -> bool:
        """Nobody will take it. Returns whether it was kept."""
        found = self._kept.pop(transfer_id, None)
        if found is not None:
            found[0].usable = ResumePoints()
            found[0].release()
        return found is not None

    def as_it_is(
        self, transfer_id: bytes, status: TransferStatus | None, *, to_engine: bool
    ) -> TransferStatus | None:
        """The status of a transfer that is over, without tokens that are neither kept nor with an engine.

        `to_engine`: nor with those that it has taken, since it cannot take them twice.
        """
        if status is None or not status.usable_tokens or transfer_id in self._kept:
            return status
        return status if status.taken and not to_engine else replace(status, usable_tokens=0, usable_ends=())

    def make_room(self) -> bool:
        """Forget the oldest; False if there is none."""
        return bool(self._kept) and self.forget(next(iter(self._kept)))

    def sweep(self, now_s: float) -> None:
        """Forget what nobody has taken."""
        for transfer_id, (_, until_s) in list(self._kept.items()):
            if now_s > until_s:
                self.forget(transfer_id)

    def clear(self) -> None:
        """Forget all."""
        while self.make_room():
            pass
