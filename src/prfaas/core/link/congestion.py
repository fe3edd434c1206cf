"""Congestion of a link: queues that build up or lost packets, with hysteresis (section 3.3: back off early)."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from prfaas.core.link.samples import ArrivalSample, SenderSample

EGRESS_WINDOW_S = 2.0
"""Seconds whose mean counts as the present rate of a link."""

# The least round trip is that of the last 5 to 10 minutes: network paths change.
_LEAST_RTT_S = 300.0
_RECEIVE_INFLATION, _RECEIVE_EXCESS_S = 2.0, 0.020

_QUEUE_ON, _QUEUE_OFF = 2.0, 1.4
_LEAST_QUEUE_S = 0.010
_LOSS_ON, _LOSS_OFF = 0.02, 0.005
_ON_AFTER_S = 0.4
_OFF_AFTER_S = 1.0
# Where the level is 1.
_QUEUE_FULL, _LOSS_FULL = 8.0, 0.2
_LEAST_LEVEL = 0.25


@dataclass(slots=True)
class CongestionSignal:
    """Two signals of the network's own queues.

    The round trip over its least: congestion from 2.0 times and 10 ms more, over below 1.4 times. The retransmitted
    share of the bytes: from 2 %, over below 0.5 %; random loss of 0.1 % is none. Either must last 0.4 s to begin, and
    both must be over for 1 s to end it. The level is 0.25 to 1 meanwhile: 1 where the round trip is 8 times its least,
    or a fifth is sent again.
    """

    level: float = 0.0
    is_suspected: bool = False
    """The last update had a sign of either, though perhaps too small or too new for a level."""
    is_queueing: bool = False
    """The last round trip was at least twice the least: a queue as long as the path itself."""
    _since_s: float | None = None
    """When the signals began to say the opposite of `level`; None: they agree."""

    def update(self, rtt_s: float, least_rtt_s: float, resent_share: float, now_s: float) -> None:
        """Take a fresh look. `rtt_s` 0: nothing is in flight."""
        excess_s = rtt_s - least_rtt_s
        inflation = rtt_s / least_rtt_s if least_rtt_s > 0 and excess_s > _LEAST_QUEUE_S else 1.0
        self.is_queueing = inflation >= _QUEUE_ON
        self.is_suspected = inflation >= _QUEUE_OFF or resent_share >= _LOSS_OFF
        if self.level:
            self._turn(not self.is_suspected, _OFF_AFTER_S, 0.0, now_s)
        is_on = self.is_queueing or resent_share >= _LOSS_ON
        if is_on:
            queue = (inflation - 1) / (_QUEUE_FULL - 1)
            level = min(max(queue, resent_share / _LOSS_FULL, _LEAST_LEVEL), 1.0)
            if self.level:
                self.level = level
            else:
                self._turn(True, _ON_AFTER_S, level, now_s)
        elif not self.level:
            self._since_s = None

    def _turn(self, says_so: bool, after_s: float, level: float, now_s: float) -> None:
        if not says_so:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= after_s:
            self.level, self._since_s = level, None


class NetworkSigns:
    """Round trips and retransmissions of one link, from fresh reports of senders alone.

    While none is fresh, the round trip that the consumers' kernels see stands in where it is long.
    """

    def __init__(self, now_s: float) -> None:
        self.signal = CongestionSignal()
        self.least_rtt_s = 0.0
        """Of the smoothed round trips of the last minutes: the kernel's own least may be a stray packet's."""
        self.rtt_s = 0.0
        """Of what is in flight; the least where nothing is."""
        self.retransmit_ratio = 0.0
        """Of the bytes sent in the last 2 s."""
        self._least_rtts_s = (inf, inf)
        self._least_since_s = now_s
        self._sent: deque[tuple[float, int, int]] = deque()

    def look(
        self,
        fresh: Sequence[SenderSample],
        senders: int,
        arrivals: Mapping[str, ArrivalSample],
        now_s: float,
    ) -> None:
        """Take the fresh reports of `senders` senders in all."""
        rtts_s = [sample.rtt_s for sample in fresh if sample.rtt_s > 0]
        for rtt_s in rtts_s:
            self._note_least(rtt_s, now_s)
        self.rtt_s = max(rtts_s, default=self.least_rtt_s)
        if not fresh and senders and self.is_seen_by_receivers(arrivals):
            self.rtt_s = max(arrival.rtt_s for arrival in arrivals.values())
        if fresh and len(fresh) == senders:
            self._note_sent(
                sum(sample.sent_bytes_total for sample in fresh),
                sum(sample.resent_bytes_total for sample in fresh),
                now_s,
            )
        while self._sent and self._sent[0][0] < now_s - EGRESS_WINDOW_S:
            self._sent.popleft()
        self.retransmit_ratio = self._resent_share()
        self.signal.update(self.rtt_s, self.least_rtt_s, self.retransmit_ratio, now_s)

    def is_seen_by_receivers(self, arrivals: Mapping[str, ArrivalSample]) -> bool:
        """True if a consumer's kernel sees a grown round trip of arriving data: that alone means a full link."""
        limit_s = max(_RECEIVE_INFLATION * self.least_rtt_s, self.least_rtt_s + _RECEIVE_EXCESS_S)
        return self.least_rtt_s > 0 and any(arrival.rtt_s > limit_s for arrival in arrivals.values())

    def shows_queue(self, arrivals: Mapping[str, ArrivalSample]) -> bool:
        """True at any sign of a queue or of drops now, though perhaps too new for a level."""
        return self.signal.is_suspected or self.is_seen_by_receivers(arrivals)

    def _note_least(self, rtt_s: float, now_s: float) -> None:
        if now_s - self._least_since_s > _LEAST_RTT_S:
            self._least_rtts_s, self._least_since_s = (self._least_rtts_s[1], rtt_s), now_s
        older_s, newer_s = self._least_rtts_s
        self._least_rtts_s = (older_s, min(newer_s, rtt_s))
        self.least_rtt_s = min(self._least_rtts_s)

    def _note_sent(self, sent_bytes: int, resent_bytes: int, now_s: float) -> None:
        if self._sent and (sent_bytes < self._sent[-1][1] or resent_bytes < self._sent[-1][2]):
            self._sent.clear()  # a producer has started again
        self._sent.append((now_s, sent_bytes, resent_bytes))

    def _resent_share(self) -> float:
        if not self._sent:
            return 0.0
        _, sent_bytes, resent_bytes = self._sent[-1]
        sent_bytes -= self._sent[0][1]
        resent_bytes -= self._sent[0][2]
        return min(resent_bytes / sent_bytes, 1.0) if sent_bytes else 0.0
