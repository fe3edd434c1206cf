"""Where every prefix is cached: the index over all instances of all clusters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.core.prefix.block_tree import BlockTree, Reach, StateEnds
from prfaas.core.prefix.digests import HeldEvent, StoredDigests
from prfaas.core.prefix.events import Cleared
from prfaas.core.prefix.hashing import Hashers, MediaItem, PromptChains, TokenIds
from prfaas.core.prefix.instance_blocks import InstanceBlocks


# Not a frozen dataclass: that takes three times as long to make, and a lookup makes one for every length.
class PrefixHit(NamedTuple):
    """The part of one prompt that one instance holds, in tokens."""

    reusable_tokens: int
    """A prefill there starts after these: full-attention blocks cover them, and linear states and sliding windows are
    held for exactly that length."""
    attention_tokens: int
    """Tokens whose full-attention blocks are held; at least `reusable_tokens`. They need not be sent there again, even
    where the states must be."""


NOTHING = PrefixHit(0, 0)


class PoolHit(NamedTuple):
    """The part of one prompt that the prefix-cache pool of one machine holds."""

    every_tier: PrefixHit
    """In memory or on SSD."""
    in_memory: PrefixHit
    """In memory alone; never longer than `every_tier`."""


DEFAULT_CAPACITY_BLOCKS = 1 << 24
_NAMES_KEPT = 1 << 12


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes and counts of a `GlobalIndex`."""

    instances: int
    blocks: int
    """Held blocks, window blocks and states, summed over instances."""
    different_blocks: int
    """Different full-attention blocks."""
    block_sizes: tuple[int, ...]
    unlinked: int
    """Stored but not indexed, since the parent was unknown or the tokens don't identify them; of all instances that
    are registered now."""
    refused: int
    """Stored but not indexed, since the index was full; of all instances that are registered now."""


