"""Numbers in sentences and tables, and what several seeds can tell apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student

NONE = "–"
UNSTABLE = "grows"
# More than this is said as a factor.
_MANY = 3.0


def seconds(value: float) -> str:
    """Three digits, always in seconds: columns of them are compared."""
    if not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value: float, digits: int = 0) -> str:
    """0.123 → "12 %"."""
    return f"{value * 100:.{digits}f} %" if math.isfinite(value) else NONE


def more_or_less(ratio: float) -> str:
    """1.2 → "20 % more", 0.9 → "10 % less", 3 → "3.0 times"; of what is compared."""
    if ratio >= _MANY:
        return f"{ratio:.1f} times as much"
    if round(abs(ratio - 1) * 100) == 0:
        return "the same"
    return f"{abs(ratio - 1) * 100:.0f} % {'more' if ratio > 1 else 'less'}"


def times_as_long(ratio: float) -> str:
    """2.04 → "2.0 times as long"."""
    return f"{ratio:.1f} times as long" if math.isfinite(ratio) else "of unknown length"


def listed(items: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of value / base − 1 over pairs, and half of its 95 % interval (Student's t); infinite for one pair."""

    mean: float
    half: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return NONE
        if self.mean >= _MANY - 1:
            return f"{self.mean + 1:,.0f} times"
        sign = "+" if self.mean >= 0 else "−"
        half = f" ± {self.half * 100:.0f}" if math.isfinite(self.half) else ""
        return f"{sign}{abs(self.mean) * 100:.0f}{half} %"


def difference(values: Sequence[float], bases: Sequence[float]) -> Difference:
    """Of pairs that met the same requests."""
    ratios = [value / base - 1 for value, base in zip(values, bases, strict=True)]
    mean = math.fsum(ratios) / len(ratios)
    if len(ratios) < 2 or not math.isfinite(mean):
        return Difference(mean, math.inf)
    sd = math.sqrt(math.fsum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1))
    return Difference(mean, float(student.ppf(0.975, len(ratios) - 1)) * sd / math.sqrt(len(ratios)))


def mean_and_p90(mean_s: float, p90_s: float, *, is_stable: bool = True) -> str:
    """A cell of most tables."""
    text = f"{seconds(mean_s)} ({seconds(p90_s)})"
    return text if is_stable else f"{UNSTABLE}: {text}"


def mean(values: Sequence[float]) -> float:
    """Of one or more numbers."""
    return math.fsum(values) / len(values)
