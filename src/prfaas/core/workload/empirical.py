"""Lengths that were observed, each with a weight, and how a threshold divides those that many prompts have."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.core.arrays import FloatArray, OfLength, np
from prfaas.core.workload.lengths import (
    EDGE,
    LEAST_WEIGHT,
    Bins,
    LengthDistribution,
    WorkloadError,
    check_factor,
    check_quantile,
)

# A law is wide if there are so many edges of a threshold between the tenths of it at both ends.
_NARROW = 10
_QUANTILES = 512
# The part of 1 that no sequence of requests, every other or every seventh, keeps in step with.
_GOLDEN = (math.sqrt(5) - 1) / 2


def edge_factor(ordinal: int) -> float:
    """What a threshold is multiplied with for a request: evenly spread over 1 ± `EDGE` / 2; 1 for request 0."""
    return 1 + EDGE * ((0.5 + ordinal * _GOLDEN) % 1.0 - 0.5)


@dataclass(frozen=True, slots=True, eq=False)
class _Atoms(LengthDistribution):
    lengths: FloatArray
    probabilities: FloatArray
    tail_mass: FloatArray
    """P(L > t) for 0 and each length."""
    tail_tokens: FloatArray
    """E[L; L > t] likewise."""
    tail_squares: FloatArray
    """E[L²; L > t] likewise."""


class Empirical(_Atoms):
    """Every length of `lengths` (tokens, above 0) with its weight (default 1); equal ones are merged.

    Raises:
        WorkloadError: no lengths, a length that is not above 0, or weights that are negative, all 0 or of
            another number.
    """

    __slots__ = ()

    def __init__(self, lengths: Iterable[float], weights: Iterable[float] | None = None) -> None:
        given = _array(lengths)
        weight = np.ones(len(given)) if weights is None else _array(weights)
        _check(given, weight)
        atoms, probability = given, weight / weight.sum()
        if not (given[1:] > given[:-1]).all():
            atoms, where = np.unique(given, return_inverse=True)
            probability = np.bincount(where, probability).astype(np.float64)
        kept = probability > 0
        atoms, probability = atoms[kept], probability[kept]
        self._set(atoms, probability)

    @classmethod
    def counted(cls, lengths: FloatArray, counts: FloatArray) -> "Empirical":
        """`Empirical(lengths, counts)` of ascending lengths that are possible and counts above 0: in half the time.

        Lengths that do not ascend are sorted and merged, as any other.
        """
        if not (lengths[1:] > lengths[:-1]).all():
            return cls(lengths, counts)
        found = cls.__new__(cls)
        found._set(lengths, counts / counts.sum())
        return found

    def _set(self, atoms: FloatArray, probability: FloatArray) -> None:
        moments = probability * atoms
        mass, tokens, squares = _tails(probability), _tails(moments), _tails(moments * atoms)
        total = mass[0]
        _Atoms.__init__(self, atoms, probability, mass / total, tokens / total, squares / total)

    @property
    def low(self) -> float:
        return float(self.lengths[0])

    @property
    def high(self) -> float:
        return float(self.lengths[-1])

    def atoms(self) -> FloatArray:
        """The distinct lengths, ascending."""
        return self.lengths

    def mean(self) -> float:
        """E[L] in tokens."""
        return float(self.tail_tokens[0])

    def above(self, thresholds: FloatArray) -> "tuple[FloatArray, FloatArray]":
        """P(L > t) and E[L; L > t] in tokens, for every t of an array."""
        index = self.lengths.searchsorted(thresholds, side="right")
        return self.tail_mass[index], self.tail_tokens[index]

    def thresholds(self, n: int) -> FloatArray:
        """0 and about `n` with an atom at their edge, those among them that begin or cease to divide it."""
        lowest, highest = 1 / (1 + EDGE / 2), 1 / (1 - EDGE / 2)
        chosen = np.linspace(0, len(self.lengths) - 1, min(n // 2, len(self.lengths))).astype(int)
        factors = np.linspace(lowest, highest, max(n // len(chosen), 2))
        # Where many atoms are within one edge, none of them stands in its middle.
        spread = np.geomspace(self.low * lowest, self.high * highest, n // 2)
        return np.unique(np.concatenate([[0.0], (self.lengths[chosen, None] * factors).ravel(), spread]))

    def beyond(self, thresholds: FloatArray) -> "tuple[FloatArray, FloatArray]":
        """P and E[L] of what is longer than t · (1 + EDGE · (U − ½)), U uniform on [0, 1), for every t of an array."""
        mass, tokens = self._beyond(
            thresholds, (self.tail_mass, self.tail_tokens), (self.tail_tokens, self.tail_squares)
        )
        return mass, tokens

    def expect_beyond(self, f: OfLength) -> OfLength:
        """E[f(L); longer than t] likewise."""
        weighted = self.probabilities * f(self.lengths)
        tails = _tails(weighted), _tails(weighted * self.lengths)
        return lambda thresholds: self._beyond(thresholds, tails)[0]

    def _beyond(self, t: FloatArray, *sums: "tuple[FloatArray, FloatArray]") -> list[FloatArray]:
        """What is above of each sum, given its tails and those of its moments.

        Of an atom L within the edge the part (L / t − 1) / EDGE + ½ is above; all of those behind the edge.
        """
        first = self.lengths.searchsorted(t * (1 - EDGE / 2), side="right")
        last = self.lengths.searchsorted(t * (1 + EDGE / 2), side="left")
        divisor = np.where(t > 0, t, 1.0)
        found = []
        for tails, moments in sums:
            behind = tails[last]
            within, moment = tails[first] - behind, moments[first] - moments[last]
            above = behind + within / 2 + (moment / divisor - within) / EDGE
            found.append(np.minimum(np.maximum(above, 0.0), tails[0]))
        return found

    def fine_bins(self, above: float = 0.0, up_to: float = float("inf")) -> Bins:
        """The atoms of (above, up_to] as bins."""
        first, end = (
            int(each) for each in np.searchsorted(self.lengths, (max(above, 0.0), up_to), side="right")
        )
        # What `bins_between` would find by sorting its edges: the atoms are sorted, and their tails known.
        mass, tokens = self.tail_mass[first : end + 1], self.tail_tokens[first : end + 1]
        weights, moments = mass[:-1] - mass[1:], tokens[:-1] - tokens[1:]
        upper = self.lengths[first:end]
        lower = np.concatenate([[max(above, 0.0)], upper[:-1]]) if end > first else upper
        kept = weights > LEAST_WEIGHT
        if not kept.all():
            weights, moments, upper = weights[kept], moments[kept], upper[kept]
            lower = lower[kept]
        lengths = np.clip(moments / weights, np.maximum(lower, self.low), upper)
        return Bins(lower, upper, lengths, weights)

    def quantile(self, q: float) -> float:
        """The smallest atom l with P(L <= l) >= q."""
        check_quantile(q)
        cumulative = 1 - self.tail_mass[1:]
        # A hair below q: 0.1 + 0.2 must still find the atom that 0.3 stands for.
        index = int(np.searchsorted(cumulative, q - 1e-12, side="left"))
        return float(self.lengths[min(index, len(self.lengths) - 1)])

    def scaled(self, factor: float) -> "Empirical":
        """The distribution of factor × L."""
        check_factor(factor)
        return Empirical(self.lengths * factor, self.probabilities)

    def __repr__(self) -> str:
        return f"Empirical({len(self.lengths)} lengths from {self.low:g} to {self.high:g} tokens)"


def _tails(weighted: FloatArray) -> FloatArray:
    """Entry k is what lies above the first k: summed from the top, so that the last one is exactly 0."""
    tails = np.zeros(len(weighted) + 1)
    weighted[::-1].cumsum(out=tails[-2::-1])
    return tails


def fixed(tokens: float) -> Empirical:
    """Every prompt has `tokens` tokens."""
    return Empirical([tokens])


def divisible(law: LengthDistribution) -> LengthDistribution:
    """The law; by its quantiles if it is not much wider than a threshold's edge, which then divides all of it."""
    if law.quantile(0.9) > law.quantile(0.1) * (1 + _NARROW * EDGE):
        return law
    return Empirical([law.quantile((k + 0.5) / _QUANTILES) for k in range(_QUANTILES)])


def _array(values: Iterable[float]) -> FloatArray:
    listed = values if isinstance(values, np.ndarray) else list(values)
    return np.array(listed, dtype=np.float64)


def _check(lengths: FloatArray, weights: FloatArray) -> None:
    if len(lengths) == 0:
        raise WorkloadError("an empirical distribution needs at least one length")
    if len(weights) != len(lengths):
        raise WorkloadError(f"there are {len(lengths)} lengths but {len(weights)} weights; give one for each")
    # A NaN is neither above nor below anything.
    for length in lengths[~((lengths > 0) & (lengths < np.inf))]:
        raise WorkloadError(f"lengths must be above 0 tokens, not {length:g}")
    for weight in weights[~((weights >= 0) & (weights < np.inf))]:
        raise WorkloadError(f"weights must be 0 or more, not {weight:g}")
    if not weights.any():
        raise WorkloadError("at least one weight must be above 0")
