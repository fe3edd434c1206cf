"""What the prefix caches of all instances hold."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prfaas.core.kv import KvModel
from prfaas.core.prefix.index import PrefixHit

# Engines keep a hybrid model's states at the ends of prefill chunks; this is vLLM's usual budget of a step.
_CHECKPOINT_TOKENS = 8192
_MOST_ANSWERS = 10_000
# Uses that were overtaken by later ones are forgotten when they are this many more than the blocks.
_MOST_OVERTAKEN = 64


class _Cache:
    """One instance."""

    __slots__ = ("capacity_tokens", "last_use", "states", "uses")

    last_use: dict[int, int]
    """By block, the number of the prompt that used it last."""
    states: set[int]
    """Blocks with a state."""
    uses: deque[tuple[int, list[int], int]]
    """The prompts that used it, oldest first: number, blocks, and how many of the first blocks may still have that
    number. A later use of a block is one of all blocks before it too, so those are the first ones."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.last_use = {}
        self.states = set()
        self.uses = deque()

    def count(self, blocks: list[int], most: int) -> int:
        """How many of the first `most` blocks are here, given that two are."""
        here = self.last_use
        low, high = 2, 4
        while high <= most and blocks[high - 1] in here:
            low, high = high, 2 * high
        if high > most:
            high = most + 1
        while high - low > 1:
            middle = (low + high) >> 1
            if blocks[middle - 1] in here:
                low = middle
            else:
                high = middle
        return low

    def forget_overtaken(self) -> None:
        """Drop the uses of which no block counts any more."""
        last_use = self.last_use.get
        self.uses = deque(use for use in self.uses if last_use(use[1][use[2] - 1]) == use[0])


