"""When a link has changed so much that thresholds should be searched again: once per change, not once per step."""

from dataclasses import dataclass

_MUCH_CHANGED = 0.3
_RISEN_S, _LONGEST_RISE_S = 1.0, 1.5


@dataclass(slots=True)
class AnnouncedLink:
    """A change detector: the link's state that thresholds were last searched for.

    A fall of the capacity by more than 30 % counts at once. A rise by as much counts when it has come to rest for a
    second, since it is found step by step, or after 1.5 s. Going down and coming back count at once.
    """

    bits_per_s: float
    up: bool = True
    _newest_bits_per_s: float = 0.0
    _newest_s: float = 0.0
    _since_s: float | None = None
    """When the capacity came to differ much from the announced one."""

    def is_due(self, bits_per_s: float, up: bool, now_s: float) -> bool:
        """True if thresholds should be searched again; then this state is the one they were searched for."""
        if bits_per_s != self._newest_bits_per_s:
            self._newest_bits_per_s, self._newest_s = bits_per_s, now_s
        if up == self.up and not self._has_changed(bits_per_s, now_s):
            return False
        self.bits_per_s, self.up, self._since_s = bits_per_s, up, None
        return True

    def _has_changed(self, bits_per_s: float, now_s: float) -> bool:
        change = bits_per_s / self.bits_per_s - 1
        if abs(change) <= _MUCH_CHANGED:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        rested = now_s - self._newest_s >= _RISEN_S or now_s - self._since_s >= _LONGEST_RISE_S
        return change < 0 or rested
