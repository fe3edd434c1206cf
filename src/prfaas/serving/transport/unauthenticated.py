"""Connections that have not proved yet who they are: a budget of their own, and what is said of them."""

import logging
import socket
import threading
import time
from collections import Counter, OrderedDict

from prfaas.serving.transport.sockets import shut

log = logging.getLogger(__name__)

# A closed stranger's thread gives its place back within microseconds; a busy machine may need longer.
_ROOM_WAIT_S = 1.0
_NOTE_PERIOD_S = 10.0
_MAX_REJECTED = 64


class UnauthenticatedPeers:
    """The places of connections in their handshake; thread-safe.

    UnauthenticatedPeers never take the place of a peer. Where all places are taken, the oldest stranger is closed, of the
    address that has most of them.
    """

    def __init__(self, name: str, places: int) -> None:
        """`name`: of the side that they connect to."""
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
        """Take a place, of the oldest stranger if need be. False if none becomes free."""
        with self._changed:
            if len(self._inside) >= self._places:
                self._close_one()
                if not self._changed.wait_for(lambda: len(self._inside) < self._places, _ROOM_WAIT_S):
                    return False
            self._inside[sock] = (address, False)
            return True

    def leave(self, sock: socket.socket) -> None:
        """The stranger has ended or is a peer now; idempotent."""
        with self._changed:
            if self._inside.pop(sock, None) is not None:
                self._changed.notify_all()

    def close_oldest(self) -> None:
        """Give a file descriptor back where none are left."""
        with self._changed:
            self._close_one()

    def note(self, sentence: str, peer: str = "") -> None:
        """A connection failed before it was a peer's.

        A peer that has the key is named at once, if it was not refused for the same reason before. Of all others a
        line is logged at most every 10 s, with how many more there were.
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
        """The peer is welcome now."""
        with self._changed:
            self._rejected.pop(peer, None)

    @property
    def rejected(self) -> dict[str, str]:
        """Peer that has the key → why it was refused at its last attempt. The latest 64."""
        with self._changed:
            return dict(self._rejected)

    @property
    def closed(self) -> int:
        """UnauthenticatedPeers that had to go for others."""
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
