"""Time to the first token: the distribution of prefill service times, and an estimate with waiting."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

ESTIMATE_LABEL = "estimate: Poisson arrivals, one first-come-first-served queue per prefill pool (M/G/k)"
_BISECTIONS = 100


@dataclass(frozen=True, slots=True)
class TtftEstimate:
    """TTFT with waiting in M/G/k queues at a share of Λ_max: an estimate, not a promise."""

    label: str
    load: float
    """The share of Λ_max that arrives."""
    requests_per_s: float
    mean_s: float | None
    """None if some prefill pool has more work than time: by E[T(L)], which the paper's T(E[L]) understates."""
    p90_s: float | None
    busiest_utilisation: float
    """Of the fullest prefill pool."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPoolLoad:
    """Equal prefill instances and what they work on."""

    name: str
    instances: int
    seconds: "FloatArray"
    """Service times."""
    weights: "FloatArray"
    """The probability that a request of the whole system has that service time here."""
    smooth: bool
    """False if the service times are the only values that occur."""

    @property
    def work_s(self) -> float:
        """Seconds of work per request of the whole system."""
        return float((self.seconds * self.weights).sum())


@dataclass(frozen=True, slots=True, eq=False)
class StageWork:
    """What the stages of a deployment do for a request, at roles and routes that are given."""

    pools: tuple[PrefillPoolLoad, ...]
    link_rates: dict[str, float]
    """Requests per second of the whole system at which a link is full, by its name; only of links that are used."""
    decode_parts: dict[str, float]
    """The part of all requests that each PD cluster decodes."""


def service_ttft(pools: tuple[PrefillPoolLoad, ...], quantile: float = 0.9) -> tuple[float, float]:
    """Mean and quantile of the prefill service times in seconds, without waiting: what Table 6 prints."""
    import numpy as np

    seconds = np.concatenate([pool.seconds for pool in pools])
    weights = np.concatenate([pool.weights for pool in pools])
    order = np.argsort(seconds)
    seconds, weights = seconds[order], weights[order] / weights.sum()
    cumulative = np.cumsum(weights)
    mean = float((seconds * weights).sum())
    if all(pool.smooth for pool in pools):
        return mean, float(np.interp(quantile, cumulative - weights / 2, seconds))
    return mean, float(seconds[min(int(np.searchsorted(cumulative, quantile - 1e-12)), len(seconds) - 1)])


def queueing_ttft(pools: tuple[PrefillPoolLoad, ...], lambda_max: float, load: float) -> TtftEstimate:
    """TTFT with waiting at `load` × `lambda_max` requests per second.

    Per pool M/G/k by Allen and Cunneen: the wait of M/M/k (Erlang C) times (1 + CV²) / 2, exponential given
    that there is one. Not a bound: real arrivals come in bursts.
    """
    import numpy as np

    rate = load * lambda_max
    busiest = max((rate * pool.work_s / pool.instances for pool in pools if pool.instances), default=0.0)
    idle = any(pool.instances == 0 and pool.weights.any() for pool in pools)
    if busiest >= 1 or idle:
        return TtftEstimate(ESTIMATE_LABEL, load, rate, None, None, math.inf if idle else busiest)
    waits = [wait_of(pool, rate) for pool in pools]
    mean = sum(
        float((pool.weights * (pool.seconds + chance * wait_s)).sum())
        for pool, (chance, wait_s) in zip(pools, waits, strict=True)
    )

    def at_most(seconds: float) -> float:
        total = 0.0
        for pool, (chance, wait_s) in zip(pools, waits, strict=True):
            left = seconds - pool.seconds
            late = chance * np.exp(-np.maximum(left, 0.0) / wait_s) if chance > 0 else np.zeros(len(left))
            total += float((pool.weights * np.where(left >= 0, 1 - late, 0.0)).sum())
        return total

    low, high = 0.0, 1.0
    while at_most(high) < 0.9:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(middle) < 0.9 else (low, middle)
    return TtftEstimate(ESTIMATE_LABEL, load, rate, mean, high, busiest)


def erlang_c(servers: int, offered: float) -> float:
    """The chance to wait in M/M/k with `offered` < `servers` Erlang, by the stable recursion of Erlang B."""
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def wait_of(pool: PrefillPoolLoad, rate: float) -> tuple[float, float]:
    """The chance to wait at `rate` requests per second of the system, and the mean wait in seconds of those who do.

    First come, first served. The pool must have less work than time.
    """
    share = float(pool.weights.sum())
    if share <= 0:
        return 0.0, 0.0
    arrivals = rate * share
    service_s = pool.work_s / share
    second_moment = float((pool.seconds**2 * pool.weights).sum()) / share
    variation = max(second_moment / service_s**2 - 1, 0.0)
    offered = arrivals * service_s
    chance = erlang_c(pool.instances, offered)
    return chance, (1 + variation) / 2 * service_s / (pool.instances - offered)
