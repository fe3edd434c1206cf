"""Reservations: pages that engines fill, and the processes that may still write into their slots.

A slot is reused only when no process writes into it any more. So after a scheduler's end or a lost connection a page
keeps its slot until every rank has sent commit or abort, said goodbye, or ended. A worker's client keeps commits and
aborts that it could not send for its next session. Pages that the last daemon left WRITING wait for each rank's next
session or end (see `PoolClient.writing`).
"""

from collections.abc import Callable

from prfaas.core.pool.geometry import PageIdentity
from prfaas.serving.pool.memory_tier import MemoryTier, PoolPage
from prfaas.serving.pool.page_table import PageState, row_of
from prfaas.serving.pool.processes import Owner


class Reservations:
    """All pages that are WRITING. Calls `ready` when all ranks of a page have committed, else `aborted`."""

    def __init__(
        self,
        memory: MemoryTier,
        ranks: int,
        ready: Callable[[PoolPage], None],
        aborted: Callable[[PoolPage], None],
    ) -> None:
        self._memory = memory
        self._ranks = ranks
        self._ready = ready
        self._aborted = aborted
        # Only pages that will become READY if all goes well.
        self._by_id: dict[bytes, PoolPage] = {}
        self._of: dict[Owner, set[PoolPage]] = {}
        # Owner → rank → the newest session of the worker, which may write.
        self._workers: dict[Owner, dict[int, object]] = {}

    def __contains__(self, page_id: bytes) -> bool:
        return page_id in self._by_id

    def __len__(self) -> int:
        """Number of pages, including those that will not become READY."""
        return sum(len(pages) for pages in self._of.values())

    def begin(self, page: PoolPage, owner: Owner, identity: PageIdentity | None) -> bool:
        """Give the page a slot for that owner's workers to write. False: there is no room."""
        page.ranks_left = (1 << self._ranks) - 1
        if not self._memory.place(page, PageState.WRITING, owner, identity):
            return False
        page.checksums = [0] * self._ranks
        page.owner = owner
        self._by_id[page.page_id] = page
        self._of.setdefault(owner, set()).add(page)
        return True

    def take_back(self, page: PoolPage, owner: Owner, ranks_left: int) -> None:
        """Keep the slot of a page that was WRITING when the last daemon ended, until its writers have ended."""
        page.owner, page.ranks_left, page.failed, page.left_behind = owner, ranks_left, True, True
        self._of.setdefault(owner, set()).add(page)

    def commit(self, slot: int, rank: int, checksum: int) -> None:
        """Record that a rank has written its share. Ignored if the page is not WRITING, or the rank had ended."""
        page = self._writing(slot)
        if page is not None and page.ranks_left >> rank & 1:
            if not page.failed:
                page.checksums[rank] = checksum
            self._end_rank(page, rank)

    def abort(self, slot: int, rank: int) -> None:
        """Record that a rank will not write its share. Ignored as in `commit`."""
        page = self._writing(slot)
        if page is not None and page.ranks_left >> rank & 1:
            self._fail(page)
            self._end_rank(page, rank)

    def abort_all(self, slot: int) -> None:
        """Give up a page that no rank writes or will write."""
        page = self._writing(slot)
        if page is not None:
            self._fail(page)
            page.ranks_left = 0
            self._end(page)

    def disown(self, page: PoolPage) -> None:
        """Give up a page whose session is gone. Ranks without a worker never write it; others may be writing."""
        if page.owner is None:
            return
        self._fail(page)
        workers = self._workers.get(page.owner, {})
        for rank in range(self._ranks):
            if page.ranks_left >> rank & 1 and rank not in workers:
                self._end_rank(page, rank)

    def worker_began(self, owner: Owner, rank: int, session: object) -> None:
        """Note a worker's new session: its copies from the last daemon's time have ended."""
        self._rank_ended(owner, rank, only_left_behind=True)
        self._workers.setdefault(owner, {})[rank] = session

    def worker_ended(self, owner: Owner, rank: int, session: object) -> None:
        """Note that a worker writes no more. Ignored if it has a newer session."""
        workers = self._workers.get(owner, {})
        if workers.get(rank) is session:
            del workers[rank]
            if not workers:
                del self._workers[owner]
            self._rank_ended(owner, rank, only_left_behind=False)

    def owners(self) -> list[Owner]:
        """The engines with reservations."""
        return list(self._of)

    def owner_ended(self, owner: Owner) -> None:
        """Give up all pages of an engine whose processes have ended."""
        for page in list(self._of.get(owner, ())):
            self._fail(page)
            page.ranks_left = 0
            self._end(page)

    def _writing(self, slot: int) -> PoolPage | None:
        page = self._memory.page_in(slot)
        return page if page is not None and page.state is PageState.WRITING else None

    def _rank_ended(self, owner: Owner, rank: int, *, only_left_behind: bool) -> None:
        for page in list(self._of.get(owner, ())):
            if page.ranks_left >> rank & 1 and (page.left_behind or not only_left_behind):
                self._fail(page)
                self._end_rank(page, rank)

    def _fail(self, page: PoolPage) -> None:
        """The page's name is free for another reservation at once, its slot is not."""
        if not page.failed:
            page.failed = True
            del self._by_id[page.page_id]
            self._memory.disown(page)

    def _end_rank(self, page: PoolPage, rank: int) -> None:
        page.ranks_left &= ~(1 << rank)
        self._memory.table.set_ranks_left(row_of(page.slot), page.ranks_left)
        if not page.ranks_left:
            self._end(page)

    def _end(self, page: PoolPage) -> None:
        assert page.owner is not None
        pages = self._of[page.owner]
        pages.remove(page)
        if not pages:
            del self._of[page.owner]
        page.owner = None
        if page.reserved_in is not None:
            page.reserved_in.discard(page)
            page.reserved_in = None
        if page.failed:
            self._memory.free(page)
            self._aborted(page)
        else:
            del self._by_id[page.page_id]
            self._ready(page)
