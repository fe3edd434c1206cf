"""How long prompts are: what every distribution of lengths can say about itself, exactly."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.workload.errors import WorkloadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

# Fine enough that integrals of smooth latency curves are right to about 1e-7.
_INTEGRATION_BINS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """A distribution cut into intervals (lower, upper] in tokens, each with its mean length and probability.

    All arrays have one entry per bin of positive probability; the weights sum to the probability of the range
    that was cut, and Σ weight × length is exactly its first moment.
    """

    lower: "FloatArray"
    upper: "FloatArray"
    lengths: "FloatArray"
    weights: "FloatArray"


class LengthDistribution(ABC):
    """A random length L > 0 in tokens.

    Conditions of probability zero have no mean: `mean_above` and `mean_at_most` are None there, never NaN.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def low(self) -> float:
        """The smallest possible length in tokens."""

    @property
    @abstractmethod
    def high(self) -> float:
        """The largest possible length in tokens."""

    @abstractmethod
    def above(self, thresholds: "FloatArray") -> "tuple[FloatArray, FloatArray]":
        """P(L > t) and E[L; L > t] (tokens, not divided by the probability) for every t of an array."""

    @abstractmethod
    def quantile(self, q: float) -> float:
        """The smallest l with P(L <= l) >= q, for q in [0, 1]."""

    @abstractmethod
    def scaled(self, factor: float) -> "LengthDistribution":
        """The distribution of factor × L, factor > 0."""

    def atoms(self) -> "FloatArray | None":
        """The only lengths that occur, ascending; None for a continuous distribution."""
        return None

    def tail(self, t: float) -> float:
        """P(L > t)."""
        return self._above(t)[0]

    def mean(self) -> float:
        """E[L] in tokens."""
        return self._above(0.0)[1]

    def mean_above(self, t: float) -> float | None:
        """E[L | L > t] in tokens, None if no length is above t."""
        mass, tokens = self._above(t)
        return min(max(tokens / mass, t, self.low), self.high) if mass > 0 else None

    def mean_at_most(self, t: float) -> float | None:
        """E[L | L <= t] in tokens, None if every length is above t."""
        mass, tokens = self._above(t)
        mean = (self.mean() - tokens) / (1.0 - mass) if mass < 1 else None
        return None if mean is None else min(max(mean, self.low), t, self.high)

    def bins(self, n: int, cuts: "tuple[float, ...]" = ()) -> Bins:
        """About `n` bins over the whole range, fine both in probability and in length; `cuts` become edges too."""
        import numpy as np

        atoms = self.atoms()
        if atoms is not None and len(atoms) <= n:
            edges = atoms
        else:
            by_length = np.geomspace(max(self.low, 1e-3 * self.high), self.high, n // 2 + 1)
            by_probability = [self.quantile(k / (n - n // 2)) for k in range(1, n - n // 2)]
            edges = np.concatenate([by_length, np.array(by_probability, dtype=np.float64)])
        inner = [cut for cut in cuts if 0 < cut < self.high]
        return self.bins_between(np.concatenate([[0.0], edges, inner, [self.high]]))

    def bins_between(self, edges: "FloatArray") -> Bins:
        """The bins between the sorted, deduplicated `edges` in tokens; those of probability zero are left out."""
        import numpy as np

        edges = np.unique(edges)
        mass, tokens = self.above(edges)
        weights, moments = mass[:-1] - mass[1:], tokens[:-1] - tokens[1:]
        kept = weights > 1e-15
        weights, moments = weights[kept], moments[kept]
        lower, upper = edges[:-1][kept], edges[1:][kept]
        # Differences of nearly equal numbers: rounding must not put a mean outside of its bin.
        lengths = np.clip(moments / weights, np.maximum(lower, self.low), np.minimum(upper, self.high))
        return Bins(lower, upper, lengths, weights)

    def expect(
        self, f: "Callable[[FloatArray], FloatArray]", *, above: float = 0.0, up_to: float = float("inf")
    ) -> float:
        """E[f(L); above < L <= up_to]: not divided by the probability of the condition.

        Exact for distributions with atoms, otherwise by cutting the range into thousands of bins.
        """
        bins = self.fine_bins(above, up_to)
        return float((f(bins.lengths) * bins.weights).sum()) if len(bins.weights) else 0.0

    def fine_bins(self, above: float = 0.0, up_to: float = float("inf")) -> Bins:
        """The bins that `expect` sums over: every atom, or thousands of intervals, of (above, up_to]."""
        import numpy as np

        start, end = max(above, 0.0), min(up_to, self.high)
        if end <= start:
            empty = np.empty(0)
            return Bins(empty, empty, empty, empty)
        atoms = self.atoms()
        if atoms is None:
            first = max(self.low, start, 1e-6 * end)
            edges = np.geomspace(first, end, _INTEGRATION_BINS + 1) if first < end else np.array([end])
            edges[-1] = end
        else:
            edges = atoms[(atoms > start) & (atoms <= end)]
        return self.bins_between(np.concatenate([[start], edges[edges >= start], [end]]))

    def _above(self, t: float) -> tuple[float, float]:
        import numpy as np

        mass, tokens = self.above(np.array([t], dtype=np.float64))
        return float(mass[0]), float(tokens[0])


def check_factor(factor: float) -> None:
    """Raise WorkloadError unless a length may be multiplied by `factor`."""
    if not 0 < factor < float("inf"):
        raise WorkloadError(f"lengths can only be scaled by a factor above 0, not {factor!r}")


def check_quantile(q: float) -> None:
    """Raise WorkloadError unless `q` is a probability."""
    if not 0 <= q <= 1:
        raise WorkloadError(f"a quantile is asked for with a probability in [0, 1], not {q!r}")
