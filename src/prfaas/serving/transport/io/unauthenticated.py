"""Limits on unauthenticated peers: places for connections in their handshake, and what the log says of them."""

import ipaddress
import logging
import socket
import threading
import time
from collections import Counter, OrderedDict
from functools import lru_cache

from prfaas.serving.transport.io.sockets import shut

log = logging.getLogger(__name__)

# The thread of a closed connection gives its place back within microseconds; a busy machine may need longer.
_ROOM_WAIT_S = 1.0
_NOTE_PERIOD_S = 10.0
_MAX_REJECTED = 64
_MAX_KNOWN = 1024
_IPV4_PREFIX_BITS, _IPV6_PREFIX_BITS = 24, 64


class UnauthenticatedPeers:
    """Limits connections that are still in their handshake; thread-safe.

    They have places of their own, so they never take an authenticated peer's. Known addresses, of peers that were
    authenticated before or that the peer list names, have as many besides. When all places are taken, the oldest
    connection is closed, of the network (/24, or /64 of IPv6) that has most of them.
    """

    def __init__(self, name: str, places: int) -> None:
        """`name`: of this side, for the log. `places`: connections in their handshake at once."""
        self._name = name
        self._places = places
        self._changed = threading.Condition()
        # By age, with their addresses.
        self._inside: OrderedDict[socket.socket, str] = OrderedDict()
        # Those of them that were closed, and whose threads have yet to end.
        self._closing: set[socket.socket] = set()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._closed = 0
        self._rejected: OrderedDict[str, str] = OrderedDict()
        self._noted_at_s = float("-inf")
        self._unsaid = 0

    def __len__(self) -> int:
        return len(self._inside)

    def know(self, *addresses: str) -> None:
        """Addresses that have the places of known ones from now on, until 1,024 others are known."""
        with self._changed:
            for address in addresses:
                self._known[address] = None
                self._known.move_to_end(address)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def enter(self, sock: socket.socket, address: str) -> bool:
        """Take a place, closing the oldest connection if need be. False if none becomes free."""
        with self._changed:
            is_known = address in self._known
            if self._taken(is_known=is_known) >= self._places:
                self._close_one(is_known=is_known)
                has_room = self._changed.wait_for(
                    lambda: self._taken(is_known=is_known) < self._places, _ROOM_WAIT_S
                )
                if not has_room:
                    return False
            self._inside[sock] = address
            return True

    def leave(self, sock: socket.socket) -> None:
        """Give the place back: the connection has ended or is authenticated; idempotent."""
        with self._changed:
            self._closing.discard(sock)
            if self._inside.pop(sock, None) is not None:
                self._changed.notify_all()

    def close_oldest(self) -> None:
        """Close the oldest connection, where no file descriptors are left."""
        with self._changed:
            if not self._close_one(is_known=False):
                self._close_one(is_known=True)

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

    def _taken(self, *, is_known: bool) -> int:
        return sum((address in self._known) == is_known for address in self._inside.values())

    def _close_one(self, *, is_known: bool) -> bool:
        """Close one of the known or of the unknown; False if none of them stays."""
        staying = {
            sock: network_of(address)
            for sock, address in self._inside.items()
            if sock not in self._closing and (address in self._known) == is_known
        }
        if not staying:
            return False
        count = Counter(staying.values())
        most = max(count.values())
        oldest = next(sock for sock, network in staying.items() if count[network] == most)
        self._closing.add(oldest)
        self._closed += 1
        shut(oldest)
        return True


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """The network of an IP address: what one sender has many addresses of."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, _IPV6_PREFIX_BITS), strict=False))
        found = found.ipv4_mapped
    return str(ipaddress.ip_network((found, _IPV4_PREFIX_BITS), strict=False))
