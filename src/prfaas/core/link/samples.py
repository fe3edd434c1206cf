"""Reports of the two ends of a link, each at one moment. Totals only grow, but start again with the process."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class SenderSample:
    """One producer's (rank's) report on a link. It has crossed that link itself, so it may be late."""

    at_s: float
    """When it was taken at the latest, by the observer's clock."""
    pace_bits_per_s: float | None
    """The rate that the producer may send; None: unknown, or unlimited."""
    queued_bytes: int
    """Produced and not acknowledged yet."""
    waiting_bytes: int
    """Of these, bytes that wait for room at a consumer and not for the link."""
    open_bytes: int
    """Of open transfers, not acknowledged yet; also what is still to be produced."""
    acked_bytes_total: int
    unsent_bytes: int
    """Bytes that the kernel has and could not send yet."""
    filled_connections: int
    """Connections with such bytes."""
    delivery_bits_per_s: float
    rtt_s: float
    """Of what is in flight; 0 where nothing is."""
    least_rtt_s: float
    sent_bytes_total: int
    """By the kernel, those sent again included."""
    resent_bytes_total: int
    busy_s_total: float
    """Seconds with bytes in flight, summed over connections."""
    receiver_limited_s_total: float
    """Those of them in which the consumer's receive window was shut."""
    connections_up: int
    connections: int
    background_bytes: int = 0
    """Of those produced and not acknowledged, bytes in the background: they get the bandwidth that others leave."""

    @classmethod
    def of_report(cls, report: Mapping[str, Any], at_s: float) -> "SenderSample":
        """From one entry of a sender's telemetry.

        Raises:
            KeyError, TypeError, ValueError: the entry is not what it should be.
        """
        pace = float(report["pace_bits_per_s"] or 0.0)
        numbers = _numbers(cls, {"background_bytes": 0, **report})
        return cls(at_s=at_s, pace_bits_per_s=pace if pace > 0 else None, **numbers)

    @property
    def ready_bytes(self) -> int:
        """Bytes that wait for nothing but the link."""
        return max(self.queued_bytes - self.waiting_bytes, 0)

    @property
    def filled_share(self) -> float:
        """Share of the connections whose kernel had more than it could send: for them the producer is fast enough."""
        return min(self.filled_connections / self.connections_up, 1.0) if self.connections_up else 0.0


@dataclass(frozen=True, slots=True)
class ArrivalSample:
    """One consumer's (rank's) count of what arrives over a link. It is near the observer, so it is never late."""

    at_s: float
    bytes_total: int
    """By the kernel, in order, since the start."""
    segments_total: int
    """Segments that came, also out of order or twice: a lost one does not hold this count back."""
    mss_bytes: int = 1448
    """Payload of a full segment."""
    unread_bytes: int = 0
    """Of these, what the consumer has not read yet."""
    rtt_s: float = 0.0
    """Round-trip time as the consumer's kernel sees it; 0: unknown."""
    connections: int = 1
    """Connections over which bytes come."""

    @classmethod
    def of_report(cls, report: Mapping[str, Any], at_s: float) -> "ArrivalSample":
        """From one entry of a receiver's `arrivals`.

        Raises:
            KeyError, TypeError, ValueError: the entry is not what it should be.
        """
        return cls(at_s=at_s, **_numbers(cls, report))


def _numbers(sample: type[SenderSample | ArrivalSample], report: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says for the fields of a sample, by their names. No count is below 0."""
    return {
        each.name: max(int(report[each.name]), 0) if each.type is int else float(report[each.name])
        for each in fields(sample)
        if each.name not in ("at_s", "pace_bits_per_s")
    }
