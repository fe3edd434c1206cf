"""Meter of one link, from arrivals and senders' reports: bytes carried, bytes that wait, and the capacity."""

from collections import deque
from collections.abc import Mapping
from math import inf
from statistics import fmean, median
from typing import Literal

from prfaas.core.link.congestion import EGRESS_WINDOW_S, NetworkSigns
from prfaas.core.link.samples import ArrivalSample, SenderSample
from prfaas.core.units import BITS_PER_BYTE

LinkCondition = Literal[
    "clear", "busy", "congested", "slow", "slow-sender", "slow-receiver", "unheard", "down"
]
"""clear; busy: as full as its pace allows; congested: its queues build up, or it loses; slow: it carries less than
configured; slow-sender, slow-receiver: one end and not the link sets the pace; unheard: neither reports nor bytes come;
down: its connections are."""

FRESH_S = 0.6
"""Older reports of senders are not judged by themselves."""
# Connections are being made again for a while after an engine's start.
_DOWN_AFTER_S = 1.5

# How long the link must have been full without a break to be judged, and how long a burst must be to raise it.
_FULL_S, _LONGEST_FULL_S = 0.5, 1.2
_ROUND_TRIPS = 3.0
_JUDGED_EVERY_S = 0.25
_SLACK_S = 0.02
_MORE = 1.5
_LONGEST_LOOK_S = 0.4
_BURST_S = 0.3
# A link on which nothing moves for longer is dark, or its connections wait for their timers: that is no measurement.
_STILL_S = 0.6
_MEASURED = 5
# A link that carries less lets queues grow or drops. Without that a machine may have been busy: longer proof is needed.
_ENOUGH, _ENOUGH_WITHOUT_SIGNS = 3, 8
# Windows that differ by more are of different links: one before a change, one after.
_AGREE = 1.25
_DEAD_BAND = 0.1
_SHORTFALL = 0.85
_FLOOR = 0.01

_RECEIVER_LIMITED = 0.25
_UNREAD_BYTES = 512 << 10
_STARVED_S = 0.3

# What senders may use of a link that carries less than configured: little more, or twice as much while that pays.
_HEADROOM, _CLIMBING = 1.15, 2.0
_FLOW_LOOKS = 16
_PROBE_S, _PROBE_EVERY_S, _PROBE_AGAIN_S = 0.6, 3.0, 0.9
_LEAST_PROBE_BYTES = 64 << 10
# Counters that jump back and forth at a consumer must not grow the sum beyond what JSON can tell.
_MOST_CARRIED_BYTES = 1 << 62


