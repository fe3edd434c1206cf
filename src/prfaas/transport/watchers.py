"""Which observers want to hear about which transfers."""

from prfaas.transport.incoming import FrameSink
from prfaas.transport.status import TransferStatus
from prfaas.transport.wire import FrameType, pack_control


class Watchers:
    """Map transfer id → connections, until its last phase was told. Not thread-safe: the book's lock guards it."""

    def __init__(self) -> None:
        self._links: dict[bytes, set[FrameSink]] = {}

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: FrameSink, transfer_id: bytes, status: TransferStatus | None) -> None:
        """Tell the present status, if there is one, and remember the connection if more can follow."""
        if status is not None:
            link.post(_frame(transfer_id, status))
        if status is None or not status.phase.terminal:
            self._links.setdefault(transfer_id, set()).add(link)

    def has(self, link: FrameSink, transfer_id: bytes) -> bool:
        return link in self._links.get(transfer_id, ())

    def remove(self, link: FrameSink, transfer_ids: set[bytes]) -> None:
        for transfer_id in transfer_ids:
            links = self._links.get(transfer_id)
            if links is not None:
                links.discard(link)
                if not links:
                    del self._links[transfer_id]

    def tell(self, transfer_id: bytes, status: TransferStatus) -> None:
        links = self._links.get(transfer_id)
        if links:
            frame = _frame(transfer_id, status)
            for link in links:
                link.post(frame)
            if status.phase.terminal:
                del self._links[transfer_id]

    def clear(self) -> None:
        self._links.clear()


def _frame(transfer_id: bytes, status: TransferStatus) -> bytes:
    return pack_control(FrameType.STATUS, transfer_id, status.to_body())
