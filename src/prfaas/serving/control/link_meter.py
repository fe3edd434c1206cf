"""One link by the reports of its producers, ten times a second: what it carries, what waits, what it can carry."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EGRESS_WINDOW_S = 2.0
_SEGMENT_BYTES = 1448

# Bytes in flight are queued bytes too, as their acknowledgement takes a round trip and some.
_ROUND_TRIPS_IN_FLIGHT = 1.5
_JUDGED_S = 1.0
_SHORTFALL = 0.9
_SHORTFALLS_TO_LOWER = 3
_IDLE_BEFORE_PROBING_S = 5.0
_PROBING_PER_S = 1.05
_FLOOR = 0.01
# Connections are being made again for a while after an engine's start.
_DOWN_AFTER_S = 1.5


@dataclass(frozen=True, slots=True)
class SenderSample:
    """One producer's (rank's) report on a link. Totals only grow, but start again with the producer."""

    at_s: float
    """By the control plane's clock."""
    pace_bits_per_s: float | None
    """What the producer may send; None: unknown."""
    queued_bytes: int
    """Produced and not acknowledged yet."""
    waiting_bytes: int
    """Of these, what waits for room at a consumer and not for the link."""
    open_bytes: int
    """Of open transfers, not acknowledged yet; also what is still to be produced."""
    acked_bytes_total: int
    delivery_bits_per_s: float
    rtt_s: float
    retransmits_total: int
    connections_up: int
    connections: int

    @classmethod
    def of_report(cls, report: Mapping[str, Any], at_s: float) -> "SenderSample":
        """From one entry of `Observer.stats()["sender"]["links"]`.

        Raises:
            KeyError, TypeError, ValueError: the entry is not what it should be.
        """
        pace = float(report["capacity_bits_per_s"] or 0.0)
        return cls(
            at_s=at_s,
            pace_bits_per_s=pace if pace > 0 else None,
            queued_bytes=max(int(report["queued_bytes"]), 0),
            waiting_bytes=max(int(report.get("waiting_bytes", 0)), 0),
            open_bytes=max(int(report.get("open_bytes", report["queued_bytes"])), 0),
            acked_bytes_total=int(report["acked_bytes_total"]),
            delivery_bits_per_s=float(report["delivery_bits_per_s"]),
            rtt_s=float(report["rtt_s"]),
            retransmits_total=int(report["retransmits_total"]),
            connections_up=int(report["connections_up"]),
            connections=int(report["connections"]),
        )

    @property
    def ready_bytes(self) -> int:
        """Bytes that wait for nothing but the link."""
        return max(self.queued_bytes - self.waiting_bytes, 0)


@dataclass(slots=True)
class _Interval:
    """Sums over a time that is not yet long enough to judge the capacity by."""

    start_s: float
    acked_bytes: float
    busy: bool
    paced_bits: float


