"""Interfaces of the store: a tier on SSD, and a publisher of the pool's content."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from prfaas.core.pool.geometry import PageIdentity, PoolGeometry

Medium: TypeAlias = Literal["memory", "ssd"]
MEDIA: tuple[Medium, ...] = ("memory", "ssd")


@dataclass(frozen=True, slots=True)
class SsdEntry:
    """A page in the SSD tier."""

    page_id: bytes
    group: int
    identity: PageIdentity | None
    checksums: tuple[int, ...]
    """xxh3_64 of each rank's share."""
    tenant: bytes


class PoolEvents(Protocol):
    """Publisher of a pool's content. Called in the store's loop; it never waits."""

    def opened(self, geometry: PoolGeometry, epoch: int) -> None:
        """Report an empty pool of this geometry. Always the first call."""

    def stored(self, page_id: bytes, identity: PageIdentity | None, medium: Medium) -> None:
        """Report that a page is there, including those that outlived a daemon; a parent may come after its child."""

    def removed(self, page_id: bytes, medium: Medium) -> None:
        """Report that a page is gone."""

    def cleared(self) -> None:
        """Report that the pool is empty."""


class SsdTier(Protocol):
    """Pages on SSD. Made for one geometry and arena; `done` and `dropped` are called in the store's loop."""

    def attach(self, dropped: Callable[[bytes], None]) -> None:
        """Set the callback for pages that the tier drops by itself (no room, damage). The first call."""

    def entries(self) -> Iterable[SsdEntry]:
        """The pages recovered at the start."""

    def entry(self, page_id: bytes) -> SsdEntry | None:
        """One page that is held."""

    def holds(self, page_id: bytes) -> bool:
        """True if a page can be read."""

    @property
    def takes_more(self) -> bool:
        """True if a page could be written now: the queue has room, and the disk does not fail."""

    def write(
        self,
        entry: SsdEntry,
        offset: int,
        done: Callable[[bool], None],
    ) -> None:
        """Write the page at that offset of the arena in the background; the store keeps it there until `done`.

        `done(False)`: it was not written (no room, an error). It may be called at once.
        """

    def read(self, page_id: bytes, into_offset: int, done: Callable[[bool], None]) -> None:
        """Read a page into the arena and verify it. `done(False)`: the slot's bytes are not the page's."""

    def touched(self, page_id: bytes) -> None:
        """Note the use of a page; one that is not held is ignored."""

    def forget(self, page_id: bytes) -> None:
        """Drop a page. No `dropped` follows."""

    def clear(self) -> int:
        """Drop every page for good. No `dropped` follows. Returns their number."""

    def verify(self, done: Callable[[int, int], None]) -> None:
        """Read every page and compare it with its checksums; wrong ones are dropped.

        `done` is called with the numbers of right and of wrong pages.
        """

    def figures(self) -> dict[str, int | float | str]:
        """Figures of the tier's content and work, for metrics and tools."""

    def close(self) -> None:
        """End the background work; queued pages may be lost."""


SsdFactory: TypeAlias = Callable[[PoolGeometry, memoryview], SsdTier]
"""Makes a tier for a geometry and an arena's bytes. Blocking, so the daemon calls it in a thread."""
