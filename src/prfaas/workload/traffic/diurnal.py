"""Day and night: a Poisson process whose rate is a sine wave."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prfaas.workload.errors import WorkloadError
from prfaas.workload.traffic.arrivals import Arrivals, FloatArray, check_positive, unit_poisson

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Diurnal(Arrivals):
    """At time t the rate is mean × (1 + swing × sin(2π (t / period + phase))), 0 <= swing <= 1.

    `phase` in periods: 0 begins in the middle of the rise, 0.75 at the lowest point.

    Raises:
        WorkloadError: a swing outside [0, 1], or a rate or period that is not above 0.
    """

    rate_per_s: float
    swing: float
    period_s: float = DAY_S
    phase: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self.rate_per_s, "a rate of arrivals")
        check_positive(self.period_s, "a period")
        if not 0 <= self.swing <= 1:
            raise WorkloadError(f"the swing of a rate must be in [0, 1] of its mean, not {self.swing!r}")
        if not math.isfinite(self.phase):
            raise WorkloadError(f"a phase must be a number of periods, not {self.phase!r}")

    @property
    def mean_per_s(self) -> float:
        return self.rate_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[FloatArray]:
        """See `Arrivals.chunks`. By thinning: of arrivals at the highest rate, each stays with rate / highest."""
        candidates, thinning = rng.spawn(2)
        highest = 1 + self.swing
        for operational in unit_poisson(candidates):
            times = operational / (self.rate_per_s * highest)
            level = 1 + self.swing * np.sin(2 * np.pi * (times / self.period_s + self.phase))
            kept = times[thinning.random(len(times)) * highest < level]
            if len(kept):
                yield kept
