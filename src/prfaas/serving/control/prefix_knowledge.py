"""Which instance holds what of a prompt: by its events, by what is expected, by what was sent there.

What instances will hold in a moment: prompts that were just sent there, until their events tell.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from prfaas.core.deployment import Instance
from prfaas.core.prefix import (
    DEFAULT_BLOCK_TOKENS,
    NOTHING,
    BlockHasher,
    GlobalIndex,
    PrefixHit,
    PrefixRecord,
    PromptChains,
    chain_root,
)
from prfaas.core.prefix.events import EventBatch
from prfaas.core.scheduling import Decision, KvFacts
from prfaas.serving.control.cluster_state import Clock, ClusterState
from prfaas.serving.control.engine_metrics import EngineReading

LIFETIME_S = 5.0
MOST_BLOCKS = 1 << 15


class Expectations:
    """Prefixes by block hash and the instances that will hold them, as one bit mask each.

    Three generations of half a lifetime each: a prefix is believed for `lifetime_s` to one and a half times that, and
    nothing has to be searched for what has expired. When the youngest is full, the oldest goes at once.
    Whole prefixes are put in, so what an instance is expected to hold is closed under prefixes and a lookup is a
    bisection.
    """

    def __init__(self, *, lifetime_s: float = LIFETIME_S, most_blocks: int = MOST_BLOCKS) -> None:
        self._generation_s = lifetime_s / 2
        self._most_blocks = most_blocks
        self._generations: list[dict[int, int]] = [{}, {}, {}]
        self._turned_s = 0.0
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        """Blocks, those expected in two generations counted twice."""
        return sum(map(len, self._generations))

    def add(self, instance: str, chains: PromptChains, now_s: float) -> None:
        """`instance` will hold this prompt."""
        self._turn(now_s)
        bit = self._bits.setdefault(instance, 1 << len(self._bits))
        for hashes in chains.by_block_tokens.values():
            if len(self._generations[0]) + len(hashes) > self._most_blocks:
                self._push()
            youngest = self._generations[0]
            for block in hashes[: self._most_blocks]:
                youngest[block] = youngest.get(block, 0) | bit

    def drop(self, instance: str) -> None:
        """Nothing is expected of `instance` any more."""
        bit = self._bits.get(instance, 0)
        for generation in self._generations:
            for block, mask in generation.items():
                if mask & bit:
                    generation[block] = mask & ~bit

    def match(self, chains: PromptChains, now_s: float) -> dict[str, int]:
        """Instance → tokens of the prompt that it will hold; those with none are left out."""
        self._turn(now_s)
        found: dict[str, int] = {}
        if not len(self):
            return found
        for block_tokens, hashes in chains.by_block_tokens.items():
            end, left = len(hashes), -1
            while end and (end := self._longest(hashes, end, left)):
                here = self._mask(hashes[end - 1]) & left
                left &= ~here
                for instance, bit in self._bits.items():
                    if here & bit:
                        found[instance] = max(found.get(instance, 0), end * block_tokens)
                end -= 1
        return found

    def _longest(self, hashes: Sequence[int], most: int, wanted: int) -> int:
        """The largest n <= `most` such that one of the instances `wanted` will hold n blocks; 0 if none will."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._mask(hashes[middle - 1]) & wanted:
                low = middle
            else:
                high = middle - 1
        return low

    def _mask(self, block: int) -> int:
        mask = 0
        for generation in self._generations:
            mask |= generation.get(block, 0)
        return mask

    def _turn(self, now_s: float) -> None:
        turns = int((now_s - self._turned_s) // self._generation_s)
        if turns:
            self._turned_s += turns * self._generation_s
            for _ in range(min(turns, len(self._generations))):
                self._push()

    def _push(self) -> None:
        self._generations = [{}, *self._generations[:-1]]


logger = logging.getLogger(__name__)

_DEFAULT_CACHE_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """By instance, absent means nothing. `held`: as far as is good for choosing. `proven`: as far as bytes may be
    left out because of it."""

    held: Mapping[str, PrefixHit]
    proven: Mapping[str, PrefixHit]

    def bound(self, decision: Decision, prompt_tokens: int, kv: KvFacts) -> Decision:
        """The decision with no more bytes skipped than is proven to be there where they would be missed."""
        transfer, proven = decision.cache_transfer, self._proven_at(decision.prefill)
        if transfer is not None and transfer.skip_tokens > proven:
            nbytes = kv.prefix_bytes_to_move(transfer.num_tokens, proven)
            transfer = replace(transfer, skip_tokens=proven, kv_bytes=nbytes)
            decision = replace(decision, cache_transfer=transfer)
        proven = self._proven_at(decision.decode)
        if decision.skip_tokens > proven:
            nbytes = kv.bytes_to_move(prompt_tokens, proven)
            decision = replace(decision, skip_tokens=proven, kv_bytes=nbytes)
        return decision

    def _proven_at(self, name: str) -> int:
        return self.proven.get(name, NOTHING).attention_tokens


class PrefixKnowledge:
    """Three sources, of which the longest prefix counts:

    - the index, from the engines' events: exact, and the only one that may be believed for bytes that are not
      sent (`skip_tokens`: a wrong claim costs a whole local prefill);
    - expectations: prompts that were sent in the last seconds and whose events are still to come. Good for choosing
      an instance, where a wrong claim costs some computing;
    - the record, in place of both for instances that publish no events: what was sent there, in the order of use. It
      is all there is, so it is believed for bytes too.

    With a hybrid model an instance that decodes is believed to hold no states of what it was only sent.
    """

    def __init__(
        self,
        index: GlobalIndex,
        board: ClusterState,
        *,
        seed: int,
        is_hybrid: bool,
        with_events: Collection[str],
        clock: Clock,
    ) -> None:
        """`with_events`: the instances whose events are fed in. `seed` is the index's."""
        self.index = index
        self._board = board
        self._seed = seed
        self._is_hybrid = is_hybrid
        self._with_events = frozenset(with_events)
        self._clock = clock
        self._expected = Expectations()
        self._record: PrefixRecord | None = None
        self._hasher: BlockHasher | None = None

    def chains(self, token_ids: Sequence[int], salt: str, adapter: str) -> PromptChains:
        """What a prompt is looked up by. May be called in a thread."""
        chains = self.index.chains(token_ids, salt, adapter)
        hasher = self._hasher
        if hasher is None or hasher.block_tokens in chains.by_block_tokens:
            return chains
        hashes = hasher.hashes(token_ids[:-1], chain_root(self._seed, salt, adapter))
        return replace(chains, by_block_tokens={**chains.by_block_tokens, hasher.block_tokens: hashes})

    def match(self, chains: PromptChains) -> PrefixMatch:
        """What every instance holds of a prompt."""
        proven = self.index.match(chains)
        if self._record is not None:
            hashes = chains.by_block_tokens.get(self._record.block_tokens, ())
            for name in self._record_names():
                recorded = self._record.held(name, hashes)
                if recorded.attention_tokens:
                    proven[name] = self._sent(name, recorded)
        expected = self._expected.match(chains, self._clock())
        if not expected:
            return PrefixMatch(proven, proven)
        held = dict(proven)
        for name, tokens in expected.items():
            held[name] = _longer(held.get(name, NOTHING), self._sent(name, PrefixHit(tokens, tokens)))
        return PrefixMatch(held, proven)

    def expect(self, name: str, chains: PromptChains) -> None:
        """The instance will hold this prompt in a moment."""
        if name in self._with_events:
            self._expected.add(name, chains, self._clock())
        elif self._record is not None:
            self._record.add(name, chains.by_block_tokens.get(self._record.block_tokens, ()))

    def apply(self, name: str, batch: EventBatch) -> None:
        """What one engine step stored and removed."""
        self.index.apply(name, batch.events)

    def drop(self, name: str, reason: str) -> None:
        """Nothing is held there any more, or nothing is known."""
        logger.info("what %s holds is forgotten: %s", name, reason)
        self.index.drop(name)
        self._expected.drop(name)
        if self._record is not None:
            self._record.forget(name)

    def learn(self, instance: Instance, reading: EngineReading) -> None:
        """The block size of the first engine without events that tells it; until then nothing is recorded.

        A claimed prefix that does not end on the engine's block boundary would not be honoured.
        """
        if self._record is not None or instance.name in self._with_events or reading.block_tokens is None:
            return
        block_tokens = reading.block_tokens * -(-DEFAULT_BLOCK_TOKENS // reading.block_tokens)
        # Running requests need room in the cache too.
        cache_tokens = (reading.cache_tokens or _DEFAULT_CACHE_TOKENS) // 2
        self._record = PrefixRecord(
            block_tokens=block_tokens,
            capacity_blocks=max(cache_tokens // block_tokens, 1),
            only_ends=self._is_hybrid,
        )
        self._hasher = BlockHasher(block_tokens=block_tokens, seed=self._seed)

    @property
    def expected_blocks(self) -> int:
        """Blocks that are expected somewhere, and not known to be there yet."""
        return len(self._expected)

    def blocks(self, name: str) -> int:
        """Blocks known or recorded of an instance."""
        if name not in self._with_events and self._record is not None:
            return self._record.blocks(name)
        return self.index.blocks(name)

    def _record_names(self) -> list[str]:
        return [name for name in self._board.names if name not in self._with_events]

    def _sent(self, name: str, held: PrefixHit) -> PrefixHit:
        has_states = not (self._is_hybrid and self._board.instance(name).decodes)
        return held if has_states else PrefixHit(0, held.attention_tokens)


def _longer(known: PrefixHit, other: PrefixHit) -> PrefixHit:
    return PrefixHit(
        max(known.reusable_tokens, other.reusable_tokens), max(known.attention_tokens, other.attention_tokens)
    )
