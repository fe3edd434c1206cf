"""A link's bandwidth, divided over the connections that have something to send."""

import threading
from collections.abc import Sequence
from typing import Protocol


class Paced(Protocol):
    def set_rate(self, bytes_per_s: int | None) -> None:
        """Cap the send rate of one connection; must not raise when it is gone."""


class LinkPacer:
    """Shares of one link. Lock order: a lane's lock, then this one."""

    def __init__(self, bandwidth_bits_per_s: float | None) -> None:
        self.bandwidth_bits_per_s = bandwidth_bits_per_s
        self._lock = threading.Lock()
        self._busy: dict[object, tuple[Paced, ...]] = {}

    def update(self, lane: object, connections: Sequence[Paced]) -> None:
        """`connections`: those of `lane` that are up while it has work, else none. Re-divides when
        that changed.
        """
        with self._lock:
            if self._busy.get(lane, ()) == tuple(connections):
                return
            if connections:
                self._busy[lane] = tuple(connections)
            else:
                self._busy.pop(lane, None)
            self._divide()

    def set_bandwidth(self, bits_per_s: float) -> None:
        """Pace a link that was paced before at another rate from now on."""
        with self._lock:
            self.bandwidth_bits_per_s = bits_per_s
            self._divide()

    def _divide(self) -> None:
        if self.bandwidth_bits_per_s is None:
            return
        sharing = [connection for those in self._busy.values() for connection in those]
        for connection in sharing:
            connection.set_rate(int(self.bandwidth_bits_per_s / 8 / len(sharing)))
