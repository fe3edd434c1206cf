"""What the store asks of others: a tier on SSD, and somebody who publishes what the pool holds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from prfaas.core.pool.geometry import PageIdentity, PoolGeometry

Medium: TypeAlias = Literal["memory", "ssd"]
MEDIA: tuple[Medium, ...] = ("memory", "ssd")


@dataclass(frozen=True, slots=True)
class SsdEntry:
    """A page as the SSD tier knows it."""

    page_id: bytes
    group: int
    identity: PageIdentity | None
    checksums: tuple[int, ...]
    """xxh3_64 of each rank's part."""
    tenant: bytes


class PoolEvents(Protocol):
    """Who publishes what the pool holds. Called in the store's loop; it never waits."""

    def opened(self, geometry: PoolGeometry, epoch: int) -> None:
        """The pool is empty and has pages of this kind from now on. Always the first call."""

    def stored(self, page_id: bytes, identity: PageIdentity | None, medium: Medium) -> None:
        """A page is there. Pages that outlived the last daemon are told too; a parent may come after its child."""

    def removed(self, page_id: bytes, medium: Medium) -> None:
        """A page is no longer there."""

    def cleared(self) -> None:
        """Nothing is there any more."""


class SsdTier(Protocol):
    """Pages on SSD. Made for one geometry and arena; `done` and `dropped` are called in the store's loop."""

    def attach(self, dropped: Callable[[bytes], None]) -> None:
        """`dropped` wants to hear of pages that the tier gave up by itself (no room, damage). The first call."""

    def entries(self) -> Iterable[SsdEntry]:
        """Every page that is held, as recovered at the start."""

    def entry(self, page_id: bytes) -> SsdEntry | None:
        """One page that is held."""

    def holds(self, page_id: bytes) -> bool:
        """Whether a page can be read."""

    @property
    def takes_more(self) -> bool:
        """Whether a page could be written now: the queue has room, and the disk does not fail."""

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
        """A page is on SSD only from now on; one that is not held is passed over."""

    def forget(self, page_id: bytes) -> None:
        """The page is no longer wanted. No `dropped` follows."""

    def clear(self) -> int:
        """Forget every page, for good. No `dropped` follows. Returns how many there were."""

    def verify(self, done: Callable[[int, int], None]) -> None:
        """Read every page and compare it with its checksums; wrong ones are dropped.

        `done` is called with the numbers of right and of wrong pages.
        """

    def figures(self) -> dict[str, int | float | str]:
        """What the tier holds and did; the names are for metrics and tools."""

    def close(self) -> None:
        """End the background work; what is queued may be lost."""


SsdFactory: TypeAlias = Callable[[PoolGeometry, memoryview], SsdTier]
"""Makes the tier of a geometry over the arena's bytes; blocking, so the daemon calls it in a thread."""
