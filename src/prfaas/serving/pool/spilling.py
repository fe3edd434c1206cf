"""Which pages in memory are still to be written to SSD."""

from collections.abc import Callable
from functools import partial

from prfaas.core.pool.geometry import PageIdentity
from prfaas.serving.pool.hooks import SsdEntry, SsdTier
from prfaas.serving.pool.memory_tier import MemoryTier, PoolPage
from prfaas.serving.pool.page_table import PageState

_MOST_OUTDATED = 1024


class Spilling:
    """Gives pages to the SSD tier, in the order in which they became ready, and no more than it takes.

    Those that wait can go for others. So a burst of pages, or a disk that fails, does not fill the memory with pages
    that must stay.

    Args:
        ssd: Where they go.
        memory: Where they are.
        page_of: The page of that id, if it is held.
        ended: Told of each page that was given to the tier, and whether it is on SSD now.
    """

    def __init__(
        self,
        ssd: SsdTier,
        memory: MemoryTier,
        page_of: Callable[[bytes], PoolPage | None],
        ended: Callable[[PoolPage, PageIdentity | None, bool], None],
    ) -> None:
        self._ssd = ssd
        self._memory = memory
        self._page_of = page_of
        self._ended = ended
        self._waiting: dict[bytes, None] = {}
        self._is_giving = False

    def add(self, page: PoolPage) -> None:
        """A page is READY."""
        self._waiting[page.page_id] = None
        if len(self._waiting) > 2 * len(self._memory.rows) + _MOST_OUTDATED:
            self._waiting = dict.fromkeys(each for each in self._waiting if self._wants(self._page_of(each)))
        self._give()

    def _give(self) -> None:
        # The tier may say at once how a page ended.
        if self._is_giving:
            return
        self._is_giving = True
        while self._waiting and self._ssd.takes_more:
            page_id = next(iter(self._waiting))
            del self._waiting[page_id]
            page = self._page_of(page_id)
            if page is None or not self._wants(page):
                continue
            identity = self._memory.identity(page)
            self._memory.set_state(page, PageState.SPILLING)
            entry = SsdEntry(page_id, page.group, identity, tuple(page.checksums), page.tenant)
            self._ssd.write(entry, page.offset, partial(self._was_given, page, identity))
        self._is_giving = False

    def _was_given(self, page: PoolPage, identity: PageIdentity | None, is_written: bool) -> None:
        self._memory.set_state(page, PageState.READY)
        if not is_written and not self._ssd.takes_more:
            self._waiting[page.page_id] = None
        self._ended(page, identity, is_written)
        self._give()

    @staticmethod
    def _wants(page: PoolPage | None) -> bool:
        return page is not None and page.state is PageState.READY and not page.on_ssd
