"""The prefill work accepted by one instance, as predicted: when will it be done, how long did it really take.

The bytes that were promised to one link and have not left yet, as predicted.
"""

from dataclasses import dataclass
from itertools import count

_ids = count()


class LinkLoad:
    """Bytes of the open transfers of one link, accepted by prediction, sent by measurement.

    Bytes that the link is measured to deliver come off the oldest promises, and a transfer that ends takes its
    own with it: so nothing is left when nothing is open, whatever the predictions were worth.
    """

    __slots__ = ("_measured_bytes", "_open", "_open_bytes", "_unsent_bytes")

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._open_bytes = 0
        self._unsent_bytes = 0
        self._measured_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def accept(self, nbytes: int) -> int:
        """A transfer of `nbytes` >= 0 is opened; the answer is what `finish` wants."""
        transfer = next(_ids)
        self._open[transfer] = nbytes
        self._open_bytes += nbytes
        self._unsent_bytes += nbytes
        return transfer

    def finish(self, transfer: int) -> None:
        """The transfer is complete, or given up."""
        self._open_bytes -= self._open.pop(transfer)
        self._unsent_bytes = min(self._unsent_bytes, self._open_bytes)

    def delivered(self, nbytes: int, measured_bytes: int) -> None:
        """The link has delivered `nbytes` more, and its producers say that `measured_bytes` are still to leave."""
        self._unsent_bytes = max(self._unsent_bytes - nbytes, 0)
        self._measured_bytes = measured_bytes

    @property
    def residual_bytes(self) -> int:
        """Still to leave: what was promised here, or what producers know of, if that is more."""
        return max(self._unsent_bytes, self._measured_bytes)


@dataclass(slots=True)
class _Work:
    predicted_s: float
    timed: bool


class PrefillQueue:
    """First in, first out, one at a time: the paper's model of a prefill instance.

    The work at the head runs since the later of its acceptance and the end of the work before it; the rest waits.
    Work that overruns its prediction counts as done in this moment, so `busy_until_s` is never in the past while
    anything is open. Work that is accepted with `timed=True` tells no end of its own (a decode instance's own
    prefill): it leaves when its prediction is over. Times are seconds of one clock that does not go back.
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
        """Accept work of `predicted_s` >= 0 seconds; the answer is what `remove` wants."""
        self._expire(now_s)
        work = next(_ids)
        if self._open:
            self._waiting_s += predicted_s
        else:
            self._head_start_s = now_s
        self._open[work] = _Work(predicted_s, timed)
        return work

    def remove(self, now_s: float, work: int) -> float | None:
        """`work` is over. Returns its service time in seconds, or None where that can't be told.

        Service time = end − the later of acceptance and the end of the work before it. Work that ends out of turn
        shared the instance with what came before it, so its time says nothing of its own. Harmless if `work` has
        left already.
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
