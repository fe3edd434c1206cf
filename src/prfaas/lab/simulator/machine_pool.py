"""The prefix-cache pool of one machine: blocks and states in memory, and behind it on SSD."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prfaas.core.deployment.pool import EvictionName, PoolSettings
from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.kv.model import KvModel
from prfaas.core.pool.eviction import EvictionPolicy, eviction_policy
from prfaas.core.prefix.index import NOTHING, PoolHit, PrefixHit
from prfaas.core.scheduling.view import MEMORY_BITS_PER_S, NETWORK_BITS_PER_S, SSD_BITS_PER_S
from prfaas.core.workload.requests import TracedRequest

_ATTENTION, _STATE = 0, 1


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pool of every machine of a cluster."""

    memory_bytes: int
    ssd_bytes: int = 0
    checkpoint_tokens: int = PoolSettings().checkpoint_tokens
    """Of hybrid models a state is kept every so many tokens, beside those at ends of prompts; 0: only these."""
    junctions: bool = True
    """Whether a state is also kept where a prompt leaves what the pool holds: siblings can go on from there."""
    eviction: EvictionName = PoolSettings().eviction
    memory_bits_per_s: float = MEMORY_BITS_PER_S
    """How fast a machine's engines together load what lies in memory."""
    ssd_bits_per_s: float = SSD_BITS_PER_S
    """How fast what lies on SSD comes into memory."""
    network_bits_per_s: float = NETWORK_BITS_PER_S
    """How fast the other machines of the cluster together read from it."""
    instances_per_machine: int = 1

    def __post_init__(self) -> None:
        if self.memory_bytes < 0 or self.ssd_bytes < 0:
            raise ValueError("a pool has 0 bytes or more")
        if self.checkpoint_tokens < 0:
            raise ValueError(f"states can be kept every 0 tokens or more, not every {self.checkpoint_tokens}")
        if self.instances_per_machine < 1:
            raise ValueError(f"a machine has 1 instance or more, not {self.instances_per_machine}")
        if not min(self.memory_bits_per_s, self.ssd_bits_per_s, self.network_bits_per_s) > 0:
            raise ValueError("a pool's tiers carry more than 0 bit/s")


@dataclass(frozen=True, slots=True)
class LoadedBytes:
    """Where the bytes and tokens of a load lay."""

    memory_bytes: int
    ssd_bytes: int
    memory_tokens: int
    ssd_tokens: int


class _Tier:
    """A memory of fixed size and what it holds."""

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy[int]) -> None:
        self.capacity_bytes = capacity_bytes
        self.policy = policy
        self.pages: set[int] = set()

    def put(self, page: int, size_bytes: int, group: int, parent: int | None, used: set[int]) -> bool:
        """Hold a page, or use it again; False if there is no room, however much goes of what is not in use."""
        if page in self.pages:
            self.policy.touched(page)
            return True
        if size_bytes > self.capacity_bytes and not self.pages:
            return False  # without asking what could go: many machines have no SSD
        while self.policy.used_bytes + size_bytes > self.capacity_bytes:
            victim = self.policy.victim(lambda each: each not in used)
            if victim is None:
                return False
            self.pages.remove(victim)
            self.policy.removed(victim)
        self.pages.add(page)
        self.policy.added(page, size_bytes, group, parent)
        return True


