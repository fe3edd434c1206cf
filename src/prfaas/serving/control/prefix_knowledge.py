"""Prefixes that instances and pools hold of a prompt: by events, and by recent requests."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from msgspec import structs

from prfaas.core.deployment import Instance
from prfaas.core.kv.model import KvModel
from prfaas.core.prefix.digests import HeldEvent, RemovedHashes, StoredDigests
from prfaas.core.prefix.hashing import MediaItem, PromptChains, PromptTokens
from prfaas.core.prefix.index import NOTHING, GlobalIndex, PoolHit, PrefixHit
from prfaas.core.scheduling.decision import Decision, KvFacts, RoutingRequest
from prfaas.core.scheduling.tiers import with_pools
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.engine_reading import EngineReading
from prfaas.serving.control.metrics import ControlMetrics
from prfaas.serving.control.part import Json, Part

LIFETIME_S = 5.0
MOST_BLOCKS = 1 << 15


class PendingPrefixes:
    """Prompts that were just sent to instances, until their events come: block hash → bit mask of the instances.

    There are three generations of half a lifetime each. So a prefix is believed for `lifetime_s` to one and a half
    times that, and expired ones need not be searched for. When the youngest generation is full, the oldest goes at
    once. Whole prefixes are put in: whoever is to hold a block is to hold all before it. So a lookup is a bisection.
    """

    def __init__(self, *, lifetime_s: float = LIFETIME_S, most_blocks: int = MOST_BLOCKS) -> None:
        self._generation_s = lifetime_s / 2
        self._most_blocks = most_blocks
        self._generations: list[dict[int, int]] = [{}, {}, {}]
        self._begun_s = 0.0
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        """Blocks; those in two generations count twice."""
        return sum(map(len, self._generations))

    def add(self, instance: str, chains: PromptChains, now_s: float) -> None:
        """`instance` will hold this prompt."""
        self._expire(now_s)
        taken = sum(self._bits.values())
        bit = self._bits.setdefault(instance, ~taken & (taken + 1))
        for hashes in chains.by_block_tokens.values():
            if len(self._generations[0]) + len(hashes) > self._most_blocks:
                self._begin_generation()
            youngest = self._generations[0]
            for block in hashes[: self._most_blocks]:
                youngest[block] = youngest.get(block, 0) | bit

    def drop(self, instance: str) -> None:
        """Forget what was sent to `instance`."""
        # An engine can have itself forgotten as often as it likes: only the first time costs anything.
        bit = self._bits.pop(instance, 0)
        for generation in self._generations if bit else ():
            for block, mask in generation.items():
                if mask & bit:
                    generation[block] = mask & ~bit

    def match(self, chains: PromptChains, now_s: float) -> dict[str, int]:
        """Instance → tokens of the prompt that it will hold; those with none are left out."""
        self._expire(now_s)
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

    def _expire(self, now_s: float) -> None:
        expired = int((now_s - self._begun_s) // self._generation_s)
        if expired:
            self._begun_s += expired * self._generation_s
            for _ in range(min(expired, len(self._generations))):
                self._begin_generation()

    def _begin_generation(self) -> None:
        self._generations = [{}, *self._generations[:-1]]


logger = logging.getLogger(__name__)

# More modules for multi-token prediction than any model has.
_MOST_OWN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Held prefixes of one prompt by instance and pool; an absent one holds nothing."""

    held: Mapping[str, PrefixHit]
    """What engines' own blocks hold, to choose instances by."""
    proven: Mapping[str, PrefixHit]
    """The same to leave out bytes by: a wrong claim here costs a whole local prefill."""
    pools: Mapping[str, PoolHit] = field(default_factory=dict)
    """What pools hold. Their daemons say so, and their engines load it: it is proven too."""
    pool_of: Mapping[str, str] = field(default_factory=dict)
    """Instance → the pool of its machine."""

    def bound(
        self, decision: Decision, prompt_tokens: int, kv_between: Callable[[str, str], KvFacts]
    ) -> Decision:
        """The decision with no more bytes skipped than is proven to be there where they would be missed.

        Args:
            decision: of a policy.
            prompt_tokens: of the whole prompt.
            kv_between: what moves from one instance to another, by their names.
        """
        transfer, proven = decision.cache_transfer, self._proven_at(decision.prefill)
        if transfer is not None and not transfer.from_pool and transfer.skip_tokens > proven:
            kv = kv_between(transfer.source, decision.prefill)
            nbytes = kv.prefix_bytes_to_move(transfer.num_tokens, proven)
            transfer = structs.replace(transfer, skip_tokens=proven, kv_bytes=nbytes)
            decision = structs.replace(decision, cache_transfer=transfer)
        proven = self._proven_at(decision.decode)
        if decision.skip_tokens > proven:
            nbytes = kv_between(decision.prefill, decision.decode).bytes_to_move(prompt_tokens, proven)
            decision = structs.replace(decision, skip_tokens=proven, kv_bytes=nbytes)
        return decision

    def _proven_at(self, name: str) -> int:
        own = self.proven.get(name, NOTHING).attention_tokens
        pool = self.pools.get(self.pool_of.get(name, ""))
        return own if pool is None else max(own, pool.every_tier.attention_tokens)


