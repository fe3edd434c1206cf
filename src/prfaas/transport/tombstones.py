"""Ids of transfers that are over, kept for a while so that nothing late can bring them back."""

from collections import OrderedDict

from prfaas.transport.status import TransferStatus


class Tombstones:
    """Bounded map transfer id → (last status, when to forget). Not thread-safe: the book's lock guards it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, tuple[TransferStatus, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, transfer_id: bytes) -> TransferStatus | None:
        entry = self._entries.get(transfer_id)
        return None if entry is None else entry[0]

    def put(self, transfer_id: bytes, status: TransferStatus, forget_at_s: float) -> None:
        self._entries[transfer_id] = (status, forget_at_s)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def sweep(self, now_s: float) -> None:
        """Forget what is due. Lifetimes differ little, so only the old end of the map is looked at."""
        while self._entries:
            transfer_id, (_, forget_at_s) = next(iter(self._entries.items()))
            if forget_at_s > now_s:
                return
            del self._entries[transfer_id]