class GlobalIndex:
    """Which instance holds how much of a prompt, learned from the engines' KV cache events (section 3.2).

    The usable length of an instance is the last block boundary up to which it holds the full-attention blocks, at
    which it holds the state of every linear group, and before which it holds the window of every sliding-window
    group. Groups are learned from the events.

    Memory is bounded. At `capacity_blocks` blocks in all, new ones are refused until engines evict or are dropped;
    blocks after a refused one are not indexed either, since their parent is unknown. An index is normally as large
    as the engines' caches, so the bound matters only when something is wrong. What is not indexed is never claimed.
    About 100 bytes a block, and more while many come and go; 200 more per block of a sliding window.

    Only `chains` is thread-safe. A lost or doubled batch makes the index claim too much: see `Subscription`.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS,
        needs_states: bool = False,
        needs_windows: bool = False,
    ) -> None:
        """Make an empty index.

        Args:
            seed: of the deployment's block hashes, any unsigned 64-bit integer.
            capacity_blocks: most blocks in all, at least 1.
            needs_states: the model has linear states: nothing is reusable at an instance before one was seen there.
            needs_windows: the same for sliding windows.
        """
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks is {capacity_blocks}: it must be at least 1")
        self.capacity_blocks = capacity_blocks
        self._needs_states = needs_states
        self._needs_windows = needs_windows
        self._hashers = Hashers(seed)
        self._tree = BlockTree()
        self._states = StateEnds()
        self._instances: dict[str, InstanceBlocks] = {}
        self._engine_blocks: dict[str, int] = {}
        self._dropping: set[str] = set()
        self._blocks = 0
        self._block_sizes: tuple[int, ...] = ()
        self._lookahead_forms: tuple[tuple[int, int], ...] = ()
        # Bits of instances that need nothing but attention blocks, states besides, or windows too.
        self._plain_bits = self._stateful_bits = self._windowed_bits = self._dropping_bits = 0
        self._names: dict[int, tuple[str, ...]] = {}

    def chains(
        self, token_ids: TokenIds, salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()
    ) -> PromptChains:
        """The hash chains that `match` takes for a prompt. May be called in any thread.

        Args:
            token_ids: the whole prompt.
            salt: of its tenant.
            adapter: name of its LoRA adapter.
            media: in it, in the order of their offsets.

        Raises:
            OverflowError, TypeError: an id is not an unsigned 32-bit integer.
        """
        return self._hashers.chains(
            token_ids, salt, adapter, self._block_sizes, self._lookahead_forms, media=media
        )

    def apply(self, instance: str, events: Sequence[HeldEvent]) -> None:
        """Apply one batch of `instance`, which is registered if it is new."""
        blocks = self._instances.get(instance) or self._register(instance)
        others = self._blocks - blocks.count
        for event in events:
            if isinstance(event, StoredDigests):
                blocks.stored(event, self.capacity_blocks - others)
            elif isinstance(event, Cleared):
                blocks.clear()
            else:
                blocks.removed(event)
        blocks.end_batch()
        self._blocks = others + blocks.count
        if blocks.has_learned:
            blocks.has_learned = False
            self._learn()

    def learn_size(self, instance: str, engine_blocks: int) -> None:
        """How many blocks an engine has, of all KV groups together: it holds nothing twice beyond that."""
        self._engine_blocks[instance] = engine_blocks
        held = self._instances.get(instance)
        if held is not None:
            held.most_engine_blocks = engine_blocks

    def learn_drop(self, instance: str, *, drops_last_block: bool) -> None:
        """Note that an engine computes the last block of a hit anew: its drafter goes on from hidden states."""
        if drops_last_block != (instance in self._dropping):
            self._dropping ^= {instance}
            self._learn()

    def drop(self, instance: str) -> None:
        """Forget `instance` altogether: it failed, was restarted, or its events were lost."""
        held = self._instances.pop(instance, None)
        if held is not None:
            self._blocks -= held.count
            held.close()
            self._learn()

    def match(self, chains: PromptChains) -> dict[str, PrefixHit]:
        """Instance → what it holds of the prompt; only instances that hold something."""
        hits: dict[str, PrefixHit] = {}
        self._match(hits, chains.by_block_tokens.items())
        if self._lookahead_forms:
            forms = chains.with_lookahead.items()
            self._match(hits, [(block_tokens, chain) for (block_tokens, _), chain in forms])
        return hits

    def _match(self, hits: dict[str, PrefixHit], chains: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        for block_tokens, chain in chains:
            lengths = self._tree.lengths(chain) if chain else []
            if self._dropping_bits:
                lengths = self._without_last(lengths)
            if not lengths:
                continue
            if not (self._stateful_bits or self._windowed_bits):
                # Attention alone: what is held is reusable. `_reaches` and `_names_of` in line, for half the time.
                for holders, end in lengths:
                    value = PrefixHit(end * block_tokens, end * block_tokens)
                    for name in self._names.get(holders) or self._names_of(holders):
                        hits[name] = value
                continue
            for reach in self._reaches(chain, lengths):
                value = PrefixHit(reach.reusable_blocks * block_tokens, reach.attention_blocks * block_tokens)
                hits.update(dict.fromkeys(self._names_of(reach.holders), value))

    def blocks(self, instance: str) -> int:
        """Blocks and states indexed of `instance`."""
        held = self._instances.get(instance)
        return held.count if held is not None else 0

    def stats(self) -> IndexStats:
        """Sizes and counts."""
        return IndexStats(
            instances=len(self._instances),
            blocks=self._blocks,
            different_blocks=len(self._tree),
            block_sizes=self._block_sizes,
            unlinked=sum(each.unlinked for each in self._instances.values()),
            refused=sum(each.refused for each in self._instances.values()),
        )

    def _register(self, instance: str) -> InstanceBlocks:
        held = self._instances[instance] = InstanceBlocks(self._tree, self._states)
        held.most_engine_blocks = self._engine_blocks.get(instance)
        self._learn()
        return held

    def learn_needs(self, *, states: bool, windows: bool) -> None:
        """What the model has, where it was not known from the start."""
        self._needs_states, self._needs_windows = states, windows
        self._learn()

    def _learn(self) -> None:
        """Instances have come or gone, or their block sizes or groups have changed."""
        every = list(self._instances.values())
        self._names = {}
        self._block_sizes = tuple(sorted({each.block_tokens for each in every if each.block_tokens}))
        forms = {(each.block_tokens, each.lookahead_tokens) for each in every if each.block_tokens}
        self._lookahead_forms = tuple(sorted((tokens, ahead) for tokens, ahead in forms if ahead))
        self._windowed_bits = sum(each.bit for each in every if each.windows or self._needs_windows)
        self._stateful_bits = sum(each.bit for each in every if each.linear or self._needs_states)
        self._stateful_bits &= ~self._windowed_bits
        self._dropping_bits = sum(
            each.bit for name, each in self._instances.items() if name in self._dropping
        )
        self._plain_bits = sum(each.bit for each in every) & ~self._windowed_bits & ~self._stateful_bits

    def _without_last(self, lengths: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """One block less where the engine drops it, longest first."""
        bits = self._dropping_bits
        parts = [
            part for has, end in lengths for part in ((has & ~bits, end), (has & bits, end - 1)) if all(part)
        ]
        return sorted(parts, key=lambda part: -part[1])

    def _reaches(self, chain: Sequence[int], lengths: Sequence[tuple[int, int]]) -> list[Reach]:
        reaches = [Reach(plain, end, end) for bits, end in lengths if (plain := bits & self._plain_bits)]
        if self._stateful_bits:
            stateful = [(some, end) for bits, end in lengths if (some := bits & self._stateful_bits)]
            if stateful:
                reaches += self._states.reaches(chain, stateful)
        if self._windowed_bits:
            for bits, end in lengths:
                for name in self._names_of(bits & self._windowed_bits):
                    reaches.append(self._windowed_reach(self._instances[name], chain, end))
        return reaches

    def _windowed_reach(self, held: InstanceBlocks, chain: Sequence[int], end: int) -> Reach:
        if self._needs_windows and not held.windows:
            return Reach(held.bit, end, 0)
        needs_states = self._needs_states or bool(held.linear)
        return Reach(held.bit, end, held.reusable_blocks(chain, end, needs_states=needs_states))

    def _names_of(self, bits: int) -> tuple[str, ...]:
        names = self._names.get(bits)
        if names is None:
            if len(self._names) >= _NAMES_KEPT:
                self._names = {}
            names = tuple(name for name, each in self._instances.items() if each.bit & bits)
            self._names[bits] = names
        return names