class PrefixKnowledge(Part):
    """Finds the held prefixes of a prompt from two sources, of which the longest counts.

    - The index, from the engines' events. It is exact. Bytes are left out because of it (`skip_tokens`), where a wrong
      claim would cost a whole local prefill.
    - Pending prefixes: prompts that were sent in the last seconds and whose events are still to come. Instances are
      chosen by them, where a wrong claim costs some computing.

    With a hybrid model, what was only sent to an instance that decodes left no states there.
    Pools have events alone. Each is in the index under two names: all that it holds, and what it holds in memory.
    """

    def __init__(self, index: GlobalIndex, cluster_state: ClusterState) -> None:
        self.index = index
        self._cluster_state = cluster_state
        self._clock = cluster_state.clock
        self._memory_of = {name: f"{name}/memory" for name in cluster_state.view.pools}
        self._pool_of = self._pools_of_instances()
        self._pending = PendingPrefixes()
        self._own_last_tokens: dict[str, int] = {}

    def join(self, _instance: Instance) -> None:
        """The pools of the view have who joins already."""
        self._pool_of = self._pools_of_instances()

    def leave(self, name: str) -> None:
        """Forget what it holds."""
        self.drop(name, "left")
        self._own_last_tokens.pop(name, None)
        self._pool_of = self._pools_of_instances()

    def chains(
        self, token_ids: Sequence[int], salt: str, adapter: str, media: Sequence[MediaItem] = ()
    ) -> PromptChains:
        """The hash chains by which a prompt is looked up. May be called in a thread."""
        chains = self.index.chains(token_ids, salt, adapter, media)
        # Pools know tokens alone, so nobody names the beginning of a prompt with media to them.
        return chains if media else replace(chains, prompt=PromptTokens(token_ids, salt, adapter))

    def match(self, chains: PromptChains) -> PrefixMatch:
        """Find the prefix of a prompt that every instance and every pool holds."""
        proven = self.index.match(chains)
        pools = self._take_pools(proven)
        expected = self._pending.match(chains, self._clock())
        if not expected:
            return PrefixMatch(proven, proven, pools, self._pool_of)
        held = dict(proven)
        for name, tokens in expected.items():
            held[name] = _longer(held.get(name, NOTHING), self._sent(name, PrefixHit(tokens, tokens)))
        return PrefixMatch(held, proven, pools, self._pool_of)

    def request(
        self, match: PrefixMatch, num_tokens: int, ordinal: int, first_from_prefill: bool = False
    ) -> RoutingRequest:
        """The request that policies see for a prompt of `num_tokens` tokens; `ordinal` counts requests."""
        view = self._cluster_state.view
        return with_pools(
            num_tokens, match.held, match.pools, view, ordinal, first_from_prefill=first_from_prefill
        )

    def request_of_several(self, num_tokens: int, chains: Sequence[PromptChains]) -> RoutingRequest:
        """The request that policies see for several prompts, together `num_tokens` tokens, that one instance prefills.

        What they have in common counts for each, so their work is at most what is predicted.
        """
        each = [self.request(self.match(one), one.num_tokens, 0) for one in chains]
        names = {name for one in each for name in one.held}
        held = {
            name: PrefixHit(
                sum(one.reusable_at(name) for one in each), sum(one.attention_at(name) for one in each)
            )
            for name in names
        }
        loads_s = {name: sum(one.loads_s.get(name, 0.0) for one in each) for name in names}
        return RoutingRequest(num_tokens, held, loads_s=loads_s)

    def reusable_at(self, chains: PromptChains, name: str) -> int:
        """Tokens of a prompt that a prefill at instance `name` need not compute."""
        return self.request(self.match(chains), chains.num_tokens, 0).reusable_at(name)

    def expect(self, name: str, chains: PromptChains) -> None:
        """Note that this prompt is sent to the instance, which will hold it in a moment."""
        self._pending.add(name, chains, self._clock())

    def apply(self, name: str, events: Sequence[HeldEvent]) -> None:
        """Apply what one engine step stored and removed, or what became of a pool's pages."""
        self.index.apply(name, events)
        memory = self._memory_of.get(name)
        if memory is not None:
            self.index.apply(memory, [event for event in events if not _is_of_ssd(event)])

    def drop(self, name: str, reason: str) -> None:
        """Forget what is held there: it is lost, or no longer known."""
        if self.index.blocks(name):
            logger.info("what %s holds is forgotten: %s", name, reason)
        self.index.drop(name)
        if name in self._memory_of:
            self.index.drop(self._memory_of[name])
        self._pending.drop(name)

    def learn_stats(self, name: str, stats: Mapping[str, Any]) -> None:
        """Take what an engine's connector tells of how it reuses prefixes; older ones tell nothing."""
        self.index.learn_drop(name, drops_last_block=stats.get("drops_last_block") is True)
        told = stats.get("own_last_tokens")
        self._own_last_tokens[name] = told if type(told) is int and 0 < told <= _MOST_OWN_TOKENS else 1

    def learn_model(self, kv_model: KvModel) -> None:
        """Take what an engine tells that its layers keep, where the model's file doesn't say it."""
        self.index.learn_needs(states=kv_model.has_linear_state, windows=kv_model.has_window)

    def own_last_tokens(self, name: str) -> int:
        """The last tokens of a prompt that an engine computes itself, whatever is moved to it."""
        return self._own_last_tokens.get(name, 1)

    def learn(self, instance: Instance, reading: EngineReading) -> None:
        """Take the size of an engine's cache."""
        if reading.cache_blocks is not None:
            self.index.learn_size(instance.name, reading.cache_blocks)

    def state(self, _now_s: float) -> Json:
        """The size of the index."""
        return {"index": asdict(self.index.stats()) | {"expected_blocks": len(self._pending)}}

    def state_of(self, name: str, _now_s: float) -> Json:
        """The blocks that are known of an instance or a pool."""
        blocks = {"blocks": self.blocks(name)}
        return blocks | {"memory_blocks": self.memory_blocks(name)} if name in self._memory_of else blocks

    def write_gauges(self, metrics: ControlMetrics, _now_s: float) -> None:
        """Write the gauges of blocks."""
        metrics.index_blocks.set(self.index.stats().blocks)
        for name in self._cluster_state.names:
            metrics.instance_blocks.labels(name).set(self.blocks(name))
        for pool in self._memory_of:
            metrics.pool_blocks.labels(pool, "memory").set(self.memory_blocks(pool))
            metrics.pool_blocks.labels(pool, "all").set(self.blocks(pool))

    def memory_blocks(self, pool: str) -> int:
        """Blocks known of a pool that lie in memory."""
        return self.index.blocks(self._memory_of[pool])

    def blocks(self, name: str) -> int:
        """Blocks known of an instance or a pool."""
        return self.index.blocks(name)

    def _take_pools(self, hits: dict[str, PrefixHit]) -> dict[str, PoolHit]:
        """Take the pools out of `hits`."""
        pools = {}
        for name, memory in self._memory_of.items():
            in_memory = hits.pop(memory, NOTHING)
            every_tier = hits.pop(name, None)
            if every_tier is not None:
                pools[name] = PoolHit(every_tier, in_memory)
        return pools

    def _pools_of_instances(self) -> dict[str, str]:
        pools = self._cluster_state.view.pools.values()
        return {instance: pool.name for pool in pools for instance in pool.instances}

    def _sent(self, name: str, held: PrefixHit) -> PrefixHit:
        state = self._cluster_state
        has_states = not (state.view.kv.is_hybrid and state.instance(name).decodes)
        return held if has_states else PrefixHit(0, held.attention_tokens)


def empty_index(seed: int, kv_model: KvModel | None) -> GlobalIndex:
    """An index for a model; None: nothing is known of its layers."""
    return GlobalIndex(
        seed=seed,
        needs_states=kv_model is None or kv_model.has_linear_state,
        needs_windows=kv_model is not None and kv_model.has_window,
    )


def _is_of_ssd(event: HeldEvent) -> bool:
    return isinstance(event, StoredDigests | RemovedHashes) and event.medium == "ssd"


def _longer(known: PrefixHit, other: PrefixHit) -> PrefixHit:
    return PrefixHit(
        max(known.reusable_tokens, other.reusable_tokens), max(known.attention_tokens, other.attention_tokens)
    )
