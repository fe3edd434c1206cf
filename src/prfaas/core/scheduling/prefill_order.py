"""Which of the prefills that wait for an instance of their cluster is next."""

import math
from dataclasses import dataclass

# What has waited is forgotten with this many others that waited: some minutes of a case study's traffic.
_REMEMBERED = 500
# The spread of places in line, in mean waits and at most in mean prefills. Found with bench/policies.py: more lowers
# the mean TTFT and lifts P99, which the first limits at loads of 0.8 to 0.95 and the second in bursts.
_SPREAD_WAITS = 1.4
_SPREAD_PREFILLS = 4.5
_LEAST_S = 1e-6
# Below it the order is by length to all digits.
_LEAST_FAIRNESS = 1e-6


@dataclass(slots=True)
class PrefillWaits:
    """How long the prefills of one pool have waited lately, of those that had to wait at all.

    Each wait is weighted with its prefill's seconds. The mean weighted so is nearly the same in every order (exactly
    so on one server: Kleinrock's conservation law, 1965), so an order that follows it does not follow itself.
    """

    mean_prefill_s: float = 0.0
    """Their mean seconds of work; 0: none has waited yet."""
    _work_times_wait: float = 0.0
    _count: int = 0

    @property
    def mean_wait_s(self) -> float:
        """Seconds; 0: none has waited yet."""
        return self._work_times_wait / self.mean_prefill_s if self.mean_prefill_s > 0.0 else 0.0

    def add(self, wait_s: float, prefill_s: float) -> None:
        """A prefill of so many seconds begins after a wait."""
        if wait_s <= 0.0:
            return
        self._count += 1
        weight = 1.0 / min(self._count, _REMEMBERED)
        self.mean_prefill_s += weight * (prefill_s - self.mean_prefill_s)
        self._work_times_wait += weight * (wait_s * prefill_s - self._work_times_wait)


def place_in_line_s(now_s: float, prefill_s: float, waits: PrefillWaits, fairness: float) -> float:
    """When a prefill that comes now counts as having come: the least is next.

        place = now + s · ln((1 − e^(−T / s)) / (1 − e^(−E / s)))

    T: its seconds; E: the mean of those that waited; s: the spread. That is the γ-boost with γ = 1 / s (Yu and Scully
    2024), moved so that a prefill of mean length keeps its place. With γ the rate at which long waits become rare,
    no other order makes them rarer in the long run. That rate is one over the mean wait of those that wait, where
    waits are exponential. Here

        s = (1 − f) / f · min(1.4 · mean wait, 4.5 · E)

    so that short prefills gain little where nobody waits long, and long ones lose no more in an overload than the
    second limit allows: s · −ln(1 − e^(−E / s)), 7.3 E at f = ½.

    Args:
        now_s: when it comes.
        prefill_s: what it takes.
        waits: of its pool.
        fairness: f, from 0 to 1. 1: in the order of arrival; near 0: the shortest is next.
    """
    mean_s = waits.mean_prefill_s
    if fairness >= 1.0 or mean_s <= 0.0:
        return now_s
    spread_s = min(_SPREAD_WAITS * waits.mean_wait_s, _SPREAD_PREFILLS * mean_s)
    spread_s *= (1.0 - fairness) / max(fairness, _LEAST_FAIRNESS)
    if spread_s < _LEAST_S:
        return now_s
    own, usual = max(prefill_s, _LEAST_S) / spread_s, mean_s / spread_s
    return now_s + spread_s * (math.log(-math.expm1(-own)) - math.log(-math.expm1(-usual)))
