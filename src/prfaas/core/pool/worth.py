"""Decides if loading a prefix from the pool is faster than computing it, from the times of both so far."""

import math

# A sample's weight halves with every 34 that follow it: figures follow the engine's load within a minute.
_FORGET = 0.98
# What is always refused is never measured again: so one refused load in so many is made all the same.
_REFUSALS_PER_TRIAL = 16
# What was measured says nothing of prefills so many times as long. An engine whose prefixes come from the pool computes
# ends of prompts only: of some dozen tokens more or less noise makes any slope, none among them.
_FAR = 8


class LinearCost:
    """Seconds that a job of some size takes: a part that it always takes, and a part for each unit.

    Least squares over the samples, older ones weighing less; neither part is ever negative.
    """

    __slots__ = ("_count", "_product", "_seconds", "_squares", "_units", "largest_units")

    def __init__(self) -> None:
        self._count = self._units = self._seconds = self._squares = self._product = 0.0
        self.largest_units = 0.0
        """Of the samples, older ones counting for less; 0 without samples."""

    @property
    def is_known(self) -> bool:
        """True once there was a sample."""
        return self._count > 0.0

    def add(self, units: float, seconds: float) -> None:
        """One job of `units`, above 0, took `seconds`."""
        self.largest_units = max(self.largest_units * _FORGET, units)
        self._count = self._count * _FORGET + 1.0
        self._units = self._units * _FORGET + units
        self._seconds = self._seconds * _FORGET + seconds
        self._squares = self._squares * _FORGET + units * units
        self._product = self._product * _FORGET + units * seconds

    @property
    def fixed_s(self) -> float:
        """Seconds of a job of no units; 0 without samples."""
        return self._parts()[0]

    @property
    def per_unit_s(self) -> float:
        """Seconds that each unit adds; 0 without samples."""
        return self._parts()[1]

    def seconds(self, units: float) -> float:
        """Predicted seconds of a job of `units`."""
        fixed_s, per_unit_s = self._parts()
        return fixed_s + per_unit_s * units

    def _parts(self) -> tuple[float, float]:
        if not self.is_known:
            return 0.0, 0.0
        # Through the origin, until samples of different sizes tell the parts apart.
        through_origin = 0.0, self._product / self._squares
        spread = self._count * self._squares - self._units * self._units
        if math.isclose(self._count * self._squares, self._units * self._units, rel_tol=1e-6):
            return through_origin
        per_unit_s = (self._count * self._product - self._units * self._seconds) / spread
        fixed_s = (self._seconds - per_unit_s * self._units) / self._count
        if per_unit_s < 0.0:
            return self._seconds / self._count, 0.0
        return (fixed_s, per_unit_s) if fixed_s >= 0.0 else through_origin


class LoadWorth:
    """Measured times of one engine's prefill steps and loads from the pool."""

    def __init__(self) -> None:
        self.prefill = LinearCost()
        """By the tokens of a step."""
        self.copy = LinearCost()
        """By the bytes of a load."""
        self.ssd_wait = LinearCost()
        """By those bytes of a load that came from SSD first."""
        self._refused = 0

    def load_took(self, loaded_bytes: int, ssd_bytes: int, copy_s: float, wait_s: float) -> None:
        """A load ended.

        Args:
            loaded_bytes: all of it, above 0.
            ssd_bytes: the part of it that was on SSD.
            copy_s: what it took, but for the next.
            wait_s: how long it waited for pages from SSD.
        """
        self.copy.add(loaded_bytes, copy_s)
        if ssd_bytes:
            self.ssd_wait.add(ssd_bytes, wait_s)

    def load_s(self, loaded_bytes: int, ssd_bytes: int) -> float:
        """Predicted seconds of such a load; parts that were not measured count as nothing."""
        wait_s = self.ssd_wait.seconds(ssd_bytes) if ssd_bytes else 0.0
        return self.copy.seconds(loaded_bytes) + wait_s

    def prefill_s(self, tokens: int) -> float:
        """Predicted seconds of so many more tokens in a prefill. The step itself runs in any case."""
        return self.prefill.per_unit_s * tokens

    def pays(self, tokens: int, loaded_bytes: int, ssd_bytes: int) -> bool:
        """True if a load that spares the prefill of `tokens` pays. True until loads and such prefills were measured."""
        if not self.copy.is_known or tokens > _FAR * self.prefill.largest_units:
            return True
        if self.load_s(loaded_bytes, ssd_bytes) < self.prefill_s(tokens):
            return True
        self._refused += 1
        return self._refused % _REFUSALS_PER_TRIAL == 0
