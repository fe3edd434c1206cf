"""The prefix caches of all instances."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.core.kv.model import KvModel
from prfaas.core.prefix.index import PrefixHit

# Engines keep a hybrid model's states at the ends of prefill chunks; this is vLLM's usual budget of a step.
_CHECKPOINT_TOKENS = 8192
_MOST_ANSWERS = 10_000
# Uses that were overtaken by later ones are forgotten when they are this many more than twice the blocks.
_MOST_OVERTAKEN = 64


@dataclass(slots=True, eq=False, repr=False)
class _Run:
    """Blocks that follow one another in every prompt that has the last of them: an edge of the tree."""

    blocks: list[int]
    """Of a prompt that goes through it, from the prompt's first on; those of the run are [start, end)."""
    start: int
    end: int
    parent: "_Run | None"
    """What comes before it; None: it is the root, which has no blocks."""
    children: "dict[int, _Run]" = field(init=False, default_factory=dict)
    """What may come after it, by its first block."""
    last_use: int = field(init=False, default=0)
    """The number of the last prompt that ended here, or in what came behind it and is gone."""
    has_checkpoints: bool = field(init=False, default=False)
    """A state is kept at every checkpoint in it. If so, then in its parents too."""
    has_end_state: bool = field(init=False, default=False)
    """And at its end, where a prompt ended."""


