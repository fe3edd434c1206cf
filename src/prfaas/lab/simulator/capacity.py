"""Courses over time: of a link's bandwidth (constant, in steps, with outages, fluctuating), and of engines' speed."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from typing import Protocol

import numpy as np

Piece = tuple[float, float]

# Normal deviates are drawn this many at a time: one by one they would cost more than the link's own work.
_DRAWN_AT_ONCE = 1024


class CapacityProcess(Protocol):
    """A bandwidth over time, in pieces: (from this time in s, bits per second)."""

    def changes(self, rng: np.random.Generator) -> Iterator[Piece]:
        """The pieces, from 0.0 s on in ascending order; the last one, where there is one, has no end.

        `rng` should be the link's own: pieces are drawn when they are needed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    bits_per_s: float

    def __post_init__(self) -> None:
        _check_positive("A link's capacity", "bit/s", self.bits_per_s)

    def changes(self, rng: np.random.Generator) -> Iterator[Piece]:  # noqa: ARG002
        yield 0.0, self.bits_per_s


@dataclass(frozen=True, slots=True)
class Steps:
    """A bandwidth that changes at given times."""

    pieces: tuple[Piece, ...]
    """(time_s, bits_per_s), the first at 0 s; 0 bit/s is an outage."""

    def __post_init__(self) -> None:
        _check_pieces("a capacity", self.pieces)
        if not all(bits_per_s >= 0 for _, bits_per_s in self.pieces):
            raise ValueError("a capacity is 0 bit/s or more")

    def changes(self, rng: np.random.Generator) -> Iterator[Piece]:  # noqa: ARG002
        return iter(self.pieces)


@dataclass(frozen=True, slots=True)
class Fluctuating:
    """A share of a busy link: an Ornstein-Uhlenbeck process around the mean, seen every `step_s`.

    Before clipping the capacity is normal with `mean_bits_per_s` and standard deviation `relative_sd` × mean,
    and its correlation falls to 1/e in `correlation_s`. Sampling is exact for any step: with
    a = exp(-step/correlation), the next deviation is a times this one plus a normal one of variance (1 - a²) sd²
    (D. T. Gillespie, "Exact numerical simulation of the Ornstein-Uhlenbeck process and its integral", Phys. Rev. E 54,
    1996). It starts in steady state.

    Values below `least_share` × mean are raised to that, which raises the mean. With the
    default least share that is 0.006 % at a relative standard deviation of 0.3, 0.55 % at 0.5.
    """

    mean_bits_per_s: float
    relative_sd: float
    correlation_s: float
    step_s: float = 1.0
    least_share: float = 0.05

    def __post_init__(self) -> None:
        _check_positive("A link's mean capacity", "bit/s", self.mean_bits_per_s)
        _check_positive("The correlation time of a capacity", "s", self.correlation_s)
        _check_positive("The time step of a capacity", "s", self.step_s)
        if not (math.isfinite(self.relative_sd) and self.relative_sd >= 0):
            raise ValueError(f"The relative deviation of a capacity is 0 or more, not {self.relative_sd:g}.")
        if not 0 <= self.least_share <= 1:
            raise ValueError(f"The least share of a mean capacity is from 0 to 1, not {self.least_share:g}.")

    def changes(self, rng: np.random.Generator) -> Iterator[Piece]:
        kept = math.exp(-self.step_s / self.correlation_s)
        fresh = math.sqrt(-math.expm1(-2 * self.step_s / self.correlation_s))
        deviation = rng.standard_normal()
        step = 0
        while True:
            for normal in rng.standard_normal(_DRAWN_AT_ONCE).tolist():
                share = max(self.least_share, 1 + self.relative_sd * deviation)
                yield step * self.step_s, share * self.mean_bits_per_s
                deviation = kept * deviation + fresh * normal
                step += 1


def _check_pieces(what: str, pieces: Sequence[Piece]) -> None:
    """Raise ValueError unless something over time has finite pieces, from 0 s on in ascending order."""
    if not pieces or pieces[0][0] != 0.0:
        raise ValueError(f"{what} is told from 0 s on")
    for time_s, value in pieces:
        if not (math.isfinite(time_s) and math.isfinite(value)):
            raise ValueError(f"{what} is a number at a time, not {value:g} from {time_s:g} s on")
    for (before_s, _), (time_s, _) in pairwise(pieces):
        if time_s <= before_s:
            raise ValueError(f"the times of {what} rise, but {time_s:g} s comes after {before_s:g} s")


def _check_positive(what: str, unit: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} is more than 0 {unit} and finite, not {value:g} {unit}.")


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A bandwidth that is 0 at given times, on top of what it does."""

    process: CapacityProcess
    outages: Sequence[tuple[float, float]]
    """Beginnings and ends in seconds."""

    def changes(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        """The pieces of `process`, at 0 within outages."""
        starts, ends = zip(*self.outages, strict=True)
        cuts = sorted([(at_s, True, 1.0) for at_s in starts] + [(at_s, True, -1.0) for at_s in ends])
        pieces = ((at_s, False, bits_per_s) for at_s, bits_per_s in self.process.changes(rng))
        cut, now_bits_per_s = 0.0, 0.0
        for at_s, is_cut, value in merge(pieces, cuts):
            if is_cut:
                cut += value
            else:
                now_bits_per_s = value
            yield at_s, 0.0 if cut else now_bits_per_s


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer all prefills take than profiles say, over time: a machine is not always as fast."""

    pieces: Sequence[tuple[float, float]]
    """(time_s, factor): from then on prefills take so many times as long. The first is at 0 s."""

    def __post_init__(self) -> None:
        _check_pieces("a slowdown", self.pieces)
        if not all(factor > 0 for _, factor in self.pieces):
            raise ValueError("a slowdown is a factor above 0")

    def stretched_s(self, start_s: float, work_s: float) -> float:
        """How long it takes from `start_s` on what takes `work_s` by the profile."""
        place = bisect_right(self.pieces, (start_s, math.inf)) - 1
        at_s, left_s = start_s, work_s
        for (_, factor), (next_s, _) in pairwise(self.pieces[place:]):
            done_s = (next_s - at_s) / factor
            if done_s >= left_s:
                return at_s + left_s * factor - start_s
            at_s, left_s = next_s, left_s - done_s
        return at_s + left_s * self.pieces[-1][1] - start_s
