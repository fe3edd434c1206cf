"""An SSD tier in memory whose reads and writes happen when the test says so; and a record of what was published."""

from collections.abc import Callable, Iterable

from prfaas.core.pool.announced import Medium
from prfaas.core.pool.geometry import PageIdentity, PoolGeometry
from prfaas.serving.pool.ssd_tier import SsdEntry


class SteppedSsd:
    """Stands for `FileTier`. `step` does one of the waiting reads and writes."""

    def __init__(self, geometry: PoolGeometry, view: memoryview) -> None:
        self.geometry = geometry
        self.view = view
        self.pages: dict[bytes, tuple[SsdEntry, bytes]] = {}
        self.waiting: list[Callable[[bool], None]] = []
        self.takes_writes = True
        self.dropped: Callable[[bytes], None] = lambda _: None

    def attach(self, dropped: Callable[[bytes], None]) -> None:
        self.dropped = dropped

    def entries(self) -> Iterable[SsdEntry]:
        return [entry for entry, _ in self.pages.values()]

    def figures(self) -> dict[str, int | float | str]:
        return {"held_pages": len(self.pages), "queued_bytes": 0}

    def entry(self, page_id: bytes) -> SsdEntry | None:
        found = self.pages.get(page_id)
        return None if found is None else found[0]

    def write(self, entry: SsdEntry, offset: int, done: Callable[[bool], None]) -> None:
        if not self.takes_writes:
            done(False)
            return
        size = self.geometry.page_bytes(entry.group)

        def finish(succeeds: bool) -> None:
            if succeeds:
                self.pages[entry.page_id] = (entry, bytes(self.view[offset : offset + size]))
            done(succeeds)

        self.waiting.append(finish)

    def read(self, page_id: bytes, into_offset: int, done: Callable[[bool], None]) -> None:
        def finish(succeeds: bool) -> None:
            found = self.pages.get(page_id)
            if found is None:
                done(False)
                return
            content = found[1] if succeeds else b"\xff" * len(found[1])
            self.view[into_offset : into_offset + len(content)] = content
            if not succeeds:
                del self.pages[page_id]
                self.dropped(page_id)
            done(succeeds)

        self.waiting.append(finish)

    @property
    def takes_more(self) -> bool:
        return len(self.waiting) < 3

    def touched(self, page_id: bytes) -> None:
        assert page_id in self.pages

    def forget(self, page_id: bytes) -> None:
        del self.pages[page_id]

    def clear(self) -> None:
        self.pages.clear()

    def verify(self, done: Callable[[int, int], None]) -> None:
        done(len(self.pages), 0)

    def close(self) -> None:
        self.waiting.clear()

    def step(self, choice: int = 0, *, succeeds: bool = True) -> bool:
        """Do the waiting work of that number. Returns whether there was any."""
        if not self.waiting:
            return False
        self.waiting.pop(choice % len(self.waiting))(succeeds)
        return True


class RecordedEvents:
    """Stands for `PoolEventPublisher`: what somebody who listens believes."""

    def __init__(self) -> None:
        self.held: set[tuple[bytes, Medium]] = set()
        self.identities: dict[bytes, PageIdentity | None] = {}
        self.epochs: list[int] = []

    def opened(self, geometry: PoolGeometry, epoch: int) -> None:
        self.held.clear()
        self.epochs.append(epoch)

    def stored(self, page_id: bytes, identity: PageIdentity | None, medium: Medium) -> None:
        assert (page_id, medium) not in self.held
        self.held.add((page_id, medium))
        self.identities[page_id] = identity

    def removed(self, page_id: bytes, medium: Medium) -> None:
        self.held.remove((page_id, medium))