class _Tree:
    """One instance's cache.

    A block id stands for the whole prompt up to the block's end: two prompts with the same block are alike up to there.
    So the place where a prompt leaves a run is found by halving, and no block needs an entry of its own.

    Args:
        checkpoint_blocks: States are kept every so many blocks and at the end of prompts; None: the model has none.
        block_tokens: The room that a block takes.
        state_tokens: The room that a state takes.
    """

    __slots__ = ("_block_tokens", "_every", "_num_blocks", "_num_states", "_root", "_state_tokens", "_uses")

    _uses: deque[tuple[int, _Run]]
    """The prompts that used it, oldest first: number, and the run that ended with the prompt."""

    def __init__(self, checkpoint_blocks: int | None, block_tokens: int, state_tokens: int) -> None:
        self._every = checkpoint_blocks or 0
        self._block_tokens = block_tokens
        self._state_tokens = state_tokens
        self._root = _Run([], 0, 0, None)
        self._num_blocks = 0
        self._num_states = 0
        self._uses = deque()

    @property
    def used_tokens(self) -> int:
        """The room that is taken, states included."""
        return self._num_blocks * self._block_tokens + self._num_states * self._state_tokens

    def held(self, blocks: list[int], most: int) -> tuple[int, int]:
        """Of the first `most` blocks: how many a prompt can go on from, and how many are here."""
        run, count = self._find(blocks, most)
        return (self._reusable(run, count) if self._every else count), count

    def use(self, blocks: list[int], number: int, with_states: bool) -> None:
        """Keep the blocks of prompt `number`, at least one, `with_states` or without. Numbers grow."""
        size = len(blocks)
        run, count = self._find(blocks, size)
        if count < run.end:
            run = _split(run, count)
        if count < size:
            new = _Run(blocks, count, size, run)
            run.children[blocks[count]] = new
            self._num_blocks += size - count
            run = new
        run.last_use = number
        self._uses.append((number, run))
        if self._every and with_states:
            self._keep_states(run)
        if len(self._uses) > 2 * self._num_blocks + _MOST_OVERTAKEN:
            self._uses = deque(use for use in self._uses if use[1].last_use == use[0])

    def evict(self, excess_tokens: int) -> None:
        """Make so much room, from the least recently used block on; of a prompt, from its last block on."""
        uses = self._uses
        while excess_tokens > 0:
            number, run = uses[0]
            if run.children or run.last_use != number:
                uses.popleft()  # all of it was used later
                continue
            excess_tokens = self._shorten(run, excess_tokens)
            if run.end > run.start:
                return
            uses.popleft()
            parent = run.parent
            assert parent is not None
            del parent.children[run.blocks[run.start]]
            if parent.parent is not None and not parent.children and parent.last_use <= number:
                parent.last_use = number
                uses.appendleft((number, parent))

    def _find(self, blocks: list[int], most: int) -> tuple[_Run, int]:
        """Where a prompt's first `most` blocks end: how many are here, and the run with the last of those."""
        run, count = self._root, 0
        while count < most:
            child = run.children.get(blocks[count])
            if child is None:
                break
            run, here = child, child.blocks
            end = run.end if run.end < most else most
            if here[end - 1] == blocks[end - 1]:
                count = end
                continue
            low, high = count + 1, end
            while high - low > 1:
                middle = (low + high) >> 1
                if here[middle - 1] == blocks[middle - 1]:
                    low = middle
                else:
                    high = middle
            return run, low
        return run, count

    def _reusable(self, run: _Run, count: int) -> int:
        """How many of the first `count` blocks, the last of which is in `run`, lie before the last state of them."""
        every = self._every
        if run.has_end_state and count == run.end:
            return count
        while run.parent is not None:
            checkpoint = count // every * every
            if run.has_checkpoints and checkpoint > run.start:
                return checkpoint
            run = run.parent
            count = run.end
            if run.has_end_state:
                return count
        return 0

    def _keep_states(self, run: _Run) -> None:
        """At the end of `run` and at every checkpoint before it."""
        every = self._every
        if not run.has_end_state:
            run.has_end_state = True
            if run.end % every:  # else it is counted with those at checkpoints
                self._num_states += 1
        here: _Run | None = run
        while here is not None and not here.has_checkpoints:
            here.has_checkpoints = True
            self._num_states += here.end // every - here.start // every
            here = here.parent

    def _shorten(self, run: _Run, excess_tokens: int) -> int:
        """Drop blocks from a run's end on, with their states, until so much room is made; what is left to be made."""
        every, block_tokens = self._every, self._block_tokens
        left = run.end
        while left > run.start and excess_tokens > 0:
            if run.has_end_state or (run.has_checkpoints and left % every == 0):
                run.has_end_state = False
                self._num_states -= 1
                excess_tokens -= self._state_tokens + block_tokens
                left -= 1
                continue
            until = max(run.start, left // every * every) if run.has_checkpoints else run.start
            dropped = min(left - until, -(-excess_tokens // block_tokens))
            excess_tokens -= dropped * block_tokens
            left -= dropped
        self._num_blocks -= run.end - left
        run.end = left
        return excess_tokens


def _split(run: _Run, end: int) -> _Run:
    """Cut a run in two, before its end; the first part, which is new."""
    parent = run.parent
    assert parent is not None
    first = _Run(run.blocks, run.start, end, parent)
    first.has_checkpoints = run.has_checkpoints
    first.children[run.blocks[end]] = run
    parent.children[run.blocks[run.start]] = first
    run.parent, run.start = first, end
    return first


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
        """Options for caches of `num_bytes` on every instance, with hybrid states spaced as engines keep them.

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
        options: Of each of them; attention blocks and states share its capacity.
        block_tokens: Tokens of a block.
    """

    def __init__(self, names: Sequence[str], options: CacheOptions, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"A block has at least one token, not {block_tokens}.")
        self._options = options
        self._block_tokens = block_tokens
        self._checkpoint_blocks = None
        if options.checkpoint_tokens is not None:
            self._checkpoint_blocks = max(1, round(options.checkpoint_tokens / block_tokens))
        self._trees = {name: self._tree() for name in names}
        self._uses = 0
        self._answers: dict[tuple[int, int], PrefixHit] = {}

    def held(self, block_ids: list[int], num_tokens: int) -> dict[str, PrefixHit]:
        """The hit of each instance for a prompt; those that hold nothing are left out."""
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
        excess_tokens = tree.used_tokens - self._options.capacity_tokens
        if excess_tokens > 0:
            tree.evict(excess_tokens)

    def used_tokens(self, name: str) -> int:
        """The room that is taken, states included."""
        return self._trees[name].used_tokens

    def clear(self, name: str) -> None:
        """The instance died, and its cache with it."""
        self._trees[name] = self._tree()

    def _tree(self) -> _Tree:
        return _Tree(self._checkpoint_blocks, self._block_tokens, self._options.state_tokens)

    def _answer(self, held: tuple[int, int]) -> PrefixHit:
        if len(self._answers) == _MOST_ANSWERS:
            self._answers.clear()
        answer = PrefixHit(held[0] * self._block_tokens, held[1] * self._block_tokens)
        self._answers[held] = answer
        return answer
