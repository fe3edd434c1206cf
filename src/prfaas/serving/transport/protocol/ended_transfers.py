"""Transfers at the consumer that are over: their last status, and the partial KV that an engine can resume from.

Not thread-safe: both classes belong to a transfer table.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from prfaas.serving.transport.protocol.incoming import IncomingTransfer
from prfaas.serving.transport.protocol.region_layout import TransferLayout
from prfaas.serving.transport.protocol.resume_points import ResumePoints
from prfaas.serving.transport.protocol.staging import StagedTransfer
from prfaas.serving.transport.protocol.wire import Header, TransferPhase, TransferStatus, abort, ack

_MAX_REASON_CHARS = 512


class Tombstones:
    """Last statuses of transfers that are over, kept so that no late frame can start one again. Bounded.

    Ids of which producers say alone that they are over have places of their own: they are random, and cost nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, tuple[TransferStatus, float]] = OrderedDict()
        self._said: OrderedDict[bytes, tuple[TransferStatus, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries) + len(self._said)

    def get(self, transfer_id: bytes) -> TransferStatus | None:
        """The last status of a transfer; None: no such transfer is remembered."""
        entry = self._entries.get(transfer_id) or self._said.get(transfer_id)
        return None if entry is None else entry[0]

    def put(
        self, transfer_id: bytes, status: TransferStatus, forget_at_s: float, *, was_here: bool = True
    ) -> None:
        """Remember a transfer until `forget_at_s`; the oldest one makes room for it.

        `was_here`: it was admitted, or this side ended it.
        """
        entries = self._entries if was_here else self._said
        # Reasons may be an observer's text.
        status = replace(status, reason=status.reason[:_MAX_REASON_CHARS])
        entries[transfer_id] = (status, forget_at_s)
        while len(entries) > self._limit:
            entries.popitem(last=False)

    def mark_taken(self, transfer_id: bytes) -> None:
        """Record that an engine has taken a partial transfer."""
        entry = self._entries.get(transfer_id)
        if entry is not None:
            self._entries[transfer_id] = (replace(entry[0], taken=True), entry[1])

    def sweep(self, now_s: float) -> None:
        """Forget what is due. Lifetimes differ little, so only the oldest entries are checked."""
        for entries in (self._entries, self._said):
            while entries and next(iter(entries.values()))[1] <= now_s:
                entries.popitem(last=False)

    def answer(self, header: Header) -> bytes:
        """The frame that answers a late frame of a transfer that is over."""
        status = self.get(header.transfer_id)
        if status is not None and status.phase is TransferPhase.COMPLETE:
            return ack(header)
        return abort(header.transfer_id, "unknown transfer" if status is None else status.reason)


class PartialTransfers:
    """Broken transfers whose staging is kept for an engine to resume from, the oldest first.

    Their staging is reclaimed as soon as another transfer needs it.
    """

    def __init__(self, layout: TransferLayout, keep_s: float, tombstones: Tombstones) -> None:
        """`keep_s`: how long an engine has to take one. `tombstones`: record what was taken."""
        self._layout = layout
        self._keep_s = keep_s
        self._tombstones = tombstones
        self._kept: dict[bytes, tuple[IncomingTransfer, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, transfer: IncomingTransfer, now_s: float) -> bool:
        """Keep the staging of a transfer that is about to fail. False: no engine could resume from it."""
        if transfer.lease is None or transfer.checkpoint_of is not None:
            return False
        transfer.usable = transfer.resume_points(self._layout)
        transfer.discard_checkpoints(transfer.checkpoints.keys() - set(transfer.usable.ends))
        if transfer.usable.tokens:
            self._kept[transfer.ticket.transfer_id] = (transfer, now_s + self._keep_s)
        return bool(transfer.usable.tokens)

    def take(
        self, transfer_id: bytes, tokens: int, on_free: Callable[[StagedTransfer], None]
    ) -> StagedTransfer | None:
        """Hand the staging over, once, to resume after `tokens`.

        None while a connection still writes into it, and where nothing can resume there.
        """
        found = self._kept.get(transfer_id)
        if found is None or found[0].is_used or not found[0].status().resume_points.allows(tokens):
            return None
        del self._kept[transfer_id]
        self._tombstones.mark_taken(transfer_id)
        return found[0].hand_over(on_free, tokens)

    def forget(self, transfer_id: bytes) -> bool:
        """Free the staging of one that no engine will take. Returns whether it was kept."""
        found = self._kept.pop(transfer_id, None)
        if found is not None:
            found[0].usable = ResumePoints()
            found[0].release()
        return found is not None

    def without_lost_tokens(
        self, transfer_id: bytes, status: TransferStatus | None, *, to_engine: bool
    ) -> TransferStatus | None:
        """The status of a transfer that is over, less usable tokens that are no longer there.

        `to_engine`: also less those that the engine has taken, since it cannot take them twice.
        """
        if status is None or not status.usable_tokens or transfer_id in self._kept:
            return status
        return status if status.taken and not to_engine else replace(status, usable_tokens=0, usable_ends=())

    def make_room(self) -> bool:
        """Forget the oldest; False if there is none."""
        return bool(self._kept) and self.forget(next(iter(self._kept)))

    def sweep(self, now_s: float) -> None:
        """Forget those that no engine took in time."""
        for transfer_id, (_, until_s) in list(self._kept.items()):
            if now_s > until_s:
                self.forget(transfer_id)

    def clear(self) -> None:
        """Forget all."""
        while self.make_room():
            pass
