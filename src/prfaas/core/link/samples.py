"""Reports of the two ends of a link, each at one moment. Totals only grow, but start again with the process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec

# The most that other programs read exactly: state and history are JSON.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_RoundTrip = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """State of one link at one sender. Totals never shrink, not even over reconnections."""

    pace_bits_per_s: _Rate | None
    """The pace that this sender keeps to; None: unpaced, or unknown."""
    queued_bytes: _Count
    """Produced and not acknowledged yet."""
    waiting_bytes: _Count
    """Of `queued_bytes`: those held back until the consumer has room; they don't wait for the link."""
    background_bytes: _Count = 0
    """Of `queued_bytes`: those of background transfers, which get the bandwidth that others leave."""
    open_bytes: _Count
    """`queued_bytes`, and bytes that the open transfers have still to produce."""
    acked_bytes_total: _Count
    unsent_bytes: _Count
    """Bytes that the kernel has and could not send yet."""
    filled_connections: _Count
    """Connections with unsent bytes: the path, the pace or the peer limits them, not the sender's process."""
    delivery_bits_per_s: _Rate
    """Sum of the kernel's newest delivery rates."""
    rtt_s: _RoundTrip
    """The mean round trip of the connections that have something in flight; 0 without any."""
    least_rtt_s: _RoundTrip
    retransmits_total: _Count = 0
    sent_bytes_total: _Count
    """As the kernel counts them, resent bytes included."""
    resent_bytes_total: _Count
    busy_s_total: _Seconds
    """Seconds with something in flight, summed over the connections."""
    receiver_limited_s_total: _Seconds
    """Of `busy_s_total`: seconds with the peer's receive window shut."""
    connections_up: _Count
    connections: _Count
    """Connections that should be up: all but those to peers on demand without a transfer so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSample(LinkReport):
    """One producer's (rank's) report on a link. It has crossed that link itself, so it may be late."""

    at_s: float
    """When it was taken at the latest, by the observer's clock."""

    @classmethod
    def of_report(cls, report: Mapping[str, Any], at_s: float) -> "SenderSample":
        """From one entry of a sender's telemetry.

        Raises:
            ValueError: a field is missing or out of bounds.
        """
        return _sample(cls, {**report, "pace_bits_per_s": report.get("pace_bits_per_s") or None}, at_s)

    @property
    def ready_bytes(self) -> int:
        """Bytes that wait for nothing but the link."""
        return max(self.queued_bytes - self.waiting_bytes, 0)

    @property
    def filled_share(self) -> float:
        """Share of the connections whose kernel had more than it could send: for them the producer is fast enough."""
        return min(self.filled_connections / self.connections_up, 1.0) if self.connections_up else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalReport:
    """What has arrived over one or more connections, by the kernel of the consumer."""

    bytes_total: _Count
    """In order, since the start."""
    segments_total: _Count
    """Segments that came, also out of order or twice: a lost one does not hold this count back."""
    mss_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 1448
    """Payload of a full segment."""
    unread_bytes: _Count = 0
    """Of these, what the consumer has not read yet."""
    rtt_s: _RoundTrip = 0.0
    """Round-trip time as the consumer's kernel sees it; 0: unknown."""
    connections: _Count = 1
    """Connections over which bytes come."""

    def __add__(self, other: "ArrivalReport") -> "ArrivalReport":
        """Of all connections of both."""
        return ArrivalReport(
            bytes_total=self.bytes_total + other.bytes_total,
            segments_total=self.segments_total + other.segments_total,
            mss_bytes=max(self.mss_bytes, other.mss_bytes),
            unread_bytes=self.unread_bytes + other.unread_bytes,
            rtt_s=max(self.rtt_s, other.rtt_s),
            connections=self.connections + other.connections,
        )

    @property
    def ended(self) -> "ArrivalReport":
        """What is left of it when its connections have ended: its totals."""
        return replace(NOTHING_ARRIVED, bytes_total=self.bytes_total, segments_total=self.segments_total)


NOTHING_ARRIVED = ArrivalReport(bytes_total=0, segments_total=0, mss_bytes=0, connections=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSample(ArrivalReport):
    """One consumer's (rank's) report of what arrives over a link. It is near the observer, so it is never late."""

    at_s: float

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
