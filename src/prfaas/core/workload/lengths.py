"""How long prompts are: what every distribution of lengths can say about itself exactly, and the formulas.

The formulas are the uniform distribution and the paper's log-normal within limits (section 4.1). `Workload` is what a
plan is for: prompts of random length, and answers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from prfaas.core.arrays import FloatArray, OfLength, np
from prfaas.core.yaml_source import one_line


class WorkloadError(ValueError):
    """A distribution that can't be, or a trace that can't be read; one sentence, of a trace with file and line."""

    def __init__(self, text: str) -> None:
        # It may quote a file.
        super().__init__(one_line(text))


EDGE = 0.05
"""How wide a threshold's edge is, in proportion to it: to a request it stands `edge_factor` times as high.

Where many prompts have one length, as of a template, some go and some stay so; other traffic is divided as without it.
"""
# Where in its edge a threshold is taken to stand, each as often: close enough for laws that are wider than it.
_EDGE_POINTS = 4

# A bin of less probability is the rounding of sums.
LEAST_WEIGHT = 1e-15
# Fine enough that integrals of smooth latency curves are right to about 1e-7.
_INTEGRATION_BINS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """A distribution cut into intervals (lower, upper]; arrays with one entry per bin of positive probability."""

    lower: FloatArray
    """Tokens, excluded."""
    upper: FloatArray
    """Tokens, included."""
    lengths: FloatArray
    """Mean length in tokens. Σ weight × length is exactly the first moment of the range that was cut."""
    weights: FloatArray
    """Probabilities; they sum to that of the range that was cut."""

    def divided(self, above: FloatArray) -> "tuple[Bins, Bins]":
        """The bins without the part of each that is `above` a threshold, and those parts; empty ones are left out."""
        low, high = (
            Bins(self.lower[some], self.upper[some], self.lengths[some], (self.weights * part)[some])
            for part in (1.0 - above, above)
            for some in (part > 0,)
        )
        return low, high


class LengthDistribution(ABC):
    """A random length L > 0 in tokens."""

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
    def above(self, thresholds: FloatArray) -> "tuple[FloatArray, FloatArray]":
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

    @property
    def highest_threshold(self) -> float:
        """The lowest threshold in tokens that no length is beyond."""
        return self.high / (1 - EDGE / 2)

    def thresholds(self, n: int) -> FloatArray:
        """0, the highest threshold and about `n` between them, ascending, of which each divides the requests anew."""
        quantiles = (self.quantile(k / n) for k in range(1, n))
        return np.unique(np.array([0.0, *quantiles, self.high, self.highest_threshold]))

    def beyond(self, thresholds: FloatArray) -> "tuple[FloatArray, FloatArray]":
        """As `above`, of what policies take for longer than each threshold, whose edge has a width (`EDGE`)."""
        mass, tokens = self.above(_in_edges(thresholds))
        return _mean_of_edges(mass), _mean_of_edges(tokens)

    def expect_beyond(self, f: OfLength) -> OfLength:
        """E[f(L)] of it as a function of thresholds: whole fine bins by their sum, and the part that each one cuts."""
        fine = self.fine_bins()
        weights, lengths = fine.weights, fine.lengths
        sums, masses, moments = (
            np.concatenate([[0.0], np.cumsum(each)])
            for each in (weights * f(lengths), weights, weights * lengths)
        )

        def beyond(thresholds: FloatArray) -> FloatArray:
            edges = _in_edges(thresholds)
            first = np.searchsorted(fine.lower, edges, side="left")
            whole, known, moment = (each[-1] - each[first] for each in (sums, masses, moments))
            mass, tokens = self.above(edges)
            rest = mass - known
            cut = rest > 1e-12
            means = np.clip((tokens - moment)[cut] / rest[cut], lengths[0], lengths[-1])
            whole[cut] += rest[cut] * f(means)
            return _mean_of_edges(whole)

        return beyond

    def parts_beyond(self, bins: Bins, threshold: float) -> FloatArray:
        """The part of each bin that policies take for longer than a threshold, by the bins' means."""
        if threshold <= 0:
            return np.ones(len(bins.lengths))
        parts = np.clip((bins.lengths / threshold - 1) / EDGE + 0.5, 0.0, 1.0)
        # Of the highest threshold rounding may leave something.
        return np.where(parts < 1e-12, 0.0, parts)

    def mean(self) -> float:
        """E[L] in tokens."""
        (_, (tokens,)) = self.above(np.zeros(1))
        return float(tokens)

    def bins(self, n: int, cuts: "tuple[float, ...]" = ()) -> Bins:
        """About `n` bins over the whole range, fine both in probability and in length; `cuts` become edges too."""
        atoms = self.atoms()
        if atoms is not None and len(atoms) <= n:
            edges = atoms
        else:
            by_length = np.geomspace(max(self.low, 1e-3 * self.high), self.high, n // 2 + 1)
            by_probability = [self.quantile(k / (n - n // 2)) for k in range(1, n - n // 2)]
            edges = np.concatenate([by_length, np.array(by_probability, dtype=np.float64)])
        inner = [cut for cut in cuts if 0 < cut < self.high]
        return self.bins_between(np.concatenate([[0.0], edges, inner, [self.high]]))

    def bins_between(self, edges: FloatArray) -> Bins:
        """The bins between the sorted, deduplicated `edges` in tokens; those of probability zero are left out."""
        edges = np.unique(edges)
        mass, tokens = self.above(edges)
        weights, moments = mass[:-1] - mass[1:], tokens[:-1] - tokens[1:]
        kept = weights > LEAST_WEIGHT
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

    def fine_parts(self, threshold: float) -> "tuple[Bins, Bins]":
        """The fine bins of what policies take for no longer than a threshold, and of what they take for longer."""
        bins = self.fine_bins()
        return bins.divided(self.parts_beyond(bins, threshold))


def _in_edges(thresholds: FloatArray) -> FloatArray:
    """Where each threshold stands for some of the requests, `_EDGE_POINTS` for each."""
    points = (np.arange(_EDGE_POINTS) + 0.5) / _EDGE_POINTS
    return np.asarray(np.multiply.outer(thresholds, 1 + EDGE * (points - 0.5)), np.float64).ravel()


def _mean_of_edges(values: FloatArray) -> FloatArray:
    return np.asarray(values.reshape(-1, _EDGE_POINTS).mean(axis=1), np.float64)


def check_factor(factor: float) -> None:
    """Raise WorkloadError unless a length may be multiplied by `factor`."""
    if not 0 < factor < float("inf"):
        raise WorkloadError(f"lengths can only be scaled by a factor above 0, not {factor!r}")


def check_quantile(q: float) -> None:
    """Raise WorkloadError unless `q` is a probability."""
    if not 0 <= q <= 1:
        raise WorkloadError(f"a quantile is asked for with a probability in [0, 1], not {q!r}")


def _check_limits(low: float, high: float) -> None:
    if not (math.isfinite(high) and 0 < low < high):
        raise WorkloadError(f"the limits of lengths must satisfy 0 < low < high, not {low!r} and {high!r}")


@dataclass(frozen=True, slots=True, repr=False)
class Uniform(LengthDistribution):
    """Continuous and uniform on [low, high] tokens.

    Raises:
        WorkloadError: the limits are not 0 < low < high.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_limits(self.low, self.high)

    def above(self, thresholds: FloatArray) -> "tuple[FloatArray, FloatArray]":
        """P(L > t) and E[L; L > t] in tokens, for every t of an array."""
        t = np.clip(thresholds, self.low, self.high)
        mass = (self.high - t) / (self.high - self.low)
        return mass, mass * (self.high + t) / 2

    def quantile(self, q: float) -> float:
        """The smallest l with P(L <= l) >= q."""
        check_quantile(q)
        return self.low + q * (self.high - self.low)

    def scaled(self, factor: float) -> "Uniform":
        """The distribution of factor × L."""
        check_factor(factor)
        return Uniform(self.low * factor, self.high * factor)

    def __repr__(self) -> str:
        return f"Uniform(low={self.low:g}, high={self.high:g})"


_SQRT2 = math.sqrt(2.0)
_BISECTIONS = 200


@dataclass(frozen=True, slots=True)
class TruncatedLogNormal(LengthDistribution):
    """log L is normal with mean `mu` and deviation `sigma`, given low <= L <= high (tokens).

    Raises:
        WorkloadError: sigma is not above 0, the limits are not 0 < low < high, or (almost) no length lies
            between them.
    """

    mu: float
    sigma: float
    low: float
    high: float

    def __post_init__(self) -> None:
        mu, sigma, low, high = self.mu, self.sigma, self.low, self.high
        if not (math.isfinite(mu) and math.isfinite(sigma) and sigma > 0):
            raise WorkloadError(
                f"a log-normal needs a finite mu and a sigma above 0, not {mu!r} and {sigma!r}"
            )
        _check_limits(low, high)
        start, end, _ = self._limits()
        if not _cdf(end) - _cdf(start) > 1e-250:
            raise WorkloadError(
                f"a log-normal with mu {mu:g} and sigma {sigma:g} has no lengths between {low:g} and {high:g}"
            )

    def above(self, thresholds: FloatArray) -> "tuple[FloatArray, FloatArray]":
        """P(L > t) and E[L; L > t]. The first moment shifts the normal by sigma: exp(mu + σ²/2) × Φ(z − σ)."""
        # The limits go the way of the thresholds, so that of equal ones exactly all and nothing is above.
        lengths = np.append(np.clip(thresholds, self.low, self.high), (self.low, self.high))
        # The C library's logarithm: NumPy's rounds otherwise on other processors, and plans are compared to the bit.
        z = (np.array([math.log(each) for each in lengths.tolist()]) - self.mu) / self.sigma
        *masses, all_mass = _masses(z[:-1], z[-1])
        # The factor is kept in the exponent together with 1 / all_mass: either alone may be out of range.
        moment_factor = math.exp(self.mu + self.sigma**2 / 2 - math.log(all_mass))
        tokens = _masses(z[:-2] - self.sigma, z[-1] - self.sigma) * moment_factor
        return np.array(masses) / all_mass, tokens

    def quantile(self, q: float) -> float:
        """The smallest l with P(L <= l) >= q."""
        check_quantile(q)
        if q in (0, 1):
            return self.high if q else self.low
        start, end, mirrored = self._limits()
        if mirrored:
            q = 1 - q
        level = _cdf(start) + q * (_cdf(end) - _cdf(start))
        z = NormalDist().inv_cdf(level) if 1e-300 < level < 1 else _bisect(level, start, end)
        z = min(max(z, start), end)
        length = math.exp(self.mu + self.sigma * (-z if mirrored else z))
        return min(max(length, self.low), self.high)

    def thresholds(self, n: int) -> FloatArray:
        """0, the highest threshold and about `n` between them; each plan asks for the same ones many times."""
        return _thresholds(self, n)

    def fine_bins(self, above: float = 0.0, up_to: float = float("inf")) -> Bins:
        """Bins of (above, up_to] that integrals are taken over."""
        return _fine_bins(self, above, up_to)

    def scaled(self, factor: float) -> "TruncatedLogNormal":
        """The distribution of factor × L."""
        check_factor(factor)
        return TruncatedLogNormal(
            self.mu + math.log(factor), self.sigma, self.low * factor, self.high * factor
        )

    def _limits(self) -> tuple[float, float, bool]:
        """The limits in deviations from `mu`, and whether they are mirrored.

        They are where both lie in the upper tail: differences of probabilities near 1 would lose digits.
        """
        start, end = ((math.log(each) - self.mu) / self.sigma for each in (self.low, self.high))
        return (-end, -start, True) if start > 0 else (start, end, False)


# A plan asks for the same parts again and again: for rates, for waits, at every price.
@lru_cache(maxsize=64)
def _fine_bins(lengths: TruncatedLogNormal, above: float, up_to: float) -> Bins:
    bins = LengthDistribution.fine_bins(lengths, above, up_to)
    for shared in (bins.lower, bins.upper, bins.lengths, bins.weights):
        shared.flags.writeable = False
    return bins


@lru_cache(maxsize=64)
def _thresholds(lengths: TruncatedLogNormal, n: int) -> FloatArray:
    shared = LengthDistribution.thresholds(lengths, n)
    shared.flags.writeable = False
    return shared


def _masses(starts: FloatArray, end: float) -> FloatArray:
    """Φ(end) − Φ(start) of each start, from the tail that both lie in; planning asks for thousands at a time."""
    from scipy.special import erfc

    tails: FloatArray = 0.5 * erfc(np.abs(starts) / _SQRT2)
    return np.where(starts > 0, tails - 0.5 * erfc(end / _SQRT2), 0.5 * erfc(-end / _SQRT2) - tails)


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / _SQRT2)


def _bisect(level: float, start: float, end: float) -> float:
    for _ in range(_BISECTIONS):
        middle = (start + end) / 2
        start, end = (middle, end) if _cdf(middle) < level else (start, middle)
    return (start + end) / 2


@dataclass(frozen=True, slots=True)
class Workload:
    """The traffic that a plan is for: prompts of random length, and answers.

    Raises:
        WorkloadError: a ratio outside [0, 1), or answers without a token.
    """

    lengths: LengthDistribution
    """Whole prompts."""
    output_tokens: float
    """The mean length of answers."""
    prefix_hit_ratio: float = 0.0
    """The first part of every prompt, 0 <= r < 1, that is found in a cache. With 0 the lengths are uncached lengths
    already: the paper's L."""

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_hit_ratio < 1:
            raise WorkloadError(f"the prefix hit ratio must be in [0, 1), not {self.prefix_hit_ratio!r}")
        if not (math.isfinite(self.output_tokens) and self.output_tokens > 0):
            raise WorkloadError(
                f"answers must have more than 0 tokens on average, not {self.output_tokens!r}"
            )

    @property
    def uncached(self) -> LengthDistribution:
        """The lengths that must be computed: (1 − hit ratio) × length."""
        return self.lengths.scaled(1 - self.prefix_hit_ratio) if self.prefix_hit_ratio else self.lengths
