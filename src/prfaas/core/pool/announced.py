"""Events of a pool's pages: as vLLM's KV cache events, in an order that an index can follow."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prfaas.core.pool.geometry import PageIdentity, PoolGeometry
from prfaas.core.pool.keys import KEY_BYTES
from prfaas.core.prefix.events import EVENT_KINDS, Cleared, Event, RemovedBlocks, StoredBlocks

Medium = Literal["memory", "ssd"]

_HASH_BYTES = 8
_ABSENT, _SSD, _MEMORY = 0, 1, 2
_MEDIA: dict[int, Medium] = {_SSD: "ssd", _MEMORY: "memory"}
_TIERS = {medium: tier for tier, medium in _MEDIA.items()}


@dataclass(slots=True)
class _Page:
    identity: PageIdentity | None
    tiers: int = 0
    """Sum of the tiers that hold it."""
    announced: int = _ABSENT
    """The tier that the latest event has it in."""

    @property
    def fastest(self) -> int:
        return _MEMORY if self.tiers & _MEMORY else self.tiers


class _Change(NamedTuple):
    page_id: bytes
    tier: int
    is_stored: bool
    identity: PageIdentity | None
    """Of a page that is stored where it was not before."""


class AnnouncedPages:
    """Turns what becomes of single pages into events, for an index that follows a pool twice: all tiers, and memory.

    An index passes over a block whose parent it does not know, and a state without the attention block that ends there.
    So a page is announced when the one before it has been: the parent's page for a page of the lead group, the lead
    page of the same key for others. Until then it waits.
    Every page is announced in one tier at a time, the fastest that holds it. It counts as in memory only when the
    page before it was announced there, since what is read from SSD first makes the rest wait.
    """

    def __init__(self, geometry: PoolGeometry) -> None:
        """Begin with nothing held."""
        self._geometry = geometry
        self._lead = geometry.lead
        self._groups = {group.index: group for group in geometry.groups}
        # Others end where no lead page ends.
        self._indexed = {
            group.index for group in geometry.groups if group.block_tokens % self._lead.block_tokens == 0
        }
        self._pages: dict[bytes, _Page] = {}
        self._waiting: dict[bytes, dict[bytes, None]] = {}
        self._changes: list[_Change] = []

    def stored(self, page_id: bytes, identity: PageIdentity | None, medium: Medium) -> None:
        """A tier holds the page now."""
        page = self._pages.get(page_id)
        if page is None:
            group = page_id[-1]
            if group not in self._indexed or (group == self._lead.index and identity is None):
                return
            page = self._pages[page_id] = _Page(identity)
        page.tiers |= _TIERS[medium]
        self._settle(page_id, page)

    def removed(self, page_id: bytes, medium: Medium) -> None:
        """A tier no longer holds the page."""
        page = self._pages.get(page_id)
        if page is None:
            return
        page.tiers &= ~_TIERS[medium]
        self._settle(page_id, page)
        if not page.tiers:
            del self._pages[page_id]
            self._stop_waiting(page_id, page)

    def beginning(self) -> list[Event]:
        """The event before all others: nothing is held."""
        return [Cleared(), *self._other_groups()]

    def take_events(self, most_pages: int) -> Iterator[list[Event]]:
        """The events of what has changed since the last call, in portions of so many pages at most."""
        changes, self._changes = self._changes, []
        return self._portions(changes, most_pages)

    def snapshot(self, most_pages: int) -> Iterator[list[Event]]:
        """Everything that is announced now, parents first, in portions of so many pages at most."""
        return self._portions(self._everything(), most_pages)

    def _settle(self, page_id: bytes, page: _Page) -> None:
        """Announce the page where it can be now, and then those that have waited for it."""
        pending = [page_id]
        while pending:
            page_id = pending.pop()
            page = self._pages[page_id]
            before, fastest = page.announced, page.fastest
            if fastest < before:
                self._announce(page_id, page, fastest)
            elif fastest > before:
                reached = min(fastest, self._announced_before(page_id, page))
                if reached > before:
                    self._announce(page_id, page, reached)
                    pending += self._waiting.pop(page_id, ())
                if reached < fastest:
                    self._waiting.setdefault(self._before(page_id, page), {})[page_id] = None

    def _announce(self, page_id: bytes, page: _Page, tier: int) -> None:
        """The page is in this tier now, and no longer in the one that was announced."""
        if tier:
            # Where a page goes down, the one before it may be gone: no parent is named, and the block is known.
            identity = page.identity if tier > page.announced else None
            self._changes.append(_Change(page_id, tier, True, identity))
        if page.announced:
            self._changes.append(_Change(page_id, page.announced, False, None))
        page.announced = tier

    def _before(self, page_id: bytes, page: _Page) -> bytes:
        """The page that must have been announced; empty for a chain's first one."""
        key = page_id[:KEY_BYTES] if page.identity is None else page.identity.parent
        return key + bytes((self._lead.index,)) if key else b""

    def _announced_before(self, page_id: bytes, page: _Page) -> int:
        before = self._before(page_id, page)
        if not before:
            return _MEMORY
        held = self._pages.get(before)
        return _ABSENT if held is None else held.announced

    def _stop_waiting(self, page_id: bytes, page: _Page) -> None:
        before = self._before(page_id, page)
        waiting = self._waiting.get(before)
        if waiting is not None:
            waiting.pop(page_id, None)
            if not waiting:
                del self._waiting[before]

    def _everything(self) -> Iterator[_Change]:
        children: dict[bytes, list[bytes]] = {}
        others: list[bytes] = []
        for page_id, page in self._pages.items():
            if page.announced and page.identity is None:
                others.append(page_id)
            elif page.announced:
                children.setdefault(self._before(page_id, page), []).append(page_id)
        pending = children.get(b"", [])
        while pending:
            page_id = pending.pop()
            page = self._pages[page_id]
            yield _Change(page_id, page.announced, True, page.identity)
            pending += children.get(page_id, ())
        for page_id in others:
            yield _Change(page_id, self._pages[page_id].announced, True, None)

    def _other_groups(self) -> list[Event]:
        """Which groups the model has besides the lead group: no page of theirs, but their kind.

        An index that knew only some of the groups would take a prefix without the others' states for usable.
        """
        return [
            StoredBlocks(
                [],
                block_tokens=group.block_tokens,
                group=group.index,
                kind=EVENT_KINDS[group.kind],
                window_tokens=group.window_tokens or None,
                medium="memory",
            )
            for group in self._geometry.groups
            if group is not self._lead
        ]

    def _portions(self, changes: Iterable[_Change], most_pages: int) -> Iterator[list[Event]]:
        run: list[_Change] = []
        events = self._other_groups()
        pages = 0
        for change in changes:
            if run and (pages >= most_pages or not self._continues(run, change)):
                events.append(self._event(run))
                run = []
            if pages >= most_pages:
                yield events
                events, pages = self._other_groups(), 0
            run.append(change)
            pages += 1
        if run:
            yield [*events, self._event(run)]

    def _continues(self, run: Sequence[_Change], change: _Change) -> bool:
        """True if a change fits into one event with those before it."""
        last = run[-1]
        if (change.tier, change.is_stored, change.page_id[-1]) != (
            last.tier,
            last.is_stored,
            last.page_id[-1],
        ):
            return False
        if change.identity is None or last.identity is None:
            return change.identity is last.identity
        return (
            change.identity.parent == last.page_id[:KEY_BYTES]
            and change.identity.salt == last.identity.salt
            and change.identity.adapter == last.identity.adapter
        )

    def _event(self, run: Sequence[_Change]) -> Event:
        """What happened to pages of one group, as one event."""
        first = run[0]
        group = self._groups[first.page_id[-1]]
        hashes: list[int | bytes] = [block_hash(change.page_id[:KEY_BYTES]) for change in run]
        medium = _MEDIA[first.tier]
        if not first.is_stored:
            return RemovedBlocks(hashes, group=group.index, medium=medium)
        event = StoredBlocks(
            hashes,
            block_tokens=group.block_tokens,
            group=group.index,
            kind=EVENT_KINDS[group.kind],
            window_tokens=group.window_tokens or None,
            medium=medium,
        )
        identity = first.identity
        if identity is not None:
            ids = array("I")
            for change in run:
                assert change.identity is not None  # as `_continues` has seen
                ids.frombytes(change.identity.token_ids)
            event.token_ids = ids.tolist()
            event.parent = block_hash(identity.parent) if identity.parent else None
            event.adapter = identity.adapter or None
            event.extra_keys = _extra_keys(identity, len(run))
        return event


def block_hash(key: bytes) -> int:
    """The name of a page's key in events: its last 8 bytes, as vLLM shortens its own hashes."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


def _extra_keys(identity: PageIdentity, pages: int) -> list[list[str] | None] | None:
    """As vLLM: the adapter for every block, the salt for a chain's first."""
    of_all = [identity.adapter] if identity.adapter else []
    of_first = [*of_all, identity.salt] if identity.salt and not identity.parent else of_all
    if not of_first:
        return None
    return [of_first or None, *([of_all or None] * (pages - 1))]
