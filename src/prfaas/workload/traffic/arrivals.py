"""When things come: endless ascending times, and the simplest process."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prfaas.workload.errors import WorkloadError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CHUNK = 8192
"""About as many times are drawn at once."""


class Arrivals(ABC):
    """A random process of arrivals from 0 s on."""

    __slots__ = ()

    @property
    @abstractmethod
    def mean_per_s(self) -> float:
        """Arrivals per second in the long run."""

    @abstractmethod
    def chunks(self, rng: np.random.Generator) -> Iterator[FloatArray]:
        """Times in seconds, ascending within and across arrays, without end. No array is empty."""


@dataclass(frozen=True, slots=True)
class Poisson(Arrivals):
    """Independent arrivals, `rate_per_s` on average. WorkloadError unless the rate is above 0."""

    rate_per_s: float

    def __post_init__(self) -> None:
        check_positive(self.rate_per_s, "a rate of arrivals")

    @property
    def mean_per_s(self) -> float:
        return self.rate_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[FloatArray]:
        """See `Arrivals.chunks`."""
        for operational in unit_poisson(rng):
            yield operational / self.rate_per_s


def unit_poisson(rng: np.random.Generator) -> Iterator[FloatArray]:
    """Arrivals of rate 1, in arrays of `CHUNK`."""
    last = 0.0
    while True:
        times = last + np.cumsum(rng.exponential(size=CHUNK))
        last = float(times[-1])
        yield times


def check_positive(value: float, what: str) -> None:
    """Raise WorkloadError unless `value` is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise WorkloadError(f"{what} must be above 0, not {value!r}")
