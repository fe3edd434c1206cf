"""What the prefix caches of all instances hold."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from prfaas.cache.held import Held

_MOST_SETS = 10_000


class PrefixCaches:
    """One least-recently-used cache per instance, all of them asked in one walk over a prompt's blocks.

    A block id stands for the whole prompt up to the block's end, as in `RequestChunk`. Only whole blocks are kept, as
    vLLM does. A prompt that is used counts from its last block to its first, so that the tail of a prefix goes first
    and no block before one that was used later.

    Models with linear layers (`checkpoint_tokens` given) go on only where a state was kept: every `checkpoint_tokens`,
    taken as a whole number of blocks and at least one, and at the last whole block of each prompt computed here.
    A state goes with the block at whose end it is.

    `names`: the instances. `capacity_tokens`: per instance, for attention blocks and states together; a state takes
    the room of `state_tokens` tokens.

    Raises:
        ValueError: no capacity for an instance, or a size that can't be.
    """

    __slots__ = (
        "_all",
        "_bits",
        "_block_tokens",
        "_capacity_tokens",
        "_checkpoint_blocks",
        "_holders",
        "_names_of",
        "_recent",
        "_state_tokens",
        "_stated",
        "_states",
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
        self._bits = {name: 1 << place for place, name in enumerate(names)}
        self._names_of: dict[int, tuple[str, ...]] = {}  # sets of instances, spelt out
        self._all = (1 << len(names)) - 1
        self._capacity_tokens = {name: capacity_tokens[name] for name in names}
        # Per instance its blocks, least recent first; per block and per state the bits of those that hold it.
        self._recent: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in names}
        self._holders: dict[int, int] = {}
        self._states: dict[int, int] = {}
        self._stated = dict.fromkeys(names, 0)

    def held(self, block_ids: Sequence[int], num_tokens: int) -> dict[str, Held]:
        """What each instance holds of a prompt; those that hold nothing are left out."""
        found: dict[str, Held] = {}
        holders_of = self._holders.get
        holders = self._all
        count = 0
        whole = num_tokens // self._block_tokens
        for block in block_ids if len(block_ids) <= whole else block_ids[:whole]:
            still = holders_of(block, 0) & holders
            if still != holders:
                if count:
                    self._settle(found, holders ^ still, block_ids, count)
                holders = still
                if not holders:
                    return found
            count += 1
        if count:
            self._settle(found, holders, block_ids, count)
        return found

    def insert(self, name: str, block_ids: Sequence[int], num_tokens: int) -> None:
        """`name` has computed this prompt: it holds all of it, as far as there is room."""
        whole = num_tokens // self._block_tokens
        if whole < len(block_ids):
            block_ids = block_ids[:whole]
        bit = self._bits[name]
        recent = self._recent[name]
        holders = self._holders
        use_again = recent.move_to_end
        for block in reversed(block_ids):
            holding = holders.get(block, 0)
            if holding & bit:
                use_again(block)
            else:
                recent[block] = None
                holders[block] = holding | bit
        if self._checkpoint_blocks is not None and block_ids:
            self._keep_states(name, bit, block_ids, self._checkpoint_blocks)
        excess_tokens = self.used_tokens(name) - self._capacity_tokens[name]
        if excess_tokens > 0:
            self._evict(name, bit, excess_tokens)

    def used_tokens(self, name: str) -> int:
        """The room that is taken, states included."""
        return len(self._recent[name]) * self._block_tokens + self._stated[name] * self._state_tokens

    def clear(self, name: str) -> None:
        """The instance died, and its cache with it."""
        bit = self._bits[name]
        self._evict(name, bit, self.used_tokens(name))

    def _settle(self, found: dict[str, Held], holders: int, block_ids: Sequence[int], count: int) -> None:
        """`holders` hold the first `count` blocks and no more."""
        attention_tokens = count * self._block_tokens
        if self._checkpoint_blocks is None:
            self._note(found, holders, Held(attention_tokens, attention_tokens))
            return
        # Where all of them hold a state every so many blocks, this takes no more steps than that.
        states_of = self._states.get
        for end in range(count, 0, -1):
            ready = states_of(block_ids[end - 1], 0) & holders
            if ready:
                self._note(found, ready, Held(end * self._block_tokens, attention_tokens))
                holders ^= ready
                if not holders:
                    return
        self._note(found, holders, Held(0, attention_tokens))

    def _note(self, found: dict[str, Held], holders: int, held: Held) -> None:
        names = self._names_of.get(holders)
        if names is None:
            names = tuple(name for name, bit in self._bits.items() if bit & holders)
            if len(self._names_of) == _MOST_SETS:
                self._names_of.clear()
            self._names_of[holders] = names
        for name in names:
            found[name] = held

    def _keep_states(self, name: str, bit: int, block_ids: Sequence[int], every: int) -> None:
        states = self._states
        for block in (*block_ids[every - 1 :: every], block_ids[-1]):
            holders = states.get(block, 0)
            if not holders & bit:
                states[block] = holders | bit
                self._stated[name] += 1

    def _evict(self, name: str, bit: int, excess_tokens: int) -> None:
        """Make room, from the least recent block on."""
        least_recent = self._recent[name].popitem
        holders = self._holders
        states = self._states
        while excess_tokens > 0:
            block = least_recent(False)[0]
            excess_tokens -= self._block_tokens
            left = holders[block] ^ bit
            if left:
                holders[block] = left
            else:
                del holders[block]
            if states:
                stated = states.get(block, 0)
                if stated & bit:
                    excess_tokens -= self._state_tokens
                    self._stated[name] -= 1
                    if stated == bit:
                        del states[block]
                    else:
                        states[block] = stated ^ bit
