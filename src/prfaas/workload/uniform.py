"""Lengths of an interval, all alike."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.workload.errors import WorkloadError
from prfaas.workload.lengths import LengthDistribution, check_factor, check_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Interval(LengthDistribution):
    low_tokens: float
    high_tokens: float


class Uniform(_Interval):
    """Continuous and uniform on [low, high] tokens. WorkloadError unless 0 < low < high."""

    __slots__ = ()

    def __init__(self, low: float, high: float) -> None:
        if not (math.isfinite(high) and 0 < low < high):
            raise WorkloadError(
                f"the limits of lengths must satisfy 0 < low < high, not {low!r} and {high!r}"
            )
        _Interval.__init__(self, low, high)

    @property
    def low(self) -> float:
        return self.low_tokens

    @property
    def high(self) -> float:
        return self.high_tokens

    def above(self, thresholds: "FloatArray") -> "tuple[FloatArray, FloatArray]":
        """See `LengthDistribution.above`."""
        import numpy as np

        t = np.clip(thresholds, self.low, self.high)
        mass = (self.high - t) / (self.high - self.low)
        return mass, mass * (self.high + t) / 2

    def quantile(self, q: float) -> float:
        """See `LengthDistribution.quantile`."""
        check_quantile(q)
        return self.low + q * (self.high - self.low)

    def scaled(self, factor: float) -> "Uniform":
        """See `LengthDistribution.scaled`."""
        check_factor(factor)
        return Uniform(self.low * factor, self.high * factor)

    def __repr__(self) -> str:
        return f"Uniform(low={self.low:g}, high={self.high:g})"
