"""Random lengths from a length distribution, thousands at once."""

from dataclasses import dataclass

import numpy as np

from prfaas.workload.lengths import LengthDistribution
from prfaas.workload.traffic.arrivals import FloatArray, IntArray

# A continuous distribution is drawn from so many bins, evenly within each.
_BINS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class LengthSampler:
    """Lengths from `lower` (excluded) to `upper` of bins with these cumulative probabilities."""

    cumulative: FloatArray
    lower: FloatArray
    upper: FloatArray

    @classmethod
    def of(cls, lengths: LengthDistribution) -> "LengthSampler":
        """Exact for distributions with atoms; otherwise exact up to what happens within one of 4,096 bins."""
        bins = lengths.fine_bins() if lengths.atoms() is not None else lengths.bins(_BINS)
        cumulative = np.cumsum(bins.weights)
        lower = bins.lengths if lengths.atoms() is not None else np.maximum(bins.lower, lengths.low)
        upper = bins.lengths if lengths.atoms() is not None else bins.upper
        return cls(cumulative / cumulative[-1], lower, upper)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        """`count` independent lengths in whole tokens, at least 1."""
        bins = np.searchsorted(self.cumulative, rng.random(count), side="right")
        lower = self.lower[bins]
        lengths = lower + rng.random(count) * (self.upper[bins] - lower)
        whole: IntArray = np.maximum(np.rint(lengths), 1).astype(np.int64)
        return whole
