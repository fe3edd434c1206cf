"""A link's bandwidth, divided over the connections that have something to send."""

import threading
from collections.abc import Sequence
from typing import Protocol


class Paced(Protocol):
    """A connection whose send rate can be capped."""

    def set_rate(self, bytes_per_s: int | None) -> None:
        """Cap the send rate, None: no cap; must not raise when the connection is gone."""


class LinkPacer:
    """Shares of one link. Lock order: a peer queue's lock, then this one."""

    def __init__(self, bandwidth_bits_per_s: float | None) -> None:
        self.bandwidth_bits_per_s = bandwidth_bits_per_s
        """None: the link is not paced, and never will be."""
        self._lock = threading.Lock()
        self._sharing: dict[object, tuple[Paced, ...]] = {}

    def update(self, queue: object, connections: Sequence[Paced]) -> None:
        """Divide again if the connections of one peer queue changed.

        Args:
            queue: the peer queue, as a key.
            connections: those of the queue that are up while it has work; none while it has no work.
        """
        with self._lock:
            if self._sharing.get(queue, ()) == tuple(connections):
                return
            if connections:
                self._sharing[queue] = tuple(connections)
            else:
                self._sharing.pop(queue, None)
            self._divide()

    def set_bandwidth(self, bits_per_s: float) -> None:
        """Pace a link that was paced before at another rate from now on."""
        with self._lock:
            self.bandwidth_bits_per_s = bits_per_s
            self._divide()

    def _divide(self) -> None:
        if self.bandwidth_bits_per_s is None:
            return
        sharing = [connection for those in self._sharing.values() for connection in those]
        for connection in sharing:
            connection.set_rate(int(self.bandwidth_bits_per_s / 8 / len(sharing)))