class PrefixCaches:
    """The least-recently-used caches of all instances.

    A block id stands for the whole prompt up to the block's end, as in `RequestChunk`. Only whole blocks are kept, as
    vLLM does. A prompt that is used counts from its last block to its first, so that the tail of a prefix goes first
    and no block before one that was used later.

    Models with linear layers (`checkpoint_tokens` given) go on only where a state was kept: every `checkpoint_tokens`,
    taken as a whole number of blocks and at least one, and at the last whole block of each prompt computed here. What
    came from elsewhere has none: the state of a whole prompt seldom ends where a block does.
    A state goes with the block at whose end it is.

    Args:
        names: The instances.
        capacity_tokens: Per instance, for attention blocks and states together.
        block_tokens: Tokens of a block.
        checkpoint_tokens: States are kept every so many tokens; None: the model has none.
        state_tokens: A state takes the room of so many tokens.

    Raises:
        ValueError: no capacity for an instance, or a size that can't be.
    """

    __slots__ = (
        "_answers",
        "_block_tokens",
        "_caches",
        "_checkpoint_blocks",
        "_one_block",
        "_state_tokens",
        "_uses",
    )

    def __init__(
        self,
        names: Sequence[str],
        *,
        capacity_tokens: Mapping[str, int],
        block_tokens: int,
        checkpoint_tokens: int | None = None,
        state_tokens: int = 0,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"A block has at least one token, not {block_tokens}.")
        if checkpoint_tokens is not None and checkpoint_tokens < 1:
            raise ValueError(f"States are kept every 1 token or more, not every {checkpoint_tokens}.")
        if state_tokens < 0:
            raise ValueError(f"A state takes the room of 0 tokens or more, not of {state_tokens}.")
        for name in names:
            if capacity_tokens.get(name, -1) < 0:
                raise ValueError(f"The prefix cache of {name} needs a capacity of 0 tokens or more.")
        self._block_tokens = block_tokens
        self._state_tokens = state_tokens
        self._checkpoint_blocks = None
        if checkpoint_tokens is not None:
            self._checkpoint_blocks = max(1, round(checkpoint_tokens / block_tokens))
        self._caches = {name: _Cache(capacity_tokens[name]) for name in names}
        self._uses = 0
        self._answers: dict[tuple[int, int], PrefixHit] = {}
        # Of an instance that holds one block, with the state to go on from there and without.
        self._one_block = PrefixHit(block_tokens, block_tokens), PrefixHit(0, block_tokens)

    def held(self, block_ids: list[int], num_tokens: int) -> dict[str, PrefixHit]:
        """What each instance holds of a prompt; those that hold nothing are left out."""
        found: dict[str, PrefixHit] = {}
        most = min(len(block_ids), num_tokens // self._block_tokens)
        if not most:
            return found
        first, answers, hybrid = block_ids[0], self._answers, self._checkpoint_blocks is not None
        second = block_ids[1] if most > 1 else None
        with_state, alone = self._one_block
        for name, cache in self._caches.items():
            here = cache.last_use
            if first not in here:
                continue
            if second not in here:
                # Many prompts begin with the same block and share nothing else.
                found[name] = alone if hybrid and first not in cache.states else with_state
                continue
            count = reusable = cache.count(block_ids, most)
            if hybrid:
                states = cache.states
                # With a state every so many blocks this takes no more steps than that.
                while reusable and block_ids[reusable - 1] not in states:
                    reusable -= 1
            answer = answers.get((reusable, count))
            found[name] = self._answer(reusable, count) if answer is None else answer
        return found

    def insert(self, name: str, block_ids: list[int], num_tokens: int, *, with_states: bool = True) -> None:
        """An instance has this prompt: it holds all of it, as far as there is room. `block_ids` are kept.

        `with_states`: it computed the prompt, or got it up to a block's end.
        """
        whole = num_tokens // self._block_tokens
        if whole < len(block_ids):
            block_ids = block_ids[:whole]
        if not block_ids:
            return
        cache = self._caches[name]
        self._uses = number = self._uses + 1
        last_use = cache.last_use
        for block in block_ids:
            last_use[block] = number
        cache.uses.append((number, block_ids, len(block_ids)))
        used_tokens = len(last_use) * self._block_tokens
        every = self._checkpoint_blocks
        if every is not None:
            if with_states:
                if len(block_ids) >= every:
                    cache.states.update(block_ids[every - 1 :: every])
                cache.states.add(block_ids[-1])
            used_tokens += len(cache.states) * self._state_tokens
        if used_tokens > cache.capacity_tokens:
            self._evict(cache, used_tokens - cache.capacity_tokens)
        elif len(cache.uses) > len(last_use) + _MOST_OVERTAKEN:
            cache.forget_overtaken()

    def used_tokens(self, name: str) -> int:
        """The room that is taken, states included."""
        cache = self._caches[name]
        return len(cache.last_use) * self._block_tokens + len(cache.states) * self._state_tokens

    def clear(self, name: str) -> None:
        """The instance died, and its cache with it."""
        self._caches[name] = _Cache(self._caches[name].capacity_tokens)

    def _answer(self, reusable: int, count: int) -> PrefixHit:
        if len(self._answers) == _MOST_ANSWERS:
            self._answers.clear()
        answer = PrefixHit(reusable * self._block_tokens, count * self._block_tokens)
        self._answers[reusable, count] = answer
        return answer

    def _evict(self, cache: _Cache, excess_tokens: int) -> None:
        """Make room, from the least recent block on."""
        last_use, states, uses = cache.last_use, cache.states, cache.uses
        block_tokens, state_tokens = self._block_tokens, self._state_tokens
        while excess_tokens > 0:
            number, blocks, left = uses[0]
            if last_use.get(blocks[left - 1]) != number:
                uses.popleft()  # all of it was used later
                continue
            needed = -(-excess_tokens // block_tokens)
            first = _first_of(number, blocks, max(left - needed, 0), left, last_use)
            while left > first and excess_tokens > 0:
                left -= 1
                block = blocks[left]
                del last_use[block]
                excess_tokens -= block_tokens
                if block in states:
                    states.remove(block)
                    excess_tokens -= state_tokens
            if left and excess_tokens <= 0:
                uses[0] = (number, blocks, left)
            else:
                uses.popleft()


def _first_of(number: int, blocks: list[int], low: int, high: int, last_use: dict[int, int]) -> int:
    """The first of blocks [low, high) that was used last by prompt `number`; all after it were, and the last one is."""
    high -= 1
    if last_use.get(blocks[low]) == number:
        return low  # as in most cases
    while low < high:
        middle = (low + high) >> 1
        if last_use.get(blocks[middle]) == number:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The prefix cache of every instance."""

    capacity_tokens: int
    """What one instance keeps."""
    checkpoint_tokens: int | None = None
    """Of hybrid models, which can go on only from a state: one is kept every so many tokens and at a prompt's last full
    block. None: any other model."""
    state_tokens: int = 0
    """A state takes the room of so many tokens."""

    @classmethod
    def of_memory(cls, model: KvModel, num_bytes: int) -> "CacheOptions":
        """As many tokens of the model as fit into so much memory of one instance, hybrid states as engines keep them.

        Raises:
            ValueError: the model keeps nothing per token.
        """
        if model.token_bytes == 0:
            raise ValueError(f"{model.name} has no full-attention layers, so no prefix of it can be kept")
        capacity_tokens = num_bytes // model.token_bytes
        if not model.is_hybrid:
            return cls(capacity_tokens)
        state_tokens = -(-(model.fixed_bytes + model.window_bytes) // model.token_bytes)
        return cls(capacity_tokens, _CHECKPOINT_TOKENS, state_tokens)

    def __post_init__(self) -> None:
        if self.capacity_tokens < 0 or self.state_tokens < 0:
            raise ValueError("a cache holds 0 tokens or more")
        if self.checkpoint_tokens is not None and self.checkpoint_tokens < 1:
            raise ValueError(f"states can be kept every 1 token or more, not every {self.checkpoint_tokens}")

    def of_instances(self, names: Sequence[str], block_tokens: int) -> PrefixCaches:
        """The caches of instances, empty."""
        return PrefixCaches(
            names,
            capacity_tokens=dict.fromkeys(names, self.capacity_tokens),
            block_tokens=block_tokens,
            checkpoint_tokens=self.checkpoint_tokens,
            state_tokens=self.state_tokens,
        )
