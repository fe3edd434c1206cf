"""Limits on unauthenticated peers: places for connections in their handshake, and what the log says of them."""

import logging
import socket
import threading
import time
from collections import Counter, OrderedDict

from prfaas.serving.transport.sockets import shut

log = logging.getLogger(__name__)

# The thread of a closed connection gives its place back within microseconds; a busy machine may need longer.
_ROOM_WAIT_S = 1.0
_NOTE_PERIOD_S = 10.0
_MAX_REJECTED = 64


class UnauthenticatedPeers:
    """Limits connections that are still in their handshake; thread-safe.

    They have places of their own, so they never take an authenticated peer's. When all places are taken, the oldest
    connection is closed, of the address that has most of them.
    """

    def __init__(self, name: str, places: int) -> None:
        """`name`: of this side, for the log. `places`: connections in their handshake at once."""
        self._name = name
        self._places = places
        self._changed = threading.Condition()
        # By age. The flag: it was closed, and its thread has yet to end.
        self._inside: OrderedDict[socket.socket, tuple[str, bool]] = OrderedDict()
        self._closed = 0
        self._rejected: OrderedDict[str, str] = OrderedDict()
        self._noted_at_s = float("-inf")
        self._unsaid = 0

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, sock: socket.socket, address: str) -> bool:
        """Take a place, closing the oldest connection if need be. False if none becomes free."""
        with self._changed:
            if len(self._inside) >= self._places:
                self._close_one()
                if not self._changed.wait_for(lambda: len(self._inside) < self._places, _ROOM_WAIT_S):
                    return False
            self._inside[sock] = (address, False)
            return True

    def leave(self, sock: socket.socket) -> None:
        """Give the place back: the connection has ended or is authenticated; idempotent."""
        with self._changed:
            if self._inside.pop(sock, None) is not None:
                self._changed.notify_all()

    def close_oldest(self) -> None:
        """Close the oldest connection, where no file descriptors are left."""
        with self._changed:
            self._close_one()

    def note(self, sentence: str, peer: str = "") -> None:
        """Log that a connection failed in its handshake.

        A peer that has the key is named at once, unless it was refused for the same reason before. For all others one
        line is logged at most every 10 s, with the number of further ones.
        """
        with self._changed:
            if peer:
                said = self._rejected.pop(peer, None)
                self._rejected[peer] = sentence
                if len(self._rejected) > _MAX_REJECTED:
                    self._rejected.popitem(last=False)
                if said != sentence:
                    log.warning("%s rejects %s: %s", self._name, peer, sentence)
                return
            now_s = time.monotonic()
            if now_s - self._noted_at_s < _NOTE_PERIOD_S:
                self._unsaid += 1
                return
            more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
            self._noted_at_s, self._unsaid = now_s, 0
        log.warning("%s closed a connection in its handshake: %s%s", self._name, sentence, more)

    def forgive(self, peer: str) -> None:
        """Drop the peer's last rejection: it is welcome now."""
        with self._changed:
            self._rejected.pop(peer, None)

    @property
    def rejected(self) -> dict[str, str]:
        """Reasons of the last refusal, by peer, of the latest 64 peers that have the key."""
        with self._changed:
            return dict(self._rejected)

    @property
    def closed(self) -> int:
        """Connections that were closed to make room for others."""
        return self._closed

    def _close_one(self) -> None:
        staying = [(sock, address) for sock, (address, closed) in self._inside.items() if not closed]
        if not staying:
            return
        count = Counter(address for _, address in staying)
        most = max(count.values())
        oldest, address = next(each for each in staying if count[each[1]] == most)
        self._inside[oldest] = (address, True)
        self._closed += 1
        shut(oldest)
