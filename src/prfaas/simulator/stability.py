"""Whether a run could have gone on for ever."""

import math

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

# A backlog that grows by less than this share of the arrivals is not told from chance.
_GROWTH = 0.01
# Nor one within so many standard deviations of a queue that is exactly full, whose backlog is a random walk.
_WALK_SDS = 2.0
# Its steps are as uneven as arrivals are in this many parts of the run.
_PARTS = 50


def backlog_growth(
    arrived_s: FloatArray, left_s: FloatArray, start_s: float, end_s: float
) -> tuple[float, int]:
    """By how many requests the mean backlog grew from the second to the last fifth of [start, end], and how many
    arrivals lie between the middles of the two."""
    edges = np.linspace(start_s, end_s, 6)
    early = _mean_open(arrived_s, left_s, edges[1], edges[2])
    late = _mean_open(arrived_s, left_s, edges[4], edges[5])
    middles = (edges[1] + edges[2]) / 2, (edges[4] + edges[5]) / 2
    between = int(np.count_nonzero((arrived_s >= middles[0]) & (arrived_s < middles[1])))
    return late - early, between


def is_stable(arrived_s: FloatArray, left_s: FloatArray, start_s: float, end_s: float) -> bool:
    """True unless the backlog grows with time.

    `left_s`: when each request was done, NaN if never. The mean number of open requests in the last fifth of
    [`start_s`, `end_s`] may exceed that in the second fifth by 1 % of the arrivals between them, or by two standard
    deviations of a random walk of so many steps, whichever is more. So an overload of less than 1 % passes, and with
    few requests more than that: n Poisson arrivals tell an overload of about 2.6 / √n. Where arrivals come in bursts
    the walk's variance is as many times larger as that of their number in fiftieths of the run is than Poisson's.
    """
    growth, between = backlog_growth(arrived_s, left_s, start_s, end_s)
    walk = math.sqrt(between * dispersion(arrived_s, start_s, end_s))
    return growth <= max(_GROWTH * between, _WALK_SDS * walk, 1.0)


def dispersion(arrived_s: FloatArray, start_s: float, end_s: float) -> float:
    """Variance over mean of the number of arrivals in fiftieths of [start, end]; at least 1, Poisson's."""
    counts, _ = np.histogram(arrived_s, bins=_PARTS, range=(start_s, max(end_s, start_s + 1e-9)))
    mean = float(counts.mean())
    return max(float(counts.var()) / mean, 1.0) if mean > 0 else 1.0


def _mean_open(arrived_s: FloatArray, left_s: FloatArray, start_s: float, end_s: float) -> float:
    """Open requests on average over [start, end]."""
    if end_s <= start_s:
        return 0.0
    left = np.where(np.isnan(left_s), np.inf, left_s)
    overlap = np.minimum(left, end_s) - np.maximum(arrived_s, start_s)
    return float(np.clip(overlap, 0.0, None).sum() / (end_s - start_s))
