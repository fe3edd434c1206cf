"""Lengths that were observed, each with a weight."""

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.core.arrays import FloatArray, np
from prfaas.core.workload.lengths import (
    LEAST_WEIGHT,
    Bins,
    LengthDistribution,
    WorkloadError,
    check_factor,
    check_quantile,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Atoms(LengthDistribution):
    edges: FloatArray
    """0 and the lengths."""
    lengths: FloatArray
    probabilities: FloatArray
    tail_mass: FloatArray
    """P(L > t) for each t of `edges`."""
    tail_tokens: FloatArray
    """E[L; L > t] likewise."""


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
        edges, mass, tokens = np.zeros((3, len(atoms) + 1))
        edges[1:] = atoms
        # Entry k is what lies above the first k atoms: summed from the top, so that the last one is exactly 0.
        probability[::-1].cumsum(out=mass[-2::-1])
        (probability * atoms)[::-1].cumsum(out=tokens[-2::-1])
        total = mass[0]
        _Atoms.__init__(self, edges, edges[1:], probability, mass / total, tokens / total)

    @property
    def low(self) -> float:
        return float(self.lengths[0])

    @property
    def high(self) -> float:
        return float(self.lengths[-1])

    def atoms(self) -> FloatArray:
        """The distinct lengths, ascending."""
        return self.lengths

    def steps(self) -> FloatArray:
        """0 and the atoms."""
        return self.edges

    def mean(self) -> float:
        """E[L] in tokens."""
        return float(self.tail_tokens[0])

    def above(self, thresholds: FloatArray) -> "tuple[FloatArray, FloatArray]":
        """P(L > t) and E[L; L > t] in tokens, for every t of an array."""
        if thresholds is self.edges:
            # Every search asks for these: nothing has to be looked up.
            return self.tail_mass, self.tail_tokens
        index = self.lengths.searchsorted(thresholds, side="right")
        return self.tail_mass[index], self.tail_tokens[index]

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

    def _above(self, t: float) -> tuple[float, float]:
        index = self.lengths.searchsorted(t, side="right")
        return float(self.tail_mass[index]), float(self.tail_tokens[index])

    def scaled(self, factor: float) -> "Empirical":
        """The distribution of factor × L."""
        check_factor(factor)
        return Empirical(self.lengths * factor, self.probabilities)

    def clipped(self, low: float, high: float) -> "Empirical":
        """Lengths below `low` count as `low`, those above `high` as `high` (tokens)."""
        if not 0 < low <= high:
            raise WorkloadError(f"lengths can be clipped to 0 < low <= high, not to {low!r} and {high!r}")
        return Empirical(np.clip(self.lengths, low, high), self.probabilities)

    def __repr__(self) -> str:
        return f"Empirical({len(self.lengths)} lengths from {self.low:g} to {self.high:g} tokens)"


def fixed(tokens: float) -> Empirical:
    """Every prompt has `tokens` tokens."""
    return Empirical([tokens])


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
