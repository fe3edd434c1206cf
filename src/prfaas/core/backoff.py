"""Pauses between tries at something that fails."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Twice as long a pause after each failure in a row, up to a most. Who tries counts the failures."""

    first_s: float
    most_s: float

    def pause_s(self, failures: int) -> float:
        """The pause after so many failures in a row; without any there is none."""
        # No float is as large as two to the power of a day's failures.
        return min(self.first_s * 2.0 ** min(failures - 1, 60), self.most_s) if failures else 0.0
