"""Where every prefix is cached: the index over all instances of all clusters.

What one instance holds of one prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.core.prefix.block_tree import BlockTree
from prfaas.core.prefix.events import Cleared, Event, StoredBlocks
from prfaas.core.prefix.hashing import Hashers, PromptChains, TokenIds
from prfaas.core.prefix.instance_blocks import Holdings
from prfaas.core.prefix.state_blocks import Reach, StateEnds


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What one instance holds of one prompt, in tokens.

    `reusable_tokens`: a prefill there starts after them: the full-attention blocks cover them, and linear state
    and sliding windows are held for exactly that length. `attention_tokens`, never fewer: the full-attention
    blocks alone, which need not be sent there again even where the states must be.
    """

    reusable_tokens: int
    attention_tokens: int


NOTHING = PrefixHit(0, 0)


DEFAULT_CAPACITY_BLOCKS = 1 << 24
_NAMES_KEPT = 1 << 12


@dataclass(frozen=True, slots=True)
class IndexStats:
    """`blocks`: held blocks, window blocks and states, summed over instances. `different_blocks`: of full attention.

    `unlinked`, `refused`: blocks that were stored but not indexed, since their parent was unknown or their tokens
    don't identify them, and since the index was full; both count over the life of the instances' registration.
    """

    instances: int
    blocks: int
    different_blocks: int
    block_sizes: tuple[int, ...]
    unlinked: int
    refused: int


class GlobalIndex:
    """Which instance holds how much of a prompt, learned from the engines' KV cache events (section 3.2).

    Usable length of an instance: the last block boundary up to which it holds the full-attention blocks, at
    which it holds the state of every linear group, and before which it holds the window of every sliding-window
    group. Groups are learned from the events.

    Bounded: at `capacity_blocks` blocks in all, new ones are refused until engines evict or are dropped (and so
    are blocks after them, whose parent is then unknown). An index is as large as the engines' caches, unless
    something is wrong: the bound keeps that from taking the gateway's memory, and what is forgotten is never
    claimed. About 100 bytes a block, and more while many come and go; 200 more per block of a sliding window.

    Not thread-safe, but for `chains`. Losing or doubling a batch makes it claim too much: see `SequenceGuard`.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        capacity_blocks: int = DEFAULT_CAPACITY_BLOCKS,
        needs_states: bool = False,
        needs_windows: bool = False,
    ) -> None:
        """`seed`: of the deployment's block hashes, any unsigned 64-bit integer.

        `needs_states`, `needs_windows`: the model has linear states, or sliding windows. Then nothing counts as
        reusable at an instance before the first of them was seen there.
        """
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks is {capacity_blocks}: it must be at least 1")
        self.capacity_blocks = capacity_blocks
        self._needs_states = needs_states
        self._needs_windows = needs_windows
        self._hashers = Hashers(seed)
        self._tree = BlockTree()
        self._states = StateEnds()
        self._holdings: dict[str, Holdings] = {}
        self._blocks = 0
        self._block_sizes: tuple[int, ...] = ()
        # Bits of instances that need nothing but attention blocks, states besides, or windows too.
        self._plain_bits = self._stateful_bits = self._windowed_bits = 0
        self._names: dict[int, tuple[str, ...]] = {}

    def chains(self, token_ids: TokenIds, salt: str = "", adapter: str = "") -> PromptChains:
        """What to `match` a prompt by. `salt`: its tenant's; `adapter`: its LoRA adapter's name. From any thread.

        Raises OverflowError or TypeError for an id that is not an unsigned 32-bit integer.
        """
        return self._hashers.chains(token_ids, salt, adapter, self._block_sizes)

    def apply(self, instance: str, events: Sequence[Event]) -> None:
        """Apply one batch of `instance`, which is registered if it is new."""
        holdings = self._holdings.get(instance) or self._register(instance)
        others = self._blocks - holdings.count
        for event in events:
            if isinstance(event, StoredBlocks):
                holdings.stored(event, self.capacity_blocks - others)
            elif isinstance(event, Cleared):
                holdings.clear()
            else:
                holdings.removed(event)
        holdings.end_batch()
        self._blocks = others + holdings.count
        if holdings.has_learned:
            holdings.has_learned = False
            self._learn()

    def drop(self, instance: str) -> None:
        """Forget `instance` altogether: it failed, was restarted, or its events were lost."""
        holdings = self._holdings.pop(instance, None)
        if holdings is not None:
            self._blocks -= holdings.count
            holdings.close()
            self._learn()

    def match(self, chains: PromptChains) -> dict[str, PrefixHit]:
        """Instance → what it holds of the prompt; only instances that hold something."""
        held: dict[str, PrefixHit] = {}
        for block_tokens, chain in chains.by_block_tokens.items():
            lengths = self._tree.lengths(chain) if chain else []
            if not lengths:
                continue
            for reach in self._reaches(chain, lengths):
                value = PrefixHit(reach.reusable_blocks * block_tokens, reach.attention_blocks * block_tokens)
                held.update(dict.fromkeys(self._names_of(reach.holders), value))
        return held

    def blocks(self, instance: str) -> int:
        """Blocks and states indexed of `instance`."""
        holdings = self._holdings.get(instance)
        return holdings.count if holdings is not None else 0

    def stats(self) -> IndexStats:
        """Sizes and counts."""
        return IndexStats(
            instances=len(self._holdings),
            blocks=self._blocks,
            different_blocks=len(self._tree),
            block_sizes=self._block_sizes,
            unlinked=sum(each.unlinked for each in self._holdings.values()),
            refused=sum(each.refused for each in self._holdings.values()),
        )

    def _register(self, instance: str) -> Holdings:
        holdings = self._holdings[instance] = Holdings(self._tree, self._states, self._hashers)
        self._learn()
        return holdings

    def _learn(self) -> None:
        """Something has changed in who there is, what block sizes and what groups they have."""
        every = list(self._holdings.values())
        self._names = {}
        self._block_sizes = tuple(sorted({each.block_tokens for each in every if each.block_tokens}))
        self._windowed_bits = sum(each.bit for each in every if each.windows or self._needs_windows)
        self._stateful_bits = sum(each.bit for each in every if each.linear or self._needs_states)
        self._stateful_bits &= ~self._windowed_bits
        self._plain_bits = sum(each.bit for each in every) & ~self._windowed_bits & ~self._stateful_bits

    def _reaches(self, chain: Sequence[int], lengths: Sequence[tuple[int, int]]) -> list[Reach]:
        reaches = [Reach(plain, end, end) for bits, end in lengths if (plain := bits & self._plain_bits)]
        if self._stateful_bits:
            stateful = [(some, end) for bits, end in lengths if (some := bits & self._stateful_bits)]
            if stateful:
                reaches += self._states.reaches(chain, stateful)
        if self._windowed_bits:
            for bits, end in lengths:
                for name in self._names_of(bits & self._windowed_bits):
                    reaches.append(self._windowed_reach(self._holdings[name], chain, end))
        return reaches

    def _windowed_reach(self, holdings: Holdings, chain: Sequence[int], end: int) -> Reach:
        if self._needs_windows and not holdings.windows:
            return Reach(holdings.bit, end, 0)
        needs_states = self._needs_states or bool(holdings.linear)
        return Reach(holdings.bit, end, holdings.reusable_blocks(chain, end, needs_states=needs_states))

    def _names_of(self, bits: int) -> tuple[str, ...]:
        names = self._names.get(bits)
        if names is None:
            if len(self._names) >= _NAMES_KEPT:
                self._names = {}
            names = tuple(name for name, each in self._holdings.items() if each.bit & bits)
            self._names[bits] = names
        return names
