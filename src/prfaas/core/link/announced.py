"""When a link has changed so much that thresholds should be searched again: once per change, not once per step."""

from dataclasses import dataclass

_MUCH_CHANGED = 0.3
_RISEN_S = 1.0


@dataclass(slots=True)
class AnnouncedLink:
    """What thresholds were last searched for.

    A fall of the capacity by more than 30 % counts at once. A rise by as much counts when it has come to rest for a
    second, since capacities are found again step by step. Going down and coming back count at once.
    """

    bits_per_s: float
    up: bool = True
    _newest_bits_per_s: float = 0.0
    _since_s: float = 0.0

    def is_due(self, bits_per_s: float, up: bool, now_s: float) -> bool:
        """Whether to search again; then what is given counts as announced."""
        if bits_per_s != self._newest_bits_per_s:
            self._newest_bits_per_s, self._since_s = bits_per_s, now_s
        change = bits_per_s / self.bits_per_s - 1
        has_changed = abs(change) > _MUCH_CHANGED and (change < 0 or now_s - self._since_s >= _RISEN_S)
        if not has_changed and up == self.up:
            return False
        self.bits_per_s, self.up = bits_per_s, up
        return True
