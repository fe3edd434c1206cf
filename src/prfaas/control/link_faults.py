"""Whether transfers over a link come through, whatever its connections say."""

_FAILURES_TO_CLOSE = 3
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 80.0


class LinkFaults:
    """Three failed transfers in a row close a link for 10 s. Then it is tried again: one more failure closes it for
    twice as long, up to 80 s, one success makes it as good as new."""

    __slots__ = ("_closed_until_s", "_failures", "_pause_s")

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until_s = float("-inf")

    def failed(self, now_s: float) -> None:
        """A transfer failed. Those that were under way when the link was closed say nothing new."""
        if not self.is_up(now_s):
            return
        self._failures += 1
        if self._failures >= _FAILURES_TO_CLOSE:
            self._closed_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """A transfer came through."""
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until_s = float("-inf")

    def is_up(self, now_s: float) -> bool:
        return now_s >= self._closed_until_s
