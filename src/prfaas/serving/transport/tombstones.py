"""Transfers that are over, as the transfer table remembers them. Its lock guards them."""

from collections import OrderedDict
from dataclasses import replace

from prfaas.serving.transport.wire import Header, TransferPhase, TransferStatus, abort, ack

_MAX_REASON_CHARS = 512


class Tombstones:
    """Transfers that are over, kept for a while so that no late frame can start one again.

    A bounded map: transfer id → (last status, when to forget).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, tuple[TransferStatus, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, transfer_id: bytes) -> TransferStatus | None:
        """The last status of a transfer that is over; None: no such transfer is remembered."""
        entry = self._entries.get(transfer_id)
        return None if entry is None else entry[0]

    def put(self, transfer_id: bytes, status: TransferStatus, forget_at_s: float) -> None:
        """Remember a transfer until `forget_at_s` (time.monotonic()); the oldest one makes room for it."""
        # An observer's words are among the reasons.
        status = replace(status, reason=status.reason[:_MAX_REASON_CHARS])
        self._entries[transfer_id] = (status, forget_at_s)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def mark_taken(self, transfer_id: bytes) -> None:
        """An engine has taken what was kept of a broken transfer."""
        entry = self._entries.get(transfer_id)
        if entry is not None:
            self._entries[transfer_id] = (replace(entry[0], taken=True), entry[1])

    def sweep(self, now_s: float) -> None:
        """Forget what is due. Lifetimes differ little, so only the oldest entries are looked at."""
        while self._entries:
            transfer_id, (_, forget_at_s) = next(iter(self._entries.items()))
            if forget_at_s > now_s:
                return
            del self._entries[transfer_id]

    def answer(self, header: Header) -> bytes:
        """What a late frame of a transfer that is over is answered with."""
        status = self.get(header.transfer_id)
        if status is not None and status.phase is TransferPhase.COMPLETE:
            return ack(header)
        return abort(header.transfer_id, "unknown transfer" if status is None else status.reason)
