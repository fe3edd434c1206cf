"""What a law of lengths says of those above a length, and of the others."""

import numpy as np

from prfaas.core.workload.lengths import LengthDistribution


def tail(law: LengthDistribution, t: float) -> float:
    """P(L > t)."""
    return _above(law, t)[0]


def mean_above(law: LengthDistribution, t: float) -> float | None:
    """E[L | L > t] in tokens, None if no length is above t."""
    mass, tokens = _above(law, t)
    return min(max(tokens / mass, t, law.low), law.high) if mass > 0 else None


def mean_at_most(law: LengthDistribution, t: float) -> float | None:
    """E[L | L <= t] in tokens, None if every length is above t."""
    mass, tokens = _above(law, t)
    mean = (law.mean() - tokens) / (1.0 - mass) if mass < 1 else None
    return None if mean is None else min(max(mean, law.low), t, law.high)


def _above(law: LengthDistribution, t: float) -> tuple[float, float]:
    (mass,), (tokens,) = law.above(np.array([t], dtype=np.float64))
    return float(mass), float(tokens)
