"""What the prefix caches of all instances hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prfaas.core.kv import KvModel
from prfaas.core.prefix.index import PrefixHit
from prfaas.lab.simulator.prefix_tree import PrefixTree

# Engines keep a hybrid model's states at the ends of prefill chunks; this is vLLM's usual budget of a step.
_CHECKPOINT_TOKENS = 8192
_MOST_ANSWERS = 10_000


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
        "_capacity_tokens",
        "_checkpoint_blocks",
        "_state_tokens",
        "_trees",
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
        self._capacity_tokens = {name: capacity_tokens[name] for name in names}
        self._trees = {name: self._tree() for name in names}
        self._uses = 0
        self._answers: dict[tuple[int, int], PrefixHit] = {}

    def held(self, block_ids: list[int], num_tokens: int) -> dict[str, PrefixHit]:
        """What each instance holds of a prompt; those that hold nothing are left out."""
        found: dict[str, PrefixHit] = {}
        most = min(len(block_ids), num_tokens // self._block_tokens)
        if not most:
            return found
        answers = self._answers
        for name, tree in self._trees.items():
            held = tree.held(block_ids, most)
            if held[1]:
                answer = answers.get(held)
                found[name] = self._answer(held) if answer is None else answer
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
        self._uses += 1
        tree = self._trees[name]
        tree.use(block_ids, self._uses, with_states)
        excess_tokens = tree.used_tokens - self._capacity_tokens[name]
        if excess_tokens > 0:
            tree.evict(excess_tokens)

    def used_tokens(self, name: str) -> int:
        """The room that is taken, states included."""
        return self._trees[name].used_tokens

    def clear(self, name: str) -> None:
        """The instance died, and its cache with it."""
        self._trees[name] = self._tree()

    def _tree(self) -> PrefixTree:
        return PrefixTree(self._checkpoint_blocks, self._block_tokens, self._state_tokens)

    def _answer(self, held: tuple[int, int]) -> PrefixHit:
        if len(self._answers) == _MOST_ANSWERS:
            self._answers.clear()
        answer = PrefixHit(held[0] * self._block_tokens, held[1] * self._block_tokens)
        self._answers[held] = answer
        return answer


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
