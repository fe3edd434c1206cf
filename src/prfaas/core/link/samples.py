"""Reports of the two ends of a link, each at one moment. Totals only grow, but start again with the process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

# The most that other programs read exactly: state and history are JSON.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


@dataclass(frozen=True, slots=True)
class SenderSample:
    """One producer's (rank's) report on a link. It has crossed that link itself, so it may be late."""

    at_s: float
    """When it was taken at the latest, by the observer's clock."""
    pace_bits_per_s: _Rate | None
    """The rate that the producer may send; None: unknown, or unlimited."""
    queued_bytes: _Count
    """Produced and not acknowledged yet."""
    waiting_bytes: _Count
    """Of these, bytes that wait for room at a consumer and not for the link."""
    open_bytes: _Count
    """Of open transfers, not acknowledged yet; also what is still to be produced."""
    acked_bytes_total: _Count
    unsent_bytes: _Count
    """Bytes that the kernel has and could not send yet."""
    filled_connections: _Count
    """Connections with such bytes."""
    delivery_bits_per_s: _Rate
    rtt_s: _Seconds
    """Of what is in flight; 0 where nothing is."""
    least_rtt_s: _Seconds
    sent_bytes_total: _Count
    """By the kernel, those sent again included."""
    resent_bytes_total: _Count
    busy_s_total: _Seconds
    """Seconds with bytes in flight, summed over connections."""
    receiver_limited_s_total: _Seconds
    """Those of them in which the consumer's receive window was shut."""
    connections_up: _Count
    connections: _Count
    background_bytes: _Count = 0
    """Of those produced and not acknowledged, bytes in the background: they get the bandwidth that others leave."""

    @classmethod
    def of_report(cls, report: Mapping[str, Any], at_s: float) -> "SenderSample":
        """From one entry of a sender's telemetry.

        Raises:
            ValueError: a field is missing or out of bounds.
        """
        return _sample(cls, dict(report) | {"pace_bits_per_s": report.get("pace_bits_per_s") or None}, at_s)

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
    bytes_total: _Count
    """By the kernel, in order, since the start."""
    segments_total: _Count
    """Segments that came, also out of order or twice: a lost one does not hold this count back."""
    mss_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 1448
    """Payload of a full segment."""
    unread_bytes: _Count = 0
    """Of these, what the consumer has not read yet."""
    rtt_s: _Seconds = 0.0
    """Round-trip time as the consumer's kernel sees it; 0: unknown."""
    connections: _Count = 1
    """Connections over which bytes come."""

    @classmethod
    def of_report(cls, report: Mapping[str, Any], at_s: float) -> "ArrivalSample":
        """From one entry of a receiver's `arrivals`.

        Raises:
            ValueError: a field is missing or out of bounds.
        """
        return _sample(cls, report, at_s)


_Sample = TypeVar("_Sample", SenderSample, ArrivalSample)


def _sample(kind: type[_Sample], report: Mapping[str, Any], at_s: float) -> _Sample:
    return msgspec.convert({**report, "at_s": at_s}, kind)