class LinkMeter:
    """Sums the ends of one link.

    `configured_bits_per_s` > 0 is the deployment file's bandwidth; a link without a report or bytes for `silence_s` is
    not up.

    The capacity starts as configured. The link is *full* while a sender's kernel has more than it can send; it could
    then carry the pace of those connections. It is full, too, while round trips are twice the least and half as much
    again as they hold is ready. What the consumers' kernels take in meanwhile is measured four
    times a second, over 0.5 s or three round trips, at most 1.2 s. It says nothing where it is 0.85 of what could come
    or more, or where a receive window is shut (a quarter of the time). Three measurements in a row that agree within
    1.25 move the capacity to the median of the last five, if that is more than a tenth away; eight, where neither
    round trip nor retransmissions show a queue.
    What arrives is also a lower bound: 0.3 s with more than the capacity raise it at once, where nothing is congested.

    While a sender's report is late (0.6 s), its last one holds until all bytes of that have arrived. A round trip of
    twice the least, as the consumer's kernel sees it, means a full link without any report.
    Nothing else moves the capacity: time alone never does. It stays between 1 % and all of what was configured.
    A link believed slow and without work asks for probes: every 3 s as many bytes as twice the capacity carries in
    0.6 s, and 0.9 s after one that has raised the capacity.
    """

    def __init__(self, configured_bits_per_s: float, now_s: float, silence_s: float) -> None:
        self.configured_bits_per_s = configured_bits_per_s
        self.silence_s = silence_s
        self.capacity_bits_per_s = configured_bits_per_s
        self.carried_bytes = 0
        """Since the start, in order."""
        self._segment_bytes = 0
        """By the segments that came, in any order. Losses make the count in order stop and jump; but a kernel whose
        network card or host has merged segments counts those as one. So whichever is more is nearer to the truth."""
        self.seen_s = now_s
        """When something was last heard: of a sender, or because bytes came."""
        self.network = NetworkSigns(now_s)
        self._senders: dict[str, SenderSample] = {}
        self._carried_then: dict[str, int] = {}
        """`carried_bytes` when a sender's newest sample came."""
        self._arrivals: dict[str, ArrivalSample] = {}
        self._knows_arrivals = False
        self._flowed_s = now_s
        self._history: deque[tuple[float, int]] = deque([(now_s, 0)])
        self._flow: deque[tuple[float, int, int]] = deque([(now_s, 0, 0)], maxlen=_FLOW_LOOKS)
        self._looked_s = now_s
        self._full_since_s: float | None = None
        self._full_s = -inf
        self._judged_s = self._measured_s = now_s
        self._full_paces: list[float] = []
        self._limited: tuple[float, float] = (0.0, 0.0)
        self._measured: deque[float] = deque(maxlen=_ENOUGH_WITHOUT_SIGNS)
        self._is_pace_limited = False
        self._is_climbing = False
        self._slow_end: LinkCondition | None = None
        self._starved_since_s: float | None = None
        self._connected_s = now_s
        self._worked_s = now_s
        self._probed_s = now_s
        self._raised_s = -inf

    def reconfigure(self, bits_per_s: float, silence_s: float) -> None:
        """Take what a deployment file now says. The believed capacity of a slow link stays, up to the bandwidth."""
        self.silence_s = silence_s
        was_whole = not self.is_slow
        self.configured_bits_per_s = bits_per_s
        self.capacity_bits_per_s = bits_per_s if was_whole else min(self.capacity_bits_per_s, bits_per_s)

    def observe(
        self, senders: Mapping[str, SenderSample], arrivals: Mapping[str, ArrivalSample], now_s: float
    ) -> int:
        """Take the newest samples, by producer rank and by consumer rank; one that is missing is forgotten.

        Before the first arrivals, what senders say was acknowledged counts as carried.

        Returns:
            The bytes carried since the last call.
        """
        carried, of_segments, at_s = self._carried(senders, arrivals)
        for name, sample in senders.items():
            before = self._senders.get(name)
            if before is None or sample.at_s > before.at_s:
                self._carried_then[name] = self.carried_bytes
        carried = min(carried, _MOST_CARRIED_BYTES - self.carried_bytes)
        self.carried_bytes += carried
        self._segment_bytes += of_segments
        self._senders, self._arrivals = dict(senders), dict(arrivals)
        heard_s = max((sample.at_s for sample in senders.values()), default=self.seen_s)
        self.seen_s = max(self.seen_s, heard_s, at_s if of_segments and at_s is not None else self.seen_s)
        if self.connections_up or not any(sample.connections for sample in senders.values()):
            self._connected_s = now_s
        fresh = [sample for sample in senders.values() if now_s - sample.at_s <= FRESH_S]
        self.network.look(fresh, len(senders), arrivals, now_s)
        if at_s is None or at_s <= self._looked_s:
            if now_s - self._looked_s > _LONGEST_LOOK_S:
                self._restart()
            return carried
        if at_s - self._looked_s > _LONGEST_LOOK_S:
            self._restart()
        self._history.append((at_s, self.carried_bytes))
        self._flow.append((at_s, self.carried_bytes, self._segment_bytes))
        while len(self._history) > 2 and self._history[1][0] <= at_s - EGRESS_WINDOW_S:
            self._history.popleft()
        self._looked_s = at_s
        if carried or of_segments:
            self._flowed_s = at_s
        elif at_s - self._flowed_s > _STILL_S:
            self._restart()
        self._judge(fresh, now_s)
        return carried

    @property
    def queued_bytes(self) -> int:
        """Produced and not acknowledged yet."""
        return sum(sample.queued_bytes for sample in self._senders.values())

    @property
    def open_bytes(self) -> int:
        """Of open transfers, not carried yet; also what is still to be produced; without what is in the background."""
        return sum(max(each.open_bytes - each.background_bytes, 0) for each in self._senders.values())

    @property
    def connections_up(self) -> int:
        return sum(sample.connections_up for sample in self._senders.values())

    @property
    def delivery_bits_per_s(self) -> float:
        """The kernels' newest delivery rates."""
        return sum(sample.delivery_bits_per_s for sample in self._senders.values())

    @property
    def congestion(self) -> float:
        """The level of congestion (`CongestionSignal`)."""
        return self.network.signal.level

    @property
    def is_slow(self) -> bool:
        """True if it is believed to carry less than configured."""
        return self.capacity_bits_per_s < (1 - _DEAD_BAND) * self.configured_bits_per_s

    @property
    def pace_bits_per_s(self) -> float:
        """The rate at which senders may send together; infinite where the link is not slow."""
        if not self.is_slow:
            return inf
        return (_CLIMBING if self._is_climbing else _HEADROOM) * self.capacity_bits_per_s

    def egress_bits_per_s(self, now_s: float) -> float:
        """The mean rate over the last two seconds; 0 where nothing is known of them."""
        start_s, start_bytes = self._history[0]
        end_s, end_bytes = self._history[-1]
        if end_s <= start_s or end_s < now_s - EGRESS_WINDOW_S:
            return 0.0
        return BITS_PER_BYTE * (end_bytes - start_bytes) / (end_s - start_s)

    def is_connected(self, now_s: float) -> bool:
        """False when for a while no connection was up at any producer."""
        return now_s - self._connected_s < _DOWN_AFTER_S or not self._senders

    def is_heard(self, now_s: float) -> bool:
        """True if a sender's report or any bytes have come in the last `silence_s`."""
        return now_s - self.seen_s <= self.silence_s

    def is_up(self, now_s: float) -> bool:
        """True if the link may be used: connected and heard of."""
        return self.is_connected(now_s) and self.is_heard(now_s)

    def condition(self, now_s: float) -> LinkCondition:
        """The link's condition in the last seconds: the first that holds of `LinkCondition`'s last seven."""
        if not self.is_connected(now_s):
            return "down"
        if not self.is_heard(now_s):
            return "unheard"
        if self._slow_end is not None:
            return self._slow_end
        if self.congestion:
            return "congested"
        if self.is_slow:
            return "slow"
        return "busy" if self._is_pace_limited else "clear"

    def probe_bytes(self, now_s: float) -> int:
        """Bytes of a bandwidth probe to send over the link now; 0: none. The caller sends them."""
        every_s = _PROBE_AGAIN_S if self._raised_s > self._probed_s else _PROBE_EVERY_S
        is_due = now_s - self._probed_s >= every_s and now_s - self._worked_s >= _PROBE_AGAIN_S
        if not (is_due and self.is_slow and self.is_up(now_s) and now_s - self.seen_s <= FRESH_S):
            return 0
        self._probed_s = now_s
        self._is_climbing = True
        bits_per_s = min(_CLIMBING * self.capacity_bits_per_s, self.configured_bits_per_s)
        return max(int(_PROBE_S * bits_per_s / BITS_PER_BYTE), _LEAST_PROBE_BYTES)

    def _carried(
        self, senders: Mapping[str, SenderSample], arrivals: Mapping[str, ArrivalSample]
    ) -> tuple[int, int, float | None]:
        """The bytes carried since the last call, those by segments, and until when that is known.

        The time is None where it is not known of all.
        """
        carried = of_segments = 0
        self._knows_arrivals = self._knows_arrivals or bool(arrivals)
        if self._knows_arrivals:
            # Acknowledgements are the consumer's own, and would take a slow one for a slow link.
            for name, arrival in arrivals.items():
                earlier = self._arrivals.get(name)
                if earlier is not None:
                    carried += _grown(arrival.bytes_total, earlier.bytes_total)
                    of_segments += _grown(arrival.segments_total, earlier.segments_total) * arrival.mss_bytes
            return carried, of_segments, min((arrival.at_s for arrival in arrivals.values()), default=None)
        for name, sample in senders.items():
            before = self._senders.get(name)
            if before is not None:
                carried += _grown(sample.acked_bytes_total, before.acked_bytes_total)
        return carried, carried, min((sample.at_s for sample in senders.values()), default=None)

    def _filled_pace(self, fresh: list[SenderSample]) -> float | None:
        """The rate that connections which fill the link may send together; None: none does.

        From fresh reports, and from late ones until all their bytes have arrived.
        """
        reports = fresh
        if len(fresh) < len(self._senders):
            late = [(name, sample) for name, sample in self._senders.items() if sample not in fresh]
            come = {name: self.carried_bytes - self._carried_then.get(name, 0) for name, _ in late}
            reports = fresh + [sample for name, sample in late if sample.ready_bytes > come[name]]
        in_network_bytes = inf
        if self.network.signal.is_queueing:
            # Where its queue is long all may be on its way, and again: none waits in a sender's kernel then.
            flow_bits_per_s = min(self._flow_bits_per_s(_BURST_S), self._flow_bits_per_s(_LONGEST_FULL_S))
            in_network_bytes = flow_bits_per_s / BITS_PER_BYTE * self.network.rtt_s
        shares = [
            (sample, 1.0 if sample.ready_bytes > _MORE * in_network_bytes else sample.filled_share)
            for sample in reports
        ]
        shares = [(sample, share) for sample, share in shares if share]
        if not shares:
            if fresh or not self.network.is_seen_by_receivers(self._arrivals):
                return None
            shares = [(sample, 1.0) for sample in self._senders.values()]
        paces = [
            (self.configured_bits_per_s if sample.pace_bits_per_s is None else sample.pace_bits_per_s) * share
            for sample, share in shares
        ]
        return min(sum(paces), self.configured_bits_per_s)

    def _judge(self, fresh: list[SenderSample], now_s: float) -> None:
        if any(sample.open_bytes for sample in fresh):
            self._worked_s = now_s
        self._raise_by_burst(now_s)
        pace = self._filled_pace(fresh) if self._looked_s - self._flowed_s <= _STILL_S else None
        self._note_starved(fresh, pace is not None, now_s)
        if pace is not None:
            self._full_s = self._looked_s
        elif not (self.network.signal.is_queueing and self._looked_s - self._full_s <= _BURST_S):
            self._restart()
            self._is_pace_limited = False
            return
        else:
            pace = self._full_paces[-1]
        if self._full_since_s is None:
            self._full_since_s = self._judged_s = self._looked_s
            self._full_paces = [pace]
            self._limited = self._receiver_limited()
            return
        self._full_paces.append(pace)
        # Where packets are lost the count in order comes by fits of some round trips.
        seen_s = max((arrival.rtt_s for arrival in self._arrivals.values()), default=0.0)
        window_s = min(max(_FULL_S, _ROUND_TRIPS * max(self.network.rtt_s, seen_s)), _LONGEST_FULL_S)
        if (
            self._looked_s - self._full_since_s < window_s
            or self._looked_s - self._judged_s < _JUDGED_EVERY_S
        ):
            return
        self._judged_s = self._looked_s
        if self._is_receiver_slow():
            self._slow_end = "slow-receiver"
            self._measured.clear()
        else:
            if self._slow_end == "slow-receiver":
                self._slow_end = None
            pace = fmean(self._full_paces)
            # What was held up behind a lost packet may come all at once; it was not carried faster than it was sent.
            self._take(min(self._flow_bits_per_s(window_s), pace), pace, now_s)
        self._full_paces = self._full_paces[-1:]
        self._limited = self._receiver_limited()

    def _flow_bits_per_s(self, window_s: float) -> float:
        """What came in the last so many seconds, or a little more, per second; 0 where less is known."""
        end_s, end_bytes, end_segments = self._flow[-1]
        for start_s, start_bytes, start_segments in reversed(self._flow):
            if end_s - start_s >= window_s - _SLACK_S:
                more = max(end_bytes - start_bytes, end_segments - start_segments)
                return float(BITS_PER_BYTE * more / (end_s - start_s))
        return 0.0

    def _take(self, bits_per_s: float, pace_bits_per_s: float, now_s: float) -> None:
        """A full link has carried that."""
        self._is_pace_limited = bits_per_s >= _SHORTFALL * pace_bits_per_s
        if self._is_pace_limited and not (self.congestion and bits_per_s > self.capacity_bits_per_s):
            self._measured.clear()
            self._is_climbing = self.is_slow and not self.congestion
            if self._is_climbing and bits_per_s > self.capacity_bits_per_s:
                self._set(bits_per_s, now_s)
            return
        self._is_climbing = False
        is_next = self._looked_s - self._measured_s <= 2 * _JUDGED_EVERY_S + _SLACK_S
        self._measured_s = self._looked_s
        if not is_next or (
            self._measured and not 1 / _AGREE <= bits_per_s / max(self._measured[-1], 1.0) <= _AGREE
        ):
            self._measured.clear()
        self._measured.append(bits_per_s)
        if len(self._measured) >= (
            _ENOUGH if self.network.shows_queue(self._arrivals) else _ENOUGH_WITHOUT_SIGNS
        ):
            estimate = median(list(self._measured)[-_MEASURED:])
            if abs(estimate - self.capacity_bits_per_s) > _DEAD_BAND * self.capacity_bits_per_s:
                self._set(estimate, now_s)

    def _raise_by_burst(self, now_s: float) -> None:
        if not self.is_slow or self.congestion:
            return
        bits_per_s = self._flow_bits_per_s(_BURST_S)
        if bits_per_s > (1 + _DEAD_BAND) * self.capacity_bits_per_s:
            self._set(bits_per_s, now_s)

    def _note_starved(self, fresh: list[SenderSample], is_full: bool, now_s: float) -> None:
        """A sender with more ready than it carries until the next look, whose kernel has nothing to send."""
        look_bytes = self.egress_bits_per_s(now_s) / BITS_PER_BYTE * FRESH_S
        starved = not is_full and any(
            sample.ready_bytes > look_bytes and 2 * sample.filled_connections < sample.connections_up
            for sample in fresh
        )
        if not starved:
            self._starved_since_s = None
            if self._slow_end == "slow-sender":
                self._slow_end = None
            return
        if self._starved_since_s is None:
            self._starved_since_s = now_s
        elif now_s - self._starved_since_s >= _STARVED_S:
            self._slow_end = "slow-sender"

    def _receiver_limited(self) -> tuple[float, float]:
        senders = self._senders.values()
        return sum(each.receiver_limited_s_total for each in senders), sum(
            each.busy_s_total for each in senders
        )

    def _is_receiver_slow(self) -> bool:
        limited_s, busy_s = self._receiver_limited()
        share = (limited_s - self._limited[0]) / max(busy_s - self._limited[1], 1e-3)
        return share >= _RECEIVER_LIMITED or any(
            arrival.unread_bytes > _UNREAD_BYTES for arrival in self._arrivals.values()
        )

    def _restart(self) -> None:
        self._full_since_s = None
        if self._slow_end == "slow-receiver":
            self._slow_end = None

    def _set(self, bits_per_s: float, now_s: float) -> None:
        low = _FLOOR * self.configured_bits_per_s
        before = self.capacity_bits_per_s
        self.capacity_bits_per_s = min(max(bits_per_s, low), self.configured_bits_per_s)
        if self.capacity_bits_per_s > before:
            self._raised_s = now_s


def _grown(total: int, before: int) -> int:
    """How much a total has grown; a smaller one is that of a new process, and all of it is new."""
    return total - before if total >= before else total
