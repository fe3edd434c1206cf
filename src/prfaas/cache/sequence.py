"""Which event batches of one engine were missed, doubled, or come from a new process."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches `first` to `last`, both included, have not been seen."""

    first: int
    last: int


Offer = Literal["apply", "duplicate", "restart"] | Gap


class SequenceGuard:
    """The sequence numbers of one engine's batches, which count from 0 in every process.

    The reader offers every batch before it applies it:
    - "apply": it is the next one, and from now on taken as applied;
    - "duplicate": it was applied before (replay and live feed overlap);
    - `Gap`: batches before it are missing: replay them, offer each, then offer this one again. Where replay
      can't give them, `skip_to` it, and forget what the instance held;
    - "restart": the engine is a new process. Forget what the instance held, then offer this one again: the new
      process's own first batches may be missing too.

    A lower number than expected is either old or from a new process. The batches' times tell which: a copy has
    a time that is not later than the last applied one's. Number 0 is also known by heart, for the case of a
    clock that was set back. A new process whose first batches are lost, and whose next one has just the number
    that was expected of the old one, is not noticed: the reader's connection has to tell.
    """

    __slots__ = ("_first_s", "_latest_s", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._latest_s = float("-inf")
        self._first_s: float | None = None

    def offer(self, sequence: int, at_s: float) -> Offer:
        """What to do with batch `sequence`, made at `at_s` of the engine's clock."""
        if sequence == self._next:
            self._take(sequence, at_s)
            return "apply"
        if sequence > self._next:
            return Gap(self._next, sequence - 1)
        if at_s > self._latest_s or (sequence == 0 and self._first_s not in (None, at_s)):
            self._reset()
            return "restart"
        return "duplicate"

    def skip_to(self, sequence: int) -> None:
        """Batches before `sequence` are lost for good. Lower numbers than expected are not taken back."""
        self._next = max(self._next, sequence)

    def _take(self, sequence: int, at_s: float) -> None:
        self._next = sequence + 1
        self._latest_s = max(self._latest_s, at_s)
        if sequence == 0:
            self._first_s = at_s

    def _reset(self) -> None:
        self._next = 0
        self._latest_s = float("-inf")
        self._first_s = None
