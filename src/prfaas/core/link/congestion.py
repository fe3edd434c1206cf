"""Whether queues build up in the network or packets get lost, with hysteresis (section 3.3: back off early)."""

from dataclasses import dataclass

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
    """The last look had a sign of either, though perhaps too small or too new for a level."""
    _since_s: float | None = None
    """When the signals began to say the opposite of `level`; None: they agree."""

    def update(self, rtt_s: float, least_rtt_s: float, resent_share: float, now_s: float) -> None:
        """Take a fresh look. `rtt_s` 0: nothing is in flight."""
        excess_s = rtt_s - least_rtt_s
        inflation = rtt_s / least_rtt_s if least_rtt_s > 0 and excess_s > _LEAST_QUEUE_S else 1.0
        self.is_suspected = inflation >= _QUEUE_OFF or resent_share >= _LOSS_OFF
        if self.level:
            self._turn(not self.is_suspected, _OFF_AFTER_S, 0.0, now_s)
        is_on = inflation >= _QUEUE_ON or resent_share >= _LOSS_ON
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
