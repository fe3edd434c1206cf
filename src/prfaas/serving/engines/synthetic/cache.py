"""The prefix cache of one stand-in: its pages, what it can reuse of them, and its events.

Pages are the blocks of all groups: each is pinned by the running requests that need it, or idle and evicted when
another needs its room.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from struct import Struct

from xxhash import xxh3_64_intdigest

from prfaas.core.kv.groups import GroupKind
from prfaas.core.pool.depth import PrefixDepth, usable_end
from prfaas.core.prefix.events import EVENT_KINDS, Cleared, Event, RemovedBlocks, StoredBlocks
from prfaas.serving.engines.synthetic.content import TokenChain
from prfaas.serving.engines.synthetic.layout import SyntheticGroup, SyntheticLayout


class RoomError(ValueError):
    """A request can never fit into the cache."""


Deviations = tuple[int, ...]
"""Per layer, by how much (XOR) a page's digest differs from what its tokens give; empty for a sound page."""


@dataclass(slots=True, eq=False)
class Page:
    """One copy of one block."""

    group: int
    key: int
    """Digest of the prefix that the block ends."""
    deviations: Deviations
    holders: int = 0
    """Running requests that need it."""
    cached: bool = True
    """Lookups may find it."""


class PagePool:
    """`capacity` pages for all groups together, as vLLM shares them.

    At all times reserved + pinned <= capacity, and pinned + idle <= capacity. Idle pages are evicted oldest first.
    Equal blocks are not merged: a block computed twice is two pages.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.copies: defaultdict[int, dict[int, list[Page]]] = defaultdict(dict)
        """By group: key → copies of every block that can be found."""
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

    def find(self, group: int, key: int) -> Page:
        """A copy of a block that is held."""
        return self.copies[group][key][0]

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
        """Pages evicted since the last call, in order."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def clear(self) -> None:
        """Forget every block; running requests keep their pages, but no lookup finds them any more."""
        for blocks in self.copies.values():
            for page in chain(*blocks.values()):
                page.cached = False
        self.copies.clear()
        self._idle.clear()
        self._evicted.clear()
        self._freed.set()

    def _store(self, group: int, key: int, deviations: Deviations) -> Page:
        if self._pinned + len(self._idle) >= self.capacity:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self._evicted.append(page)
        page = Page(group, key, deviations)
        self.copies[group].setdefault(key, []).append(page)
        return page

    def _forget(self, page: Page) -> None:
        copies = self.copies[page.group][page.key]
        copies.remove(page)
        if not copies:
            del self.copies[page.group][page.key]

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


_MEDIUM = "GPU"
_PLACE = Struct("<QQQ")


