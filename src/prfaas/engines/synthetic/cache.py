"""The prefix cache of one stand-in: what it can reuse, and the events that tell the world."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct

from xxhash import xxh3_64_intdigest

from prfaas.engines.synthetic.chain import TokenChain
from prfaas.engines.synthetic.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from prfaas.engines.synthetic.layout import GroupKind, KvGroup, SyntheticLayout
from prfaas.engines.synthetic.pool import Deviations, Lease, Page, PagePool

_MEDIUM = "GPU"
_PLACE = Struct("<QQQ")


@dataclass(slots=True)
class Context:
    """The KV of one request: its tokens, and where it differs from what they give.

    `salt` and `adapter` keep tenants and LoRA adapters apart. `taint` is 0 as long as every page is sound; any
    other value changes everything that is computed from here on, the answer's tokens among it.
    """

    chain: TokenChain
    salt: str = ""
    adapter: str = ""
    taint: int = 0
    deviations: dict[tuple[int, int], Deviations] = field(default_factory=dict)

    def use(self, group: KvGroup, block: int, deviations: Deviations) -> None:
        """A page that was held or loaded becomes part of the context."""
        if any(deviations):
            self.deviations[group.index, block] = deviations
            for layer, deviation in zip(group.layers, deviations, strict=True):
                self.taint ^= xxh3_64_intdigest(_PLACE.pack(block, layer, deviation))

    def compute(self, groups: Sequence[KvGroup], start_tokens: int, end_tokens: int) -> None:
        """Tokens [start_tokens, end_tokens) are computed on top of the context: as unsound as that is."""
        if not self.taint:
            return
        for group in groups:
            deviations = (self.taint,) * len(group.layers)
            for block in range(start_tokens // group.block_tokens, group.end_block(end_tokens)):
                self.deviations[group.index, block] = deviations

    def deviations_of(self, group: KvGroup, block: int) -> Deviations:
        """What a page of the context differs by."""
        return self.deviations.get((group.index, block), ())


@dataclass(frozen=True, slots=True)
class Hit:
    """Whole blocks that are held: of full attention alone, and with everything needed to go on from there."""

    attention_blocks: int
    usable_blocks: int


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
        """`hash_seed`: of this engine's hashes, which mean nothing to any other."""
        self.layout = layout
        self.pool = PagePool(capacity)
        self._hash_seed = hash_seed
        self._publish = publish

    def hit(self, context: Context, limit_tokens: int) -> Hit:
        """What is held of the context's first `limit_tokens` tokens."""
        keys = self._keys(context)[: limit_tokens // self.layout.block_tokens]
        full = self.layout.full.index
        attention = next((i for i, key in enumerate(keys) if not self.pool.holds(full, key)), len(keys))
        usable = attention
        while usable and not all(self._reaches(group, keys, usable) for group in self.layout.others):
            usable -= 1
        return Hit(attention, usable)

    def reuse(self, context: Context, lease: Lease, hit_blocks: int, *, attention_only: bool) -> None:
        """Pin what a hit found and make it part of the context."""
        keys = self._keys(context)
        groups = [self.layout.full] if attention_only else self.layout.groups
        for group in groups:
            for block in self._needed(group, hit_blocks):
                page = self.pool.find(group.index, keys[block])
                # The other groups' pages are read once; only full attention is looked at until the end.
                if group.kind is GroupKind.FULL:
                    lease.pin(page)
                context.use(group, block, page.deviations)

    def store(
        self, context: Context, lease: Lease, start_tokens: int, end_tokens: int, *, states: bool
    ) -> None:
        """Blocks [start_tokens, end_tokens) (a first block begun before counts) can be reused from now on.

        `states`: computed here, so linear state and windows of the last boundary are there too; a load brings
        them only for the exact length that it has.
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
        self._publish([AllBlocksCleared()])

    def engine_hash(self, key: int) -> int:
        """The hash by which this engine's events name a block."""
        return xxh3_64_intdigest(key.to_bytes(8, "little"), self._hash_seed)

    def held(self) -> dict[int, dict[int, int]]:
        """Group → engine hash → copies: what a faithful reader of the events must have."""
        found: dict[int, dict[int, int]] = {group.index: {} for group in self.layout.groups}
        for (group, key), copies in self.pool.copies().items():
            found[group][self.engine_hash(key)] = copies
        return found

    def _keys(self, context: Context) -> list[int]:
        # The KV of a prefix is the same for all tenants; what they may find is not.
        if not context.salt:
            return list(context.chain.blocks)
        own = xxh3_64_intdigest(context.salt.encode())
        return [digest ^ own for digest in context.chain.blocks]

    def _needed(self, group: KvGroup, boundary: int) -> range:
        """Blocks of a group that are needed to go on from block boundary `boundary`."""
        match group.kind:
            case GroupKind.FULL:
                return range(boundary)
            case GroupKind.WINDOW:
                return range(max(0, boundary - group.window_blocks), boundary)
            case GroupKind.STATE:
                return range(max(0, boundary - 1), boundary)

    def _reaches(self, group: KvGroup, keys: Sequence[int], boundary: int) -> bool:
        return all(self.pool.holds(group.index, keys[block]) for block in self._needed(group, boundary))

    def _keep(
        self, context: Context, group: KvGroup, keys: Sequence[int], first: int, end: int
    ) -> BlockStored:
        deposit = self.pool.deposit
        kept = [
            block
            for block in self._needed(group, end)
            # Window blocks before this step are kept already, or were not kept then and are gone.
            if block >= first and deposit(group.index, keys[block], context.deviations_of(group, block))
        ]
        return self._stored(context, group, keys, first, end, kept)

    def _stored(
        self,
        context: Context,
        group: KvGroup,
        keys: Sequence[int],
        first: int,
        end: int,
        blocks: Sequence[int],
    ) -> BlockStored:
        tokens = self.layout.block_tokens
        return BlockStored(
            block_hashes=[self.engine_hash(keys[block]) for block in blocks],
            parent_block_hash=self.engine_hash(keys[first - 1]) if first else None,
            token_ids=context.chain.ids[first * tokens : end * tokens].tolist(),
            block_size=tokens,
            lora_id=1 if context.adapter else None,
            medium=_MEDIUM,
            lora_name=context.adapter or None,
            extra_keys=[_extra_keys(context, block) for block in blocks] or None,
            group_idx=group.index,
            kv_cache_spec_kind=group.kind.value,
            kv_cache_spec_sliding_window=group.window_tokens or None,
        )

    def _publish_with_evictions(self, stored: list[Event]) -> None:
        events = [self._removed(page) for page in self.pool.take_evicted()] + stored
        if events:
            self._publish(events)

    def _removed(self, page: Page) -> Event:
        return BlockRemoved([self.engine_hash(page.key)], _MEDIUM, page.group)


def _extra_keys(context: Context, block: int) -> tuple[str, ...] | None:
    keys = [context.adapter] if context.adapter else []
    if context.salt and block == 0:
        keys.append(context.salt)
    return tuple(keys) or None
