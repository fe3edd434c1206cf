"""Liveness of a connection's other end: how long its machine and its engine have been silent.

The kernel's counters separate the two. A machine acknowledges bytes even while its engine is stopped; bytes arrive
only from a live engine. While a transfer is open, each side sends a PING after a short silence, so a longer silence
always means a fault.
"""

from dataclasses import dataclass

from prfaas.core.deployment import TransferLimits

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

    def __init__(self, now_s: float) -> None:
        self._looked_at_s = now_s

    def elapsed_s(self, now_s: float) -> float:
        """Seconds since the previous call, at most `LONGEST_LOOK_S`."""
        elapsed_s = min(now_s - self._looked_at_s, LONGEST_LOOK_S)
        self._looked_at_s = now_s
        return max(elapsed_s, 0.0)


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The kernel's counters of one connection; 0 for those that an older kernel lacks."""

    rtt_s: float
    """Smoothed round-trip time."""
    retransmits: int
    """Segments sent again, since the connection was made."""
    delivery_bits_per_s: float
    """The most recent rate at which the peer took bytes."""
    bytes_acked: int
    bytes_received: int
    data_segments_in: int
    receive_mss: int
    """Payload of a full segment of the peer's, in bytes."""
    in_flight: int
    """Segments sent and not acknowledged."""
    notsent_bytes: int
    """Bytes that wait in the kernel and were never sent."""
    busy_s: float
    """Time with unacknowledged bytes, since the connection was made."""
    least_rtt_s: float
    """The shortest round trip of the last minutes."""
    receive_rtt_s: float
    """Round-trip time as the receiving end sees it, from the timestamps of what arrives."""
    receiver_limited_s: float
    """Part of `busy_s` in which the peer's receive window was shut."""
    sent_bytes: int
    """Since the connection was made, those sent again included."""
    resent_bytes: int


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


@dataclass(slots=True)
class ProducerLiveness(Liveness):
    """Liveness of a producer's connection while it has a transfer to finish: PINGs, and the end after their timeout."""

    new_bytes: int = 0
    """Received between the last two checks, by the kernel's counter."""
    pings: int = 0
    pongs: int = 0
    pinged_at_s: float = 0.0

    def heard(self, number: int) -> None:
        """Take the PONG of a PING."""
        self.pongs = max(self.pongs, min(number, self.pings))

    def check(
        self, info: TcpInfo, now_s: float, elapsed_s: float, limits: TransferLimits, *, inside_frame: bool
    ) -> "str | int":
        """`look`, `elapsed_s` after the previous check.

        Returns:
            Why the connection is to be closed; or the number of the PING to send, 0: none.
        """
        spare_s, before = heartbeat_period_s(limits.silence_s), self.bytes_received
        self.look(info, elapsed_s, asked=self.pongs < self.pings, spare_s=spare_s)
        self.new_bytes = info.bytes_received - before
        if self.path_s > path_timeout_s(limits.silence_s):
            return f"nothing has come back from it for {self.path_s:.1f} s"
        if self.engine_s > limits.progress_deadline_s:
            inside = ", inside a frame" if inside_frame else ""
            return f"its machine acknowledges, its engine has sent nothing for {self.engine_s:.1f} s{inside}"
        if self.engine_s < spare_s or now_s - self.pinged_at_s < spare_s:
            return 0
        self.pinged_at_s = now_s
        self.pings += 1
        return self.pings


def _longer(silent_s: float, elapsed_s: float, alive: bool, awaited: bool, spare_s: float) -> float:
    if alive:
        return 0.0
    return silent_s + elapsed_s if awaited else min(silent_s + elapsed_s, max(silent_s, spare_s))