@dataclass(slots=True)
class Context:
    """The KV of one request: its tokens, and where it differs from what they give."""

    chain: TokenChain
    salt: str = ""
    """Keeps tenants apart."""
    adapter: str = ""
    """Keeps LoRA adapters apart."""
    taint: int = 0
    """0 while every page is sound; any other value changes all that is computed later, also the answer's tokens."""
    deviations: dict[tuple[int, int], Deviations] = field(default_factory=dict)
    """Of unsound pages, by group and block."""

    def use(self, group: SyntheticGroup, block: int, deviations: Deviations) -> None:
        """A page that was held or loaded becomes part of the context."""
        if any(deviations):
            self.deviations[group.index, block] = deviations
            for layer, deviation in zip(group.layers, deviations, strict=True):
                self.taint ^= xxh3_64_intdigest(_PLACE.pack(block, layer, deviation))

    def compute(self, groups: Sequence[SyntheticGroup], start_tokens: int, end_tokens: int) -> None:
        """Tokens [start_tokens, end_tokens) are computed on top of the context: as unsound as that is."""
        if not self.taint:
            return
        for group in groups:
            deviations = (self.taint,) * len(group.layers)
            for block in range(start_tokens // group.block_tokens, group.end_block(end_tokens)):
                self.deviations[group.index, block] = deviations

    def deviations_of(self, group: SyntheticGroup, block: int) -> Deviations:
        """Deviations of a page of the context."""
        return self.deviations.get((group.index, block), ())


class PrefixCache:
    """Lookups, storing and eviction over a page pool; every change is published as vLLM would.

    Linear state is kept at the ends of prefill chunks and where decode crosses a block boundary, window blocks
    likewise (those that the boundary needs).
    """

    def __init__(
        self,
        layout: SyntheticLayout,
        capacity: int,
        hash_seed: int,
        publish: Callable[[Sequence[Event]], None],
    ) -> None:
        """An empty cache.

        Args:
            layout: the engine's groups.
            capacity: pages of all groups together.
            hash_seed: of this engine's block hashes, which mean nothing to any other engine.
            publish: sends one batch of events.
        """
        self.layout = layout
        self.pool = PagePool(capacity)
        self._hash_seed = hash_seed
        self._publish = publish

    def hit(self, context: Context, limit_tokens: int) -> PrefixDepth:
        """Find how much of the context's first `limit_tokens` tokens is held."""
        layout = self.layout
        return usable_end(
            layout.groups, self._keys(context), layout.block_tokens, self.pool.copies, 0, limit_tokens
        )

    def reuse(self, context: Context, lease: Lease, hit_tokens: int, *, attention_only: bool) -> None:
        """Pin what a hit found and make it part of the context."""
        keys = self._keys(context)
        groups = [self.layout.full] if attention_only else self.layout.groups
        for group in groups if hit_tokens else ():
            for block in group.moving_blocks(hit_tokens, 0):
                page = self.pool.find(group.index, keys[block])
                # The other groups' pages are read once; only full attention is looked at until the end.
                if group.kind is GroupKind.FULL:
                    lease.pin(page)
                context.use(group, block, page.deviations)

    def store(
        self, context: Context, lease: Lease, start_tokens: int, end_tokens: int, *, states: bool
    ) -> None:
        """The whole blocks that end within [start_tokens, end_tokens] can be reused from now on.

        Args:
            context: whose KV they are.
            lease: the request's part of the pool.
            start_tokens: tokens whose blocks are stored already.
            end_tokens: tokens that have been computed or loaded.
            states: they were computed here, so linear state and windows of the last boundary are there too; a
                load brings those only for the exact length that it has.
        """
        block_tokens = self.layout.block_tokens
        first, end = start_tokens // block_tokens, end_tokens // block_tokens
        events: list[Event] = []
        if end > first:
            keys = self._keys(context)
            # vLLM sends the other groups first: a reader that applies events in order meets unknown hashes.
            others = self.layout.others if states else ()
            events.extend(self._keep(context, group, keys, first, end) for group in others)
            full = self.layout.full
            for block in range(first, end):
                lease.store(full.index, keys[block], context.deviations_of(full, block))
            events.append(self._stored(context, full, keys, first, end, range(first, end)))
        self._publish_with_evictions(events)

    def clear(self) -> None:
        """Forget everything."""
        self.pool.clear()
        self._publish([Cleared()])

    def engine_hash(self, key: int) -> int:
        """The hash by which this engine's events name a block."""
        return xxh3_64_intdigest(key.to_bytes(8, "little"), self._hash_seed)

    def held(self) -> dict[int, dict[int, int]]:
        """Group → engine hash → copies: what a faithful reader of the events must have."""
        return {
            group.index: {
                self.engine_hash(key): len(each) for key, each in self.pool.copies[group.index].items()
            }
            for group in self.layout.groups
        }

    def _keys(self, context: Context) -> list[int]:
        # The KV of a prefix is the same for all tenants; what they may find is not.
        if not context.salt:
            return list(context.chain.blocks)
        own = xxh3_64_intdigest(context.salt.encode())
        return [digest ^ own for digest in context.chain.blocks]

    def _keep(
        self, context: Context, group: SyntheticGroup, keys: Sequence[int], first: int, end: int
    ) -> StoredBlocks:
        deposit = self.pool.deposit
        kept = [
            block
            for block in group.moving_blocks(end * group.block_tokens, 0)
            # Window blocks before this step are kept already, or were not kept then and are gone.
            if block >= first and deposit(group.index, keys[block], context.deviations_of(group, block))
        ]
        return self._stored(context, group, keys, first, end, kept)

    def _stored(
        self,
        context: Context,
        group: SyntheticGroup,
        keys: Sequence[int],
        first: int,
        end: int,
        blocks: Sequence[int],
    ) -> StoredBlocks:
        tokens = self.layout.block_tokens
        return StoredBlocks(
            hashes=[self.engine_hash(keys[block]) for block in blocks],
            parent=self.engine_hash(keys[first - 1]) if first else None,
            token_ids=context.chain.ids[first * tokens : end * tokens].tolist(),
            block_tokens=tokens,
            medium=_MEDIUM,
            adapter=context.adapter or None,
            extra_keys=[_extra_keys(context, block) for block in blocks] or None,
            group=group.index,
            kind=EVENT_KINDS[group.kind],
            window_tokens=group.window_tokens or None,
        )

    def _publish_with_evictions(self, stored: list[Event]) -> None:
        events = [self._removed(page) for page in self.pool.take_evicted()] + stored
        if events:
            self._publish(events)

    def _removed(self, page: Page) -> Event:
        return RemovedBlocks([self.engine_hash(page.key)], page.group, _MEDIUM)


def _extra_keys(context: Context, block: int) -> list[str] | None:
    keys = [context.adapter] if context.adapter else []
    if context.salt and block == 0:
        keys.append(context.salt)
    return keys or None
