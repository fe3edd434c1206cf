"""The observers' connections that watch transfers at a consumer."""

from dataclasses import replace

from prfaas.serving.transport.incoming import FrameSink
from prfaas.serving.transport.wire import FrameType, TransferStatus, body_of, pack_control


class Watchers:
    """The connections that watch each transfer, until its last phase was sent to them.

    Not thread-safe: the transfer table's lock guards it.
    """

    def __init__(self) -> None:
        self._connections: dict[bytes, dict[FrameSink, float]] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(
        self, connection: FrameSink, transfer_id: bytes, status: TransferStatus | None, lead_s: float
    ) -> None:
        """Send the present status, if there is one, and remember the connection if more can follow.

        `lead_s`: the watcher wants to know so long ahead that the transfer is about to complete.
        """
        if status is not None:
            connection.post(_frame(transfer_id, status))
        if status is None or not status.phase.terminal:
            self._connections.setdefault(transfer_id, {})[connection] = lead_s

    def lead_s(self, transfer_id: bytes) -> float:
        """How long before a transfer's end its watchers want to know of it; 0: none of them does."""
        return max(self._connections.get(transfer_id, {}).values(), default=0.0)

    def has(self, connection: FrameSink, transfer_id: bytes) -> bool:
        """Whether the connection still waits for a phase of the transfer."""
        return connection in self._connections.get(transfer_id, ())

    def remove(self, connection: FrameSink, transfer_ids: set[bytes]) -> None:
        """The connection is gone."""
        for transfer_id in transfer_ids:
            connections = self._connections.get(transfer_id)
            if connections is not None:
                connections.pop(connection, None)
                if not connections:
                    del self._connections[transfer_id]

    def notify(self, transfer_id: bytes, status: TransferStatus) -> None:
        """Send a new status to every connection that watches the transfer."""
        connections = self._connections.get(transfer_id)
        if connections:
            frame = _frame(transfer_id, status)
            for connection in connections:
                connection.post(frame)
            if status.phase.terminal:
                del self._connections[transfer_id]

    def clear(self) -> None:
        """Forget all."""
        self._connections.clear()


def _frame(transfer_id: bytes, status: TransferStatus) -> bytes:
    return pack_control(FrameType.STATUS, transfer_id, body_of(replace(status, reason=status.reason[:4096])))
