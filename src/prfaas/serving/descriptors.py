"""File descriptors: how many this process may have, and whether one more request still fits. Standard library only."""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

# A request has at most one connection to an engine at a time; one more may idle in the pool behind it.
_PER_REQUEST = 2
_KEPT_PART = 8
# Listing the connections of clients costs microseconds per thousand.
_COUNT_EVERY_S = 0.1

_Connection = TypeVar("_Connection")


def raise_descriptor_limit() -> int:
    """Allow this process, and those that it starts, as many file descriptors as the system lets it.

    Shells allow 1024 by default, and every request, stream and transfer has one of its own.

    Returns:
        The limit from now on.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class DescriptorBudget:
    """Whether one more request fits under the limit. It counts what is known to be open and asks the system nothing."""

    def __init__(
        self,
        limit: int,
        reserved: int,
        connections: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is counted yet.

        Args:
            limit: descriptors that the process may have.
            reserved: those that are not for requests: files, and connections that are always there.
            connections: counts the connections of clients; asked ten times a second at most.
            clock: seconds that never go back.
        """
        self.limit = limit
        self.reserved = reserved
        self.connections = connections
        self._clock = clock
        self._counted_s = -_COUNT_EVERY_S
        self._connected = 0
        self._serving: set[object] = set()

    @property
    def _room(self) -> int:
        return max(self.limit - self.reserved, 0)

    @property
    def _kept(self) -> int:
        """Those that open requests leave to connections without one: else the next client would not even be refused."""
        return self._room // _KEPT_PART

    @contextmanager
    def serving(self, connection: object) -> Iterator[None]:
        """Meanwhile a request of this connection is open."""
        self._serving.add(connection)
        try:
            yield
        finally:
            self._serving.discard(connection)

    def too_idle(self, connections: Sequence[_Connection]) -> Sequence[_Connection]:
        """Which of the clients' connections, oldest first, are to be closed so that others get an answer.

        Those without an open request may have half of what is there for clients, and no more than open requests leave:
        the oldest beyond that.
        """
        left = self._room - (1 + _PER_REQUEST) * len(self._serving)
        # Half of what is kept is for those that come until this is asked again.
        allowed = max(min(self._room // 2, left - self._kept // 2), self._kept // 2)
        if len(connections) <= allowed:
            return ()
        idle = [connection for connection in connections if connection not in self._serving]
        return idle[: max(len(idle) - allowed, 0)]

    def has_room(self, open_requests: int) -> bool:
        """Whether there are enough for `open_requests`, of which the last has just come."""
        now_s = self._clock()
        if now_s - self._counted_s >= _COUNT_EVERY_S:
            self._counted_s, self._connected = now_s, self.connections()
        else:
            # Every request since may have come over a connection of its own.
            self._connected += 1
        return self._connected + _PER_REQUEST * open_requests <= self._room - self._kept