class LinkMeter:
    """Sums the producers of one link. `configured_bits_per_s` > 0 is the deployment file's bandwidth.

    The capacity starts as configured. A second is busy when every look found more ready to be sent than the link can
    carry until the next look and in 1.5 round trips. The link never ran dry then, so what it carried is a
    measurement. Divided by what the producers with something to send may send together, it is a share; that share of
    the configured bandwidth is the estimate.

    Three busy seconds in a row with an estimate below 0.9 of the capacity lower the capacity to their mean. A busy
    second with a higher estimate raises it: at once to what was carried, beyond that by 5 % a second. After 5 s
    without a busy second it grows by 5 % a second too, since only traffic can show the true capacity. It stays
    between 1 % and all of what was configured.

    The link is connected unless no connection was up at any producer for 1.5 s though some should be.
    """

    def __init__(self, configured_bits_per_s: float, now_s: float) -> None:
        self.configured_bits_per_s = configured_bits_per_s
        self.capacity_bits_per_s = configured_bits_per_s
        self.seen_s = now_s
        self.acked_bytes = 0
        self.retransmits = 0
        self._latest: dict[str, SenderSample] = {}
        self._history: deque[tuple[float, int, int]] = deque([(now_s, 0, 0)])
        self._interval: _Interval | None = None
        self._shortfalls: list[float] = []
        self._busy_at_s = now_s
        self._grown_s = now_s
        self._looked_s = now_s
        self._connected_s = now_s

    def observe(self, samples: Mapping[str, SenderSample], now_s: float) -> int:
        """Take the newest samples by producer rank; a rank that is missing is forgotten.

        Returns:
            The bytes acknowledged since the last call.
        """
        if not samples:
            self._latest = {}
            self._interval = None
            return 0
        acked, retransmits = self._since_latest(samples)
        self._latest = dict(samples)
        self.seen_s = max(self.seen_s, *(sample.at_s for sample in samples.values()))
        self.acked_bytes += acked
        self.retransmits += retransmits
        self._history.append((now_s, self.acked_bytes, self.retransmits))
        while len(self._history) > 2 and self._history[1][0] <= now_s - EGRESS_WINDOW_S:
            self._history.popleft()
        if self.connections_up or not any(sample.connections for sample in samples.values()):
            self._connected_s = now_s
        self._judge(now_s, acked)
        return acked

    @property
    def queued_bytes(self) -> int:
        """Produced and not acknowledged yet."""
        return sum(sample.queued_bytes for sample in self._latest.values())

    @property
    def open_bytes(self) -> int:
        """Of open transfers, not acknowledged yet; also what is still to be produced."""
        return sum(sample.open_bytes for sample in self._latest.values())

    @property
    def connections_up(self) -> int:
        return sum(sample.connections_up for sample in self._latest.values())

    @property
    def delivery_bits_per_s(self) -> float:
        return sum(sample.delivery_bits_per_s for sample in self._latest.values())

    @property
    def rtt_s(self) -> float:
        """The least over producers that know one; 0 if none does."""
        return min((sample.rtt_s for sample in self._latest.values() if sample.rtt_s > 0), default=0.0)

    def egress_bits_per_s(self, now_s: float) -> float:
        """What was acknowledged in the last two seconds, per second; 0 without a report in them."""
        start_s, start_bytes, _ = self._history[0]
        end_s, end_bytes, _ = self._history[-1]
        if end_s <= start_s or end_s < now_s - EGRESS_WINDOW_S:
            return 0.0
        return 8 * (end_bytes - start_bytes) / (end_s - start_s)

    @property
    def retransmit_ratio(self) -> float:
        """Share of the segments of the last two seconds that were sent again (a segment is taken for 1448 bytes)."""
        _, start_bytes, start_again = self._history[0]
        _, end_bytes, end_again = self._history[-1]
        again = end_again - start_again
        segments = again + (end_bytes - start_bytes) / _SEGMENT_BYTES
        return again / segments if segments > 0 else 0.0

    def is_connected(self, now_s: float) -> bool:
        """False when for a while no connection was up at any producer."""
        return now_s - self._connected_s < _DOWN_AFTER_S or not self._latest

    def _since_latest(self, samples: Mapping[str, SenderSample]) -> tuple[int, int]:
        acked = retransmits = 0
        for producer, sample in samples.items():
            before = self._latest.get(producer)
            if before is None:
                continue
            # A smaller total is that of a new process, and all of it is new.
            grown = sample.acked_bytes_total - before.acked_bytes_total
            acked += grown if grown >= 0 else sample.acked_bytes_total
            retransmits += max(sample.retransmits_total - before.retransmits_total, 0)
        return acked, retransmits

    def _judge(self, now_s: float, acked_bytes: int) -> None:
        pace_bits_per_s = self._pace_of_busy()
        look_s = now_s - self._looked_s
        enough_s = look_s + _ROUND_TRIPS_IN_FLIGHT * self.rtt_s
        ready_bytes = sum(sample.ready_bytes for sample in self._latest.values())
        busy = 8 * ready_bytes > enough_s * min(self.capacity_bits_per_s, pace_bits_per_s)
        self._looked_s = now_s
        interval = self._interval
        if interval is None:
            self._interval = _Interval(now_s, 0, busy, 0.0)
            return
        interval.acked_bytes += acked_bytes
        interval.busy = interval.busy and busy
        interval.paced_bits += pace_bits_per_s * look_s
        length_s = now_s - interval.start_s
        if length_s < _JUDGED_S:
            return
        if interval.busy:
            carried_bits = 8 * interval.acked_bytes
            share = carried_bits / interval.paced_bits
            self._measured(carried_bits / length_s, share * self.configured_bits_per_s, now_s)
        else:
            self._shortfalls.clear()
            self._probe(now_s)
        self._interval = _Interval(now_s, 0, busy, 0.0)

    def _measured(self, carried_bits_per_s: float, estimate_bits_per_s: float, now_s: float) -> None:
        self._busy_at_s = now_s
        if estimate_bits_per_s >= _SHORTFALL * self.capacity_bits_per_s:
            self._shortfalls.clear()
            risen = min(max(self._grown(now_s), carried_bits_per_s), estimate_bits_per_s)
            self._set(max(self.capacity_bits_per_s, risen))
        else:
            self._shortfalls.append(estimate_bits_per_s)
            if len(self._shortfalls) >= _SHORTFALLS_TO_LOWER:
                self._set(sum(self._shortfalls) / len(self._shortfalls))
                self._shortfalls.clear()
        self._grown_s = now_s

    def _probe(self, now_s: float) -> None:
        if now_s - self._busy_at_s >= _IDLE_BEFORE_PROBING_S:
            self._set(self._grown(now_s))
        self._grown_s = now_s

    def _grown(self, now_s: float) -> float:
        return float(self.capacity_bits_per_s * _PROBING_PER_S ** (now_s - self._grown_s))

    def _set(self, bits_per_s: float) -> None:
        low = _FLOOR * self.configured_bits_per_s
        self.capacity_bits_per_s = min(max(bits_per_s, low), self.configured_bits_per_s)

    def _pace_of_busy(self) -> float:
        """What the producers that have something to send may send together."""
        busy = [sample for sample in self._latest.values() if sample.ready_bytes > 0]
        if not busy or any(sample.pace_bits_per_s is None for sample in busy):
            return self.configured_bits_per_s
        return min(sum(sample.pace_bits_per_s or 0.0 for sample in busy), self.configured_bits_per_s)