class MachinePool:
    """The pool of one machine.

    A block id stands for the whole prompt up to the block's end, as in `RequestChunk`; only whole blocks are kept. A
    page that is stored is on SSD at once, too: writing is taken to keep up. One that leaves memory may still be there,
    and one that is loaded from there is in memory again. A hybrid model's states (with its sliding windows) are one
    page, which lies at the end of a block. What a conversation's answers would leave is not known, so it is not kept.

    Args:
        options: Sizes and rules.
        model: The KV of a token, and of a state.
        block_tokens: Tokens of a block.
        recompute_s: Seconds of prefill over tokens [start, end), for the policy "cost".
    """

    def __init__(
        self,
        options: PoolOptions,
        model: KvModel,
        block_tokens: int,
        recompute_s: Callable[[int, int], float] | None = None,
    ) -> None:
        self._options = options
        self._block_tokens = block_tokens
        self._block_bytes = model.token_bytes * block_tokens
        self._state_bytes = model.fixed_bytes + model.window_bytes
        self._checkpoint_blocks = -(-options.checkpoint_tokens // block_tokens)
        groups = (
            KvGroup(_ATTENTION, GroupKind.FULL, block_tokens, 0),
            KvGroup(_STATE, GroupKind.STATE, block_tokens, 0),
        )
        self._memory, self._ssd = (
            _Tier(capacity_bytes, eviction_policy(options.eviction, groups, recompute_s))
            for capacity_bytes in (options.memory_bytes, options.ssd_bytes)
        )

    @property
    def memory_bytes(self) -> int:
        """In use."""
        return self._memory.policy.used_bytes

    @property
    def ssd_bytes(self) -> int:
        """In use."""
        return self._ssd.policy.used_bytes

    def hit(self, blocks: Sequence[int], num_tokens: int) -> PoolHit | None:
        """The hit for the first `num_tokens` tokens of a prompt; None: nothing is held."""
        most = min(len(blocks), num_tokens // self._block_tokens)
        memory, ssd = self._memory.pages, self._ssd.pages
        every, fast = 0, most
        for place in range(most):
            page = _attention(blocks[place])
            if page not in memory:
                if page not in ssd:
                    break
                fast = min(fast, place)
            every += 1
        if not every:
            return None
        fast = min(fast, every)
        usable, usable_fast = every, fast
        if self._state_bytes:
            usable = self._last_state(blocks, every, lambda page: page in memory or page in ssd)
            usable_fast = self._last_state(blocks, min(fast, usable), memory.__contains__)
        return PoolHit(self._prefix_hit(usable, every), self._prefix_hit(usable_fast, fast))

    def load(self, blocks: Sequence[int], start_tokens: int, end_tokens: int) -> LoadedBytes:
        """Bring tokens [start, end), which are held, into an engine; the whole prefix was used."""
        start, end = start_tokens // self._block_tokens, end_tokens // self._block_tokens
        pages = self._chain(blocks, end)
        used = {page for page, _, _, _ in pages}
        from_ssd = {_ATTENTION: 0, _STATE: 0}
        for place, (page, size, group, parent) in enumerate(pages):
            if page in self._ssd.pages:
                self._ssd.policy.touched(page)
            is_loaded = place >= start or group == _STATE
            if page in self._memory.pages:
                self._memory.policy.touched(page)
            elif is_loaded:
                from_ssd[group] += 1
                self._memory.put(page, size, group, parent, used)
        ssd_blocks, ssd_states = from_ssd.values()
        ssd_bytes = ssd_blocks * self._block_bytes + ssd_states * self._state_bytes
        loaded_bytes = (end - start) * self._block_bytes + self._state_bytes
        return LoadedBytes(
            loaded_bytes - ssd_bytes,
            ssd_bytes,
            (end - start - ssd_blocks) * self._block_tokens,
            ssd_blocks * self._block_tokens,
        )

    def store(
        self, blocks: Sequence[int], num_tokens: int, computed_from: int, *, is_received: bool = False
    ) -> None:
        """A prompt's KV is in an engine, which keeps it here as far as there is room.

        Args:
            blocks: Of the prompt.
            num_tokens: Its length.
            computed_from: Tokens before that were held; states lie only behind them.
            is_received: It was computed elsewhere: there is no state but the one at its end.
        """
        end = min(len(blocks), num_tokens // self._block_tokens)
        if not end:
            return
        states = {end}
        if not is_received:
            states |= self._inner_states(blocks, end, computed_from // self._block_tokens)
        pages = self._chain(blocks, end, states if self._state_bytes else set())
        used = {page for page, _, _, _ in pages}
        memory, ssd = self._memory, self._ssd
        for page, size, group, parent in pages:
            if page in ssd.pages and page not in memory.pages:
                ssd.policy.touched(page)
                continue
            if memory.put(page, size, group, parent, used):
                ssd.put(page, size, group, parent, used)
            elif group == _ATTENTION:
                return

    def check(self) -> None:
        """No tier holds more than it may, and its policy knows exactly what it holds."""
        for tier in (self._memory, self._ssd):
            assert tier.policy.used_bytes <= tier.capacity_bytes
            assert tier.policy.used_bytes == sum(
                self._state_bytes if page & 1 else self._block_bytes for page in tier.pages
            )

    def _inner_states(self, blocks: Sequence[int], end: int, start: int) -> set[int]:
        """Where a prefill of blocks [start, end) leaves states, beside its end."""
        every = self._checkpoint_blocks
        states = set(range(start - start % every + every, end, every)) if every else set()
        if self._options.junctions:
            held = self.hit(blocks, end * self._block_tokens)
            junction = 0 if held is None else held.every_tier.attention_tokens // self._block_tokens
            if start < junction:
                states.add(junction)
        return states

    def _chain(
        self, blocks: Sequence[int], end: int, states: set[int] | None = None
    ) -> list[tuple[int, int, int, int | None]]:
        """Page, bytes, group and parent of the first `end` blocks, and of states: by default the one at the end."""
        if states is None:
            states = {end} if self._state_bytes else set()
        pages: list[tuple[int, int, int, int | None]] = []
        parent = None
        for place in range(end):
            block = blocks[place]
            page = _attention(block)
            pages.append((page, self._block_bytes, _ATTENTION, parent))
            parent = page
            if place + 1 in states:
                pages.append((_state(block), self._state_bytes, _STATE, page))
        return pages

    def _last_state(self, blocks: Sequence[int], end: int, holds: Callable[[int], bool]) -> int:
        while end and not holds(_state(blocks[end - 1])):
            end -= 1
        return end

    def _prefix_hit(self, usable: int, attention: int) -> PrefixHit:
        if not attention:
            return NOTHING
        return PrefixHit(usable * self._block_tokens, attention * self._block_tokens)


def _attention(block: int) -> int:
    return block << 1


def _state(block: int) -> int:
    return block << 1 | 1


# A machine that holds a prompt's beginning gets it until it has computed so much more than the mean.
_MORE_SHARE, _MORE_TOKENS = 0.1, 200_000


@dataclass(frozen=True, slots=True)
class PoolReuse:
    """The reuse that one prompt found in a pool."""

    input_tokens: int
    reused_tokens: int
    ssd_tokens: int
    """Of those, what lay on SSD."""


def replayed(requests: Iterable[TracedRequest], pools: Sequence[MachinePool]) -> Iterator[PoolReuse]:
    """Every prompt in its order.

    A prompt goes to the machine that holds the longest reusable beginning, and among equals to the one that has
    computed least; but to none that has computed a tenth and 200,000 tokens more than the mean.
    """
    computed = [0] * len(pools)
    for request in requests:
        blocks = request.block_ids
        # The last token is always computed.
        hits = [pool.hit(blocks, request.input_tokens - 1) for pool in pools]
        usable = [0 if hit is None else hit.every_tier.reusable_tokens for hit in hits]
        most = (1 + _MORE_SHARE) * sum(computed) / len(pools) + _MORE_TOKENS
        worth = [held if done < most else -1 for held, done in zip(usable, computed, strict=True)]
        chosen = min(range(len(pools)), key=lambda each: (-worth[each], computed[each]))
        reused = usable[chosen]
        ssd_tokens = pools[chosen].load(blocks, 0, reused).ssd_tokens if reused else 0
        pools[chosen].store(blocks, request.input_tokens, reused)
        computed[chosen] += request.input_tokens - reused
        yield PoolReuse(request.input_tokens, reused, ssd_tokens)
