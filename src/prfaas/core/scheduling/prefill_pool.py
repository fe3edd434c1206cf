"""Prefills that wait for whichever instance of their cluster is free first."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class PrefillPool(Generic[T]):
    """Prefills that one cluster has accepted and given to no instance yet: the most urgent goes first.

    An item may be bound to an instance, whose cache spares it much; then it waits for that one.
    """

    waiting_s: float = 0.0
    """Seconds of prefill of all that any instance may take."""
    _shared: list[tuple[float, int, float, T]] = field(default_factory=list)
    _bound: dict[str, list[tuple[float, int, float, T]]] = field(default_factory=dict)
    _gone: set[T] = field(default_factory=set)
    _work: dict[T, tuple[float, str | None]] = field(default_factory=dict)
    _number: int = 0

    def __len__(self) -> int:
        return len(self._work)

    def __contains__(self, item: object) -> bool:
        return item in self._work

    def offer(self, item: T, urgency_s: float, work_s: float, only: str | None = None) -> None:
        """Let `item` wait. The smallest `urgency_s` is taken first, equal ones in the order of their arrival."""
        self._number += 1
        entry = (urgency_s, self._number, work_s, item)
        self._work[item] = (work_s, only)
        if only is None:
            self.waiting_s += work_s
            heappush(self._shared, entry)
        else:
            heappush(self._bound.setdefault(only, []), entry)

    def take(self, instance: str) -> T | None:
        """Take out what `instance` should do next; None if there is nothing for it."""
        mine = self._head(self._bound.get(instance))
        shared = self._head(self._shared)
        if mine is None and shared is None:
            return None
        if shared is None or (mine is not None and mine[0] <= shared[0]):
            assert mine is not None
            heappop(self._bound[instance])
            self._forget(mine[3])
            return mine[3]
        heappop(self._shared)
        self._forget(shared[3])
        return shared[3]

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
            self._work[item] = (work_s, None)
            self.waiting_s += work_s
            heappush(self._shared, (urgency_s, number, work_s, item))

    def _head(self, heap: list[tuple[float, int, float, T]] | None) -> tuple[float, int, float, T] | None:
        while heap:
            if heap[0][3] not in self._gone:
                return heap[0]
            self._gone.discard(heappop(heap)[3])
        return None

    def _forget(self, item: T) -> None:
        work_s, only = self._work.pop(item)
        if only is None:
            # Differences of sums drift; an empty pool has exactly nothing.
            self.waiting_s = max(self.waiting_s - work_s, 0.0) if len(self._work) else 0.0
