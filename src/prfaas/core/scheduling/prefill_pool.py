"""Prefills that wait for whichever instance of their cluster is free first."""

from collections import Counter
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from prfaas.core.scheduling.prefill_order import PrefillWaits

T = TypeVar("T", bound=Hashable)


class PrefillPool(Generic[T]):
    """Prefills that one cluster has accepted and given to no instance yet: the most urgent goes first.

    An item may be bound to an instance, whose cache spares it much; then it waits for that one.

    Args:
        waits: What it writes down of those that are taken; None: an object of its own.
    """

    __slots__ = ("_bound", "_gone", "_number", "_shared", "_work", "waiting_s", "waits")

    waiting_s: float
    """Seconds of prefill of all that any instance may take."""
    waits: PrefillWaits
    """Of those that were taken. The cluster's view has the same object."""

    def __init__(self, waits: PrefillWaits | None = None) -> None:
        self.waiting_s = 0.0
        self.waits = PrefillWaits() if waits is None else waits
        self._shared: list[tuple[float, int, float, T]] = []
        self._bound: dict[str, list[tuple[float, int, float, T]]] = {}
        self._gone: set[T] = set()
        # Seconds of work, the instance that it is bound to, and when it came.
        self._work: dict[T, tuple[float, str | None, float]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._work)

    def __contains__(self, item: object) -> bool:
        return item in self._work

    def bound(self) -> Counter[str]:
        """How many wait for each instance only."""
        return Counter(only for _, only, _ in self._work.values() if only is not None)

    def offer(
        self, item: T, urgency_s: float, work_s: float, only: str | None = None, *, now_s: float
    ) -> None:
        """Let `item` wait from now. The smallest `urgency_s` is taken first, equal ones in the order of arrival."""
        self._number += 1
        entry = (urgency_s, self._number, work_s, item)
        self._work[item] = (work_s, only, now_s)
        if only is None:
            self.waiting_s += work_s
            heappush(self._shared, entry)
        else:
            heappush(self._bound.setdefault(only, []), entry)

    def take(self, instance: str, *, now_s: float) -> T | None:
        """Take out what `instance` should begin now; None if there is nothing for it."""
        mine = self._head(self._bound.get(instance))
        shared = self._head(self._shared)
        if mine is None and shared is None:
            return None
        if shared is None or (mine is not None and mine[0] <= shared[0]):
            assert mine is not None
            heappop(self._bound[instance])
            return self._taken(mine[3], now_s)
        heappop(self._shared)
        return self._taken(shared[3], now_s)

    def next_of(self, instance: str) -> T | None:
        """What `take` would return."""
        mine = self._head(self._bound.get(instance))
        shared = self._head(self._shared)
        if mine is None or (shared is not None and shared[0] < mine[0]):
            mine = shared
        return None if mine is None else mine[3]

    def work_s(self, item: T) -> float:
        """Seconds of an item that waits, as it was offered."""
        return self._work[item][0]

    def withdraw(self, item: T) -> bool:
        """Let `item` wait no longer. Returns False if it wasn't waiting."""
        if item not in self._work:
            return False
        self._forget(item)
        self._gone.add(item)
        return True

    def release(self, instance: str) -> None:
        """What was bound to `instance`, which is gone or leaves its role, may go to any other."""
        for urgency_s, number, work_s, item in self._bound.pop(instance, []):
            if item in self._gone:
                self._gone.discard(item)
                continue
            self._work[item] = (work_s, None, self._work[item][2])
            self.waiting_s += work_s
            heappush(self._shared, (urgency_s, number, work_s, item))

    def _head(self, heap: list[tuple[float, int, float, T]] | None) -> tuple[float, int, float, T] | None:
        while heap:
            if heap[0][3] not in self._gone:
                return heap[0]
            self._gone.discard(heappop(heap)[3])
        return None

    def _taken(self, item: T, now_s: float) -> T:
        work_s, _, offered_s = self._work[item]
        self.waits.add(now_s - offered_s, work_s)
        self._forget(item)
        return item

    def _forget(self, item: T) -> None:
        work_s, only, _ = self._work.pop(item)
        if only is None:
            # Differences of sums drift; an empty pool has exactly nothing.
            self.waiting_s = max(self.waiting_s - work_s, 0.0) if len(self._work) else 0.0
