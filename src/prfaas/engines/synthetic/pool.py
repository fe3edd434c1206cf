"""The pages of one stand-in: which block of which group is held, pinned by whom, evicted when."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass


class RoomError(ValueError):
    """A request can never fit into the cache."""


Deviations = tuple[int, ...]
"""Per layer, by how much (XOR) a page's digest differs from what its tokens give; empty for a sound page."""


@dataclass(slots=True, eq=False)
class Page:
    """One copy of one block. `key` names the prefix that it ends; `holders`: running requests that need it."""

    group: int
    key: int
    deviations: Deviations
    holders: int = 0
    cached: bool = True


class PagePool:
    """`capacity` pages for all groups together, as vLLM shares them.

    At all times reserved + pinned <= capacity, and pinned + idle <= capacity. Idle pages are evicted oldest first.
    Equal blocks are not merged: a block computed twice is two pages.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._copies: dict[tuple[int, int], list[Page]] = {}
        self._idle: OrderedDict[Page, None] = OrderedDict()
        self._reserved = 0
        self._pinned = 0
        self._evicted: list[Page] = []
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()

    @property
    def used_ratio(self) -> float:
        """Share of the pages that running requests hold or will need."""
        return (self._reserved + self._pinned) / self.capacity

    def copies(self) -> dict[tuple[int, int], int]:
        """(group, key) → copies of every block that can be found."""
        return {place: len(copies) for place, copies in self._copies.items()}

    def holds(self, group: int, key: int) -> bool:
        """True if a copy of the block is held."""
        return (group, key) in self._copies

    def find(self, group: int, key: int) -> Page:
        """A copy of a block that is held."""
        return self._copies[group, key][0]

    async def lease(self, pages: int) -> "Lease":
        """Room for `pages` more pages; waits for it behind those who asked before.

        Raises:
            RoomError: there will never be so much room.
        """
        if pages > self.capacity:
            raise RoomError(f"{pages} pages are needed, the whole cache has {self.capacity}")
        async with self._turn:
            while self._reserved + self._pinned + pages > self.capacity:
                self._freed.clear()
                await self._freed.wait()
            self._reserved += pages
        return Lease(self, pages)

    def deposit(self, group: int, key: int, deviations: Deviations) -> bool:
        """Keep a block that no running request needs (a state checkpoint); False if there is no room for it."""
        if self._pinned + self._reserved >= self.capacity:
            return False
        self._idle[self._store(group, key, deviations)] = None
        return True

    def take_evicted(self) -> list[Page]:
        """What was evicted since the last call, in order."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def clear(self) -> None:
        """Forget every block; running requests keep their pages but nobody finds them any more."""
        for copies in self._copies.values():
            for page in copies:
                page.cached = False
        self._copies.clear()
        self._idle.clear()
        self._evicted.clear()
        self._freed.set()

    def _store(self, group: int, key: int, deviations: Deviations) -> Page:
        if self._pinned + len(self._idle) >= self.capacity:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self._evicted.append(page)
        page = Page(group, key, deviations)
        self._copies.setdefault((group, key), []).append(page)
        return page

    def _forget(self, page: Page) -> None:
        copies = self._copies[page.group, page.key]
        copies.remove(page)
        if not copies:
            del self._copies[page.group, page.key]

    def _pin(self, page: Page) -> None:
        if page.holders == 0:
            self._idle.pop(page, None)
            self._pinned += 1
        page.holders += 1

    def _unpin(self, page: Page) -> None:
        page.holders -= 1
        if page.holders == 0:
            self._pinned -= 1
            if page.cached:
                self._idle[page] = None


class Lease:
    """One running request's part of the pool; `close` it, whatever happened."""

    def __init__(self, pool: PagePool, pages: int) -> None:
        self._pool = pool
        self._left = pages
        self._pages: list[Page] = []

    def pin(self, page: Page) -> None:
        """Keep a held page from being evicted: one page less that the request will need."""
        self._spend()
        self._pool._pin(page)
        self._pages.append(page)

    def store(self, group: int, key: int, deviations: Deviations) -> Page:
        """A new page that the request has computed or loaded."""
        self._spend()
        page = self._pool._store(group, key, deviations)
        self._pool._pin(page)
        self._pages.append(page)
        return page

    def close(self) -> None:
        """Let everything go, the last pages of the prompt to be evicted first; idempotent."""
        pool = self._pool
        for page in reversed(self._pages):
            pool._unpin(page)
        pool._reserved -= self._left
        self._pages.clear()
        self._left = 0
        pool._freed.set()

    def _spend(self) -> None:
        if self._left < 1:
            raise RuntimeError("a request uses more pages than it has reserved")
        self._left -= 1
        self._pool._reserved -= 1
