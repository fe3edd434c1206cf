"""How much bandwidth a link has over time: constant, in steps, with outages, fluctuating, recorded."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
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
        _check_pieces(self.pieces)
        if self.pieces[0][0] != 0.0:
            raise ValueError(f"The steps of a capacity begin at 0 s, not at {self.pieces[0][0]:g} s.")

    def changes(self, rng: np.random.Generator) -> Iterator[Piece]:  # noqa: ARG002
        return iter(self.pieces)


@dataclass(frozen=True, slots=True)
class Outages:
    """Up at `bits_per_s` and down at 0 in turn, for exponentially distributed times. It begins up.

    In the long run it is up for mean_up_s / (mean_up_s + mean_down_s) of the time.
    """

    bits_per_s: float
    mean_up_s: float
    mean_down_s: float

    def __post_init__(self) -> None:
        _check_positive("A link's capacity", "bit/s", self.bits_per_s)
        _check_positive("The mean time between outages", "s", self.mean_up_s)
        _check_positive("The mean length of an outage", "s", self.mean_down_s)

    def changes(self, rng: np.random.Generator) -> Iterator[Piece]:
        time_s = 0.0
        while True:
            yield time_s, self.bits_per_s
            time_s += rng.exponential(self.mean_up_s)
            yield time_s, 0.0
            time_s += rng.exponential(self.mean_down_s)


@dataclass(frozen=True, slots=True)
class Fluctuating:
    """A share of a busy link: an Ornstein-Uhlenbeck process around the mean, seen every `step_s`.

    Before clipping the capacity is normal with `mean_bits_per_s` and standard deviation `relative_sd` × mean,
    and its correlation falls to 1/e in `correlation_s`. Sampling is exact for any step: with
    a = exp(-step/correlation), the next deviation is a times this one plus a normal one of variance (1 - a²) sd²
    (D. T. Gillespie, "Exact numerical simulation of the Ornstein-Uhlenbeck process and its integral", Phys. Rev. E 54,
    1996). It starts in steady state.

    Values below `least_share` × mean are raised to that, which raises the mean: `clipped_mean_bits_per_s`. With the
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

    @property
    def clipped_mean_bits_per_s(self) -> float:
        """The mean of what the link really gets: E[max(least, 1 + sd Z)] × mean, Z standard normal."""
        if self.relative_sd == 0:
            return self.mean_bits_per_s
        edge = (self.least_share - 1) / self.relative_sd
        below = 0.5 * math.erfc(-edge / math.sqrt(2))
        density = math.exp(-(edge**2) / 2) / math.sqrt(2 * math.pi)
        return self.mean_bits_per_s * (self.least_share * below + (1 - below) + self.relative_sd * density)

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


@dataclass(frozen=True, slots=True)
class Recorded:
    """A measured bandwidth."""

    pieces: tuple[Piece, ...]
    """(time_s, bits_per_s); times count from the first one."""
    repeat: bool = True
    """Without end, where the last piece lasts as long as the one before it; False: the last one stays."""

    def __post_init__(self) -> None:
        _check_pieces(self.pieces)

    @classmethod
    def read(cls, path: Path | str, *, repeat: bool = True) -> "Recorded":
        """From a CSV file whose first line is `time_s,bits_per_s`.

        Raises:
            ValueError: one sentence with file and, where there is one, line.
        """
        return cls(tuple(_rows(Path(path))), repeat)

    def changes(self, rng: np.random.Generator) -> Iterator[Piece]:  # noqa: ARG002
        first_s, last_s = self.pieces[0][0], self.pieces[-1][0]
        pieces = [(time_s - first_s, bits_per_s) for time_s, bits_per_s in self.pieces]
        if not self.repeat or len(pieces) == 1:
            yield from pieces
            return
        round_s = last_s - first_s + (last_s - self.pieces[-2][0])
        rounds = 0
        while True:
            for time_s, bits_per_s in pieces:
                yield rounds * round_s + time_s, bits_per_s
            rounds += 1


def _rows(path: Path) -> Iterator[Piece]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if header != ["time_s", "bits_per_s"]:
                raise ValueError(f"{path}:1: the first line of a recorded bandwidth is time_s,bits_per_s.")
            before_s = -math.inf
            for row in reader:
                if row:
                    before_s, bits_per_s = _piece(f"{path}:{reader.line_num}", row, before_s)
                    yield before_s, bits_per_s
            if before_s == -math.inf:
                raise ValueError(f"{path}: there is no bandwidth in this file.")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such recorded bandwidth.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: can't be read as a recorded bandwidth ({error}).") from error


def _piece(where: str, row: Sequence[str], before_s: float) -> Piece:
    try:
        time_s, bits_per_s = (float(field) for field in row)
    except ValueError:
        raise ValueError(
            f"{where}: two numbers are needed, time_s,bits_per_s, not {','.join(row)!r}."
        ) from None
    if not (math.isfinite(time_s) and time_s > before_s):
        raise ValueError(f"{where}: time_s {row[0].strip()} is not after the line before.")
    if not (math.isfinite(bits_per_s) and bits_per_s >= 0):
        raise ValueError(f"{where}: bits_per_s is 0 or more, not {row[1].strip()}.")
    return time_s, bits_per_s


def _check_pieces(pieces: Sequence[Piece]) -> None:
    if not pieces:
        raise ValueError("A capacity over time needs at least one (time_s, bits_per_s).")
    for time_s, bits_per_s in pieces:
        if not (math.isfinite(bits_per_s) and bits_per_s >= 0):
            raise ValueError(
                f"A capacity is 0 bit/s or more, not {bits_per_s:g} bit/s (from {time_s:g} s on)."
            )
        if not math.isfinite(time_s):
            raise ValueError(f"The times of a capacity are finite, not {time_s:g} s.")
    for (before_s, _), (time_s, _) in pairwise(pieces):
        if time_s <= before_s:
            raise ValueError(f"The times of a capacity rise, but {time_s:g} s comes after {before_s:g} s.")


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
        """See `CapacityProcess.changes`."""
        ends = sorted(
            (at_s, change) for start_s, end_s in self.outages for at_s, change in ((start_s, 1), (end_s, -1))
        )
        cuts = 0
        now_bits_per_s = 0.0
        for at_s, bits_per_s in self.process.changes(rng):
            while ends and ends[0][0] < at_s:
                cut_s, change = ends.pop(0)
                cuts += change
                yield cut_s, 0.0 if cuts else now_bits_per_s
            now_bits_per_s = bits_per_s
            yield at_s, 0.0 if cuts else now_bits_per_s
        for cut_s, change in ends:
            cuts += change
            yield cut_s, 0.0 if cuts else now_bits_per_s
