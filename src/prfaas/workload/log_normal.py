"""Log-normal lengths within limits, the paper's workload (section 4.1)."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from prfaas.workload.errors import WorkloadError
from prfaas.workload.lengths import LengthDistribution, check_factor, check_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

_SQRT2 = math.sqrt(2.0)
_BISECTIONS = 200


@dataclass(frozen=True, slots=True)
class _Truncated(LengthDistribution):
    mu: float
    sigma: float
    low_tokens: float
    high_tokens: float


class TruncatedLogNormal(_Truncated):
    """log L is normal with mean `mu` and deviation `sigma`, given low <= L <= high (tokens).

    Raises:
        WorkloadError: sigma is not above 0, the limits are not 0 < low < high, or (almost) no length lies
            between them.
    """

    __slots__ = ()

    def __init__(self, mu: float, sigma: float, low: float, high: float) -> None:
        if not (math.isfinite(mu) and math.isfinite(sigma) and sigma > 0):
            raise WorkloadError(
                f"a log-normal needs a finite mu and a sigma above 0, not {mu!r} and {sigma!r}"
            )
        if not (math.isfinite(high) and 0 < low < high):
            raise WorkloadError(
                f"the limits of lengths must satisfy 0 < low < high, not {low!r} and {high!r}"
            )
        _Truncated.__init__(self, mu, sigma, low, high)
        if not self._mass(self._z(low), self._z(high)) > 1e-250:
            raise WorkloadError(
                f"a log-normal with mu {mu:g} and sigma {sigma:g} has no lengths between {low:g} and {high:g}"
            )

    @property
    def low(self) -> float:
        return self.low_tokens

    @property
    def high(self) -> float:
        return self.high_tokens

    def above(self, thresholds: "FloatArray") -> "tuple[FloatArray, FloatArray]":
        """See `LengthDistribution.above`. The first moment shifts the normal by sigma: exp(mu + σ²/2) × Φ(z − σ)."""
        import numpy as np

        end = self._z(self.high)
        all_mass = self._mass(self._z(self.low), end)
        # The factor is kept in the exponent together with 1 / all_mass: either alone may be out of range.
        moment_factor = math.exp(self.mu + self.sigma**2 / 2 - math.log(all_mass))
        mass, tokens = np.empty(len(thresholds)), np.empty(len(thresholds))
        for i, t in enumerate(np.clip(thresholds, self.low, self.high).tolist()):
            z = self._z(t)
            mass[i] = self._mass(z, end) / all_mass
            tokens[i] = self._mass(z - self.sigma, end - self.sigma) * moment_factor
        return mass, tokens

    def quantile(self, q: float) -> float:
        """See `LengthDistribution.quantile`."""
        check_quantile(q)
        if q in (0, 1):
            return self.high if q else self.low
        start, end = self._z(self.low), self._z(self.high)
        # Mirrored where both limits are in the upper tail, so that probabilities near 1 keep their digits.
        mirrored = start > 0
        if mirrored:
            start, end, q = -end, -start, 1 - q
        level = _cdf(start) + q * (_cdf(end) - _cdf(start))
        z = NormalDist().inv_cdf(level) if 1e-300 < level < 1 else _bisect(level, start, end)
        z = min(max(z, start), end)
        length = math.exp(self.mu + self.sigma * (-z if mirrored else z))
        return min(max(length, self.low), self.high)

    def scaled(self, factor: float) -> "TruncatedLogNormal":
        """See `LengthDistribution.scaled`."""
        check_factor(factor)
        return TruncatedLogNormal(
            self.mu + math.log(factor), self.sigma, self.low * factor, self.high * factor
        )

    def __repr__(self) -> str:
        return f"TruncatedLogNormal(mu={self.mu}, sigma={self.sigma}, low={self.low}, high={self.high})"

    def _z(self, length: float) -> float:
        return (math.log(length) - self.mu) / self.sigma

    @staticmethod
    def _mass(start: float, end: float) -> float:
        """Φ(end) − Φ(start), from the tail that both lie in: differences of numbers near 1 would lose digits."""
        if start > 0:
            return 0.5 * (math.erfc(start / _SQRT2) - math.erfc(end / _SQRT2))
        return _cdf(end) - _cdf(start)


def _cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / _SQRT2)


def _bisect(level: float, start: float, end: float) -> float:
    for _ in range(_BISECTIONS):
        middle = (start + end) / 2
        start, end = (middle, end) if _cdf(middle) < level else (start, middle)
    return (start + end) / 2
