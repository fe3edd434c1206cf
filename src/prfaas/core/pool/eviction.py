"""Which page of a pool goes when a new one needs its room.

A page that others build on (its *children*) never goes before them: the tail of a prefix is of no use without its
head. The parent of an attention block is the block before it; that of a state or of a sliding window is the attention
block at whose end it lies. So only pages without children are candidates, and the policies differ in their order.
"""

from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from prfaas.core.kv.groups import GroupKind, KvGroup

Page = TypeVar("Page", bound=Hashable)

EVICTION_POLICIES = ("lru", "cost")

# The heap of candidates is made anew when it holds so many entries more than twice the pages.
_MOST_OUTDATED = 1024

_Rank = tuple[float, int]
"""Of a page: its priority, and the number of its last use. The lowest goes first."""


class _Entry(Generic[Page]):
    __slots__ = ("end_tokens", "group", "parent", "rank", "size_bytes", "uses")

    end_tokens: int
    """The page's end in a prompt, as far as its chain is known."""

    def __init__(self, size_bytes: int, group: int, parent: Page | None) -> None:
        self.size_bytes = size_bytes
        self.group = group
        self.parent = parent
        self.uses = 1
        self.rank: _Rank = (0.0, 0)


class EvictionPolicy(Generic[Page]):
    """Knows all pages of one memory, and names the next to go: by the last use, where a subclass says nothing else.

    Every call takes O(log n), amortized. An entry of the queue is outdated, and passed over, once its page was used
    again, has got a child or is gone.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        """Of all pages that were added and not removed."""
        self._entries: dict[Page, _Entry[Page]] = {}
        # Parent, which may be absent itself → number of its children that are here.
        self._children: dict[Page, int] = {}
        self._queue: list[tuple[_Rank, Page]] = []
        self._uses = 0

    def added(self, page: Page, size_bytes: int, group: int, parent: Page | None = None) -> None:
        """A page is here now, and that was its first use. One that is here already is only touched.

        Args:
            page: Its id.
            size_bytes: The room that it takes.
            group: The number of its KV group.
            parent: The page without which this one is of no use, whether that is here or not. None: the page begins
                a chain, or its parent is not known.
        """
        if page in self._entries:
            self.touched(page)
            return
        entry = self._entries[page] = _Entry(size_bytes, group, parent)
        self.used_bytes += size_bytes
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._entered(entry)
        self._use(page, entry)

    def touched(self, page: Page) -> None:
        """A page was used again. One that is not here is passed over."""
        entry = self._entries.get(page)
        if entry is not None:
            entry.uses += 1
            self._use(page, entry)

    def removed(self, page: Page) -> None:
        """A page is no longer here. One that is not here is passed over."""
        entry = self._entries.pop(page, None)
        if entry is None:
            return
        self.used_bytes -= entry.size_bytes
        parent = entry.parent
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        parent_entry = self._entries.get(parent)
        if parent_entry is not None:
            self._enqueue(parent, parent_entry)

    def victim(self, may_go: Callable[[Page], bool]) -> Page | None:
        """The next page to go, which stays known until it is `removed`.

        Args:
            may_go: False of pages in use: pinned ones, and those that are being written.

        Returns:
            None if no page may go.
        """
        queue = self._queue
        in_use: list[tuple[_Rank, Page]] = []
        found: Page | None = None
        while queue:
            rank, page = queue[0]
            entry = self._entries.get(page)
            if entry is None or entry.rank != rank or page in self._children:
                heappop(queue)
            elif may_go(page):
                found = page
                self._chosen(entry)
                break
            else:
                in_use.append(heappop(queue))
        for each in in_use:
            heappush(queue, each)
        return found

    def _use(self, page: Page, entry: _Entry[Page]) -> None:
        self._uses += 1
        entry.rank = (self._priority(entry), self._uses)
        if page not in self._children:
            self._enqueue(page, entry)

    def _enqueue(self, page: Page, entry: _Entry[Page]) -> None:
        queue = self._queue
        heappush(queue, (entry.rank, page))
        if len(queue) > 2 * len(self._entries) + _MOST_OUTDATED:
            queue[:] = [(each.rank, key) for key, each in self._entries.items() if key not in self._children]
            heapify(queue)

    def _priority(self, _entry: _Entry[Page]) -> float:
        return 0.0

    def _entered(self, entry: _Entry[Page]) -> None:
        """A page was added."""

    def _chosen(self, entry: _Entry[Page]) -> None:
        """A page is the next to go."""


class LruEviction(EvictionPolicy[Page]):
    """The least recently used page first."""


class CostAwareEviction(EvictionPolicy[Page]):
    """The page first that saves the least seconds of prefill per byte, with ageing.

    A page's priority is the policy's age when it was last used, plus its uses times the seconds that it saves, over
    its bytes. The age is the priority of the last page that went. An attention block saves the computing of its own
    tokens, a state that of the whole prefix: without it nothing before it is of use. Sources: GreedyDual-Size with
    Frequency (L. Cherkasova, HP Labs HPL-98-69R1, 1998); FLOPs saved per byte as the worth of a hybrid model's states
    (R. Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025).

    Args:
        groups: The KV groups of the model.
        recompute_s: Seconds of prefill over tokens [start, end) of a prompt.
    """

    def __init__(self, groups: Sequence[KvGroup], recompute_s: Callable[[int, int], float]) -> None:
        super().__init__()
        self._groups = {group.index: group for group in groups}
        self._recompute_s = recompute_s
        self._age = 0.0

    def _entered(self, entry: _Entry[Page]) -> None:
        entry.end_tokens = self._groups[entry.group].block_tokens
        before = None if entry.parent is None else self._entries.get(entry.parent)
        if before is not None and before.group == entry.group:
            entry.end_tokens += before.end_tokens

    def _priority(self, entry: _Entry[Page]) -> float:
        group = self._groups[entry.group]
        block = None if entry.parent is None else self._entries.get(entry.parent)
        if block is None or block.group == entry.group:
            block = entry
        is_state = group.kind is GroupKind.STATE
        start_tokens = 0 if is_state else max(block.end_tokens - group.block_tokens, 0)
        return self._age + entry.uses * self._recompute_s(start_tokens, block.end_tokens) / entry.size_bytes

    def _chosen(self, entry: _Entry[Page]) -> None:
        self._age = max(self._age, entry.rank[0])


def eviction_policy(
    name: str, groups: Sequence[KvGroup], recompute_s: Callable[[int, int], float] | None = None
) -> EvictionPolicy[Page]:
    """A policy by name.

    Args:
        name: One of `EVICTION_POLICIES`.
        groups: The KV groups of the model.
        recompute_s: Seconds of prefill over tokens [start, end) of a prompt, which "cost" weighs; None takes every
            token alike.

    Raises:
        ValueError: no policy has this name.
    """
    match name:
        case "lru":
            return LruEviction()
        case "cost":
            return CostAwareEviction(groups, recompute_s or (lambda start, end: float(end - start)))
    raise ValueError(f'there is no eviction policy "{name}"; there are {", ".join(EVICTION_POLICIES)}')
