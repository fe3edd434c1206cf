"""The prefill work of one instance, as predicted."""

from dataclasses import dataclass
from itertools import count

_ids = count()


@dataclass(slots=True)
class _Work:
    predicted_s: float
    timed: bool


class PrefillQueue:
    """First in, first out, one at a time: the paper's model of a prefill instance.

    The work at the head runs since the later of its acceptance and the end of the work before it; the rest waits.
    Work that overruns its prediction counts as done in this moment, so `busy_until_s` is never in the past while
    anything is open. The end of a decode instance's own prefill is not seen: such work is accepted with `timed=True`
    and leaves when its prediction is over. Times are seconds of one clock that does not go back.
    """

    __slots__ = ("_busy_s", "_head_start_s", "_open", "_waiting_s")

    def __init__(self) -> None:
        self._open: dict[int, _Work] = {}
        self._head_start_s = 0.0
        self._waiting_s = 0.0
        self._busy_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, now_s: float, predicted_s: float, *, timed: bool = False) -> int:
        """Accept work of `predicted_s` >= 0 seconds. Returns the number that `remove` takes."""
        self._expire(now_s)
        work = next(_ids)
        if self._open:
            self._waiting_s += predicted_s
        else:
            self._head_start_s = now_s
        self._open[work] = _Work(predicted_s, timed)
        return work

    def remove(self, now_s: float, work: int) -> float | None:
        """End `work`; nothing happens if it has left already.

        Returns:
            Its service time in seconds: end − the later of acceptance and the end of the work before it. None for
            work that ends before earlier work: they shared the instance, so its time is not its own.
        """
        self._expire(now_s)
        if work not in self._open:
            return None
        if work != next(iter(self._open)):
            self._waiting_s -= self._open.pop(work).predicted_s
            self._settle()
            return None
        start_s = self._head_start_s
        self._pop_head(now_s)
        return now_s - start_s

    def busy_until_s(self, now_s: float) -> float:
        """When all open work will be done; never before `now_s` while there is any, else when the last ended."""
        self._expire(now_s)
        if not self._open:
            return self._head_start_s
        head = next(iter(self._open.values()))
        return max(now_s, self._head_start_s + head.predicted_s) + self._waiting_s

    def busy_s(self, now_s: float) -> float:
        """Seconds in which anything was open, since the beginning."""
        self._expire(now_s)
        return self._busy_s + (now_s - self._head_start_s if self._open else 0.0)

    def _expire(self, now_s: float) -> None:
        while self._open:
            head = next(iter(self._open.values()))
            end_s = self._head_start_s + head.predicted_s
            if not head.timed or end_s > now_s:
                return
            self._pop_head(end_s)

    def _pop_head(self, end_s: float) -> None:
        self._open.pop(next(iter(self._open)))
        self._busy_s += end_s - self._head_start_s
        self._head_start_s = end_s
        if self._open:
            self._waiting_s -= next(iter(self._open.values())).predicted_s
        self._settle()

    def _settle(self) -> None:
        # Differences of sums drift: with at most one open, nothing waits for certain.
        self._waiting_s = max(self._waiting_s, 0.0) if len(self._open) > 1 else 0.0
