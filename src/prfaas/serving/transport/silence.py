"""For how long the other end has given no sign of life, and what follows from it.

The kernel tells the path from the engine. It counts bytes that the other machine has acknowledged, which a stopped
engine's machine still does, and it counts bytes that have come, which only a live engine sends. While a transfer is
open each side asks for a sign of life (PING) whatever it has not heard for a while, so silence always means something.
"""

import time
from dataclasses import dataclass

from prfaas.serving.transport.sockets import TcpInfo

LONGEST_LOOK_S = 0.5
"""A look that comes later counts as one of this age: a process that was stopped takes nobody for silent."""
HEARTBEAT_BYTES = 256
"""Signs of life alone are less between two looks: what is more is data that the engine takes."""


def ping_period_s(silence_s: float) -> float:
    """How long a connection of an open transfer may be without a frame of this side's."""
    return silence_s / 6


def patience_s(silence_s: float) -> float:
    """How long a connection may be without a sign of life before it is closed.

    The rest of `silence_s` is for a new connection.
    """
    return silence_s / 2


class LookClock:
    """Seconds between two looks, as far as this process was awake between them."""

    def __init__(self) -> None:
        self._looked_at_s = time.monotonic()

    def elapsed_s(self, now_s: float) -> float:
        """Since the call before."""
        elapsed_s = min(now_s - self._looked_at_s, LONGEST_LOOK_S)
        self._looked_at_s = now_s
        return max(elapsed_s, 0.0)


@dataclass(slots=True)
class Silence:
    """Of one connection, from look to look."""

    path_s: float = 0.0
    """Since the other machine has acknowledged or sent a byte, if it has something to acknowledge."""
    engine_s: float = 0.0
    """Since the other engine has sent a byte or taken data, if it was asked for something."""
    bytes_acked: int = 0
    bytes_received: int = 0

    def look(self, info: TcpInfo, elapsed_s: float, *, asked: bool, spare_s: float) -> None:
        """Compare with the look before.

        Args:
            info: of now.
            elapsed_s: since the look before.
            asked: the other engine owes an answer.
            spare_s: silence counts for so much at most as long as there is nothing to answer.
        """
        heard = info.bytes_received > self.bytes_received
        acked_bytes = info.bytes_acked - self.bytes_acked
        self.bytes_received, self.bytes_acked = info.bytes_received, info.bytes_acked
        alive = heard or acked_bytes > 0
        self.path_s = _longer(self.path_s, elapsed_s, alive, info.in_flight > 0, spare_s)
        alive = heard or acked_bytes > HEARTBEAT_BYTES
        self.engine_s = _longer(self.engine_s, elapsed_s, alive, asked, spare_s)

    def rest(self) -> None:
        """Nothing is expected: silence begins anew."""
        self.path_s = self.engine_s = 0.0


def _longer(silent_s: float, elapsed_s: float, alive: bool, awaited: bool, spare_s: float) -> float:
    if alive:
        return 0.0
    return silent_s + elapsed_s if awaited else min(silent_s + elapsed_s, max(silent_s, spare_s))
