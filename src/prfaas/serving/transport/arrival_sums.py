"""What has arrived from each producer, over all its connections."""

from collections.abc import Iterable
from typing import Any

from prfaas.serving.transport.handshake import ROLE_PRODUCER
from prfaas.serving.transport.receiver_connection import ReceiverConnection

_NOTHING_ARRIVED: dict[str, Any] = {
    "bytes_total": 0,
    "segments_total": 0,
    "mss_bytes": 0,
    "unread_bytes": 0,
    "rtt_s": 0.0,
    "connections": 0,
}


class ArrivalSums:
    """Sums by producer; those of connections that have ended are kept. Not thread-safe."""

    def __init__(self) -> None:
        # Bytes and segments.
        self._of_ended: dict[str, tuple[int, int]] = {}

    def end(self, connection: ReceiverConnection) -> None:
        """Keep what has arrived over a connection that has ended; once for each."""
        name = _producer(connection)
        if name is not None:
            arrived = connection.arrived()
            nbytes, segments = self._of_ended.get(name, (0, 0))
            self._of_ended[name] = (nbytes + arrived.bytes_received, segments + arrived.segments)

    def with_open(self, connections: Iterable[ReceiverConnection]) -> dict[str, dict[str, Any]]:
        """The fields of `ArrivalSample` but the time, by producer, with what has come over open connections."""
        found = {
            name: _NOTHING_ARRIVED | {"bytes_total": nbytes, "segments_total": segments}
            for name, (nbytes, segments) in self._of_ended.items()
        }
        for connection in connections:
            name = _producer(connection)
            if name is not None:
                arrived = connection.arrived()
                sums = found.setdefault(name, dict(_NOTHING_ARRIVED))
                sums["bytes_total"] += arrived.bytes_received
                sums["segments_total"] += arrived.segments
                sums["mss_bytes"] = max(sums["mss_bytes"], arrived.mss_bytes)
                sums["unread_bytes"] += arrived.unread_bytes
                sums["rtt_s"] = max(sums["rtt_s"], arrived.rtt_s)
                sums["connections"] += 1
        return found


def _producer(connection: ReceiverConnection) -> str | None:
    """Who sends over a connection; None: nobody yet, or an observer."""
    who = connection.identity
    return who.name if who is not None and who.role == ROLE_PRODUCER else None
