"""Liveness of a connection's other end: how long its machine and its engine have been silent.

The kernel's counters separate the two. A machine acknowledges bytes even while its engine is stopped; bytes arrive
only from a live engine. While a transfer is open, each side sends a PING after a short silence, so a longer silence
always means a fault.
"""

import time
from dataclasses import dataclass

from prfaas.serving.transport.sockets import TcpInfo

LONGEST_LOOK_S = 0.5
"""Most that one check adds to a silence: a process that was stopped itself takes no peer for silent."""
HEARTBEAT_BYTES = 256
"""Heartbeats alone stay below this between two checks: more bytes than that are data that the engine takes."""


def heartbeat_period_s(silence_s: float) -> float:
    """How long a side of an open transfer may send nothing before it sends a PING."""
    return silence_s / 6


def path_timeout_s(silence_s: float) -> float:
    """How long a path may be silent before its connection is closed; the rest of `silence_s` is for a new one."""
    return silence_s / 2


class LookClock:
    """Time between two checks, without the time for which this process itself was stopped."""

    def __init__(self) -> None:
        self._looked_at_s = time.monotonic()

    def elapsed_s(self, now_s: float) -> float:
        """Seconds since the previous call, at most `LONGEST_LOOK_S`."""
        elapsed_s = min(now_s - self._looked_at_s, LONGEST_LOOK_S)
        self._looked_at_s = now_s
        return max(elapsed_s, 0.0)


@dataclass(slots=True)
class Liveness:
    """Silence of one connection's other end, counted from check to check."""

    path_s: float = 0.0
    """Since the other machine last acknowledged or sent a byte, while it has something to acknowledge."""
    engine_s: float = 0.0
    """Since the other engine last sent a byte or took data, while it owes an answer."""
    bytes_acked: int = 0
    bytes_received: int = 0

    def look(self, info: TcpInfo, elapsed_s: float, *, asked: bool, spare_s: float) -> None:
        """Compare the kernel's counters with those of the previous check.

        Args:
            info: the counters now.
            elapsed_s: since the previous check.
            asked: the other engine owes an answer.
            spare_s: while nothing is owed, a silence counts up to this.
        """
        heard = info.bytes_received > self.bytes_received
        acked_bytes = info.bytes_acked - self.bytes_acked
        self.bytes_received, self.bytes_acked = info.bytes_received, info.bytes_acked
        alive = heard or acked_bytes > 0
        self.path_s = _longer(self.path_s, elapsed_s, alive, info.in_flight > 0, spare_s)
        alive = heard or acked_bytes > HEARTBEAT_BYTES
        self.engine_s = _longer(self.engine_s, elapsed_s, alive, asked, spare_s)

    def rest(self) -> None:
        """Start anew: nothing is expected of the other side."""
        self.path_s = self.engine_s = 0.0


def _longer(silent_s: float, elapsed_s: float, alive: bool, awaited: bool, spare_s: float) -> float:
    if alive:
        return 0.0
    return silent_s + elapsed_s if awaited else min(silent_s + elapsed_s, max(silent_s, spare_s))
