"""When requests come: random processes of endless ascending times.

Poisson; bursts, whose rate jumps between levels (a Markov-modulated Poisson process); day and night, whose rate is a
sine wave.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prfaas.core.arrays import FloatArray
from prfaas.core.workload.lengths import WorkloadError

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
    """Independent arrivals.

    Raises:
        WorkloadError: a rate that is not above 0.
    """

    rate_per_s: float
    """On average."""

    def __post_init__(self) -> None:
        check_positive(self.rate_per_s, "a rate of arrivals")

    @property
    def mean_per_s(self) -> float:
        return self.rate_per_s

    def chunks(self, rng: np.random.Generator) -> Iterator[FloatArray]:
        """Times in seconds, ascending; without end."""
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


_FEWEST_DWELLS, _MOST_DWELLS = 256, 1 << 20


@dataclass(frozen=True, slots=True)
class Phase:
    """A level of traffic."""

    rate_per_s: float
    """0 is allowed."""
    dwell_s: float
    """How long it lasts on average, exponentially distributed."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s >= 0):
            raise WorkloadError(f"a phase's rate must be 0 or more per second, not {self.rate_per_s!r}")
        check_positive(self.dwell_s, "a phase's mean time")


@dataclass(frozen=True, slots=True)
class Mmpp(Arrivals):
    """After each phase comes any of the others, all equally likely (two take turns).

    So phases have shares of time in proportion to their dwell times. The process is stationary from 0 s on.

    Raises:
        WorkloadError: fewer than two phases, or all with rate 0.
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if len(self.phases) < 2:
            raise WorkloadError("bursts need at least two phases")
        if not any(phase.rate_per_s > 0 for phase in self.phases):
            raise WorkloadError("at least one phase must have a rate above 0")

    @property
    def mean_per_s(self) -> float:
        arrivals = sum(phase.rate_per_s * phase.dwell_s for phase in self.phases)
        return arrivals / sum(phase.dwell_s for phase in self.phases)

    def chunks(self, rng: np.random.Generator) -> Iterator[FloatArray]:
        """Times in seconds, ascending: arrivals of rate 1, put where the integral of the rate says."""
        modulation, arrivals = rng.spawn(2)
        pieces = self._pieces(modulation)
        ends_s, integrals = next(pieces)
        for operational in unit_poisson(arrivals):
            while integrals[-1] <= operational[-1]:
                more_s, more = next(pieces)
                # One point of what is behind must stay to interpolate from.
                kept = max(int(np.searchsorted(integrals, operational[0], side="right")) - 1, 0)
                ends_s = np.concatenate([ends_s[kept:], more_s])
                integrals = np.concatenate([integrals[kept:], more])
            yield np.interp(operational, integrals, ends_s)

    def _pieces(self, rng: np.random.Generator) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Corners of the integral of the rate over time (seconds, arrivals), hundreds at once."""
        rates = np.array([phase.rate_per_s for phase in self.phases])
        dwells_s = np.array([phase.dwell_s for phase in self.phases])
        count = len(rates)
        # About as many as one chunk of arrivals needs.
        number = int(np.clip(CHUNK / (self.mean_per_s * dwells_s.mean()), _FEWEST_DWELLS, _MOST_DWELLS))
        phase = int(rng.choice(count, p=dwells_s / dwells_s.sum()))
        end_s, integral = 0.0, 0.0
        yield np.zeros(1), np.zeros(1)
        while True:
            steps = rng.integers(1, count, size=number)
            visited = (phase + np.concatenate([[0], np.cumsum(steps)])) % count
            phase, visited = int(visited[-1]), visited[:-1]
            lasted_s = rng.exponential(dwells_s[visited])
            ends_s = end_s + np.cumsum(lasted_s)
            integrals = integral + np.cumsum(lasted_s * rates[visited])
            end_s, integral = float(ends_s[-1]), float(integrals[-1])
            yield ends_s, integrals


CALM, BURST = Phase(0.7, 60.0), Phase(2.2, 15.0)
"""Usual bursts: rates as shares of the mean rate. Their mean by time is 1."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Diurnal(Arrivals):
    """At time t the rate is mean × (1 + swing × sin(2π (t / period + phase))).

    Raises:
        WorkloadError: a swing outside [0, 1], or a rate or period that is not above 0.
    """

    rate_per_s: float
    """On average."""
    swing: float
    """From 0 to 1."""
    period_s: float = DAY_S
    phase: float = 0.0
    """In periods: 0 begins in the middle of the rise, 0.75 at the lowest point."""

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
        """Times in seconds, ascending, by thinning: of arrivals at the highest rate, each stays with rate / highest."""
        candidates, thinning = rng.spawn(2)
        highest = 1 + self.swing
        for operational in unit_poisson(candidates):
            times = operational / (self.rate_per_s * highest)
            level = 1 + self.swing * np.sin(2 * np.pi * (times / self.period_s + self.phase))
            kept = times[thinning.random(len(times)) * highest < level]
            if len(kept):
                yield kept


def arrivals_at(
    rate_per_s: float, *, bursts: bool = False, diurnal: tuple[float, float] | None = None
) -> Poisson | Mmpp | Diurnal:
    """Arrivals of a mean rate: independent, in the phases `CALM` and `BURST`, or as day and night.

    `diurnal`: the swing, and the period in seconds.

    Raises:
        WorkloadError: bursts and day and night, or numbers out of range.
    """
    if bursts and diurnal is not None:
        raise WorkloadError("arrivals come in bursts, or as day and night, not both")
    if diurnal is not None:
        swing, period_s = diurnal
        return Diurnal(rate_per_s, swing, period_s)
    if bursts:
        return Mmpp(tuple(Phase(each.rate_per_s * rate_per_s, each.dwell_s) for each in (CALM, BURST)))
    return Poisson(rate_per_s)
