"""What the prefix cache of one instance holds: runs of blocks in a tree; the least recently used goes first."""

from collections import deque

# Uses that were overtaken by later ones are forgotten when they are this many more than twice the blocks.
_MOST_OVERTAKEN = 64


class Run:
    """Blocks that follow one another in every prompt that has the last of them: an edge of the tree."""

    __slots__ = (
        "blocks",
        "children",
        "end",
        "has_checkpoints",
        "has_end_state",
        "last_use",
        "parent",
        "start",
    )

    blocks: list[int]
    """Of a prompt that goes through it, from the prompt's first on; those of the run are [start, end)."""
    parent: "Run | None"
    """What comes before it; None: it is the root, which has no blocks."""
    children: "dict[int, Run]"
    """What may come after it, by its first block."""
    last_use: int
    """The number of the last prompt that ended here, or later here than anywhere behind it that is gone."""
    has_checkpoints: bool
    """A state is kept at every checkpoint in it. If so, then in its parents too."""
    has_end_state: bool
    """And at its end, where a prompt ended."""

    def __init__(self, blocks: list[int], start: int, end: int, parent: "Run | None") -> None:
        self.blocks = blocks
        self.start = start
        self.end = end
        self.parent = parent
        self.children = {}
        self.last_use = 0
        self.has_checkpoints = self.has_end_state = False


class PrefixTree:
    """One instance's cache.

    A block id stands for the whole prompt up to the block's end: two prompts with the same block are alike up to there.
    So the place where a prompt leaves a run is found by halving, and no block needs an entry of its own.

    Args:
        checkpoint_blocks: States are kept every so many blocks and at the end of prompts; None: the model has none.
        block_tokens: The room that a block takes.
        state_tokens: The room that a state takes.
    """

    __slots__ = ("_block_tokens", "_every", "_num_blocks", "_num_states", "_root", "_state_tokens", "_uses")

    _uses: deque[tuple[int, Run]]
    """The prompts that used it, oldest first: number, and the run that ended with the prompt."""

    def __init__(self, checkpoint_blocks: int | None, block_tokens: int, state_tokens: int) -> None:
        self._every = checkpoint_blocks or 0
        self._block_tokens = block_tokens
        self._state_tokens = state_tokens
        self._root = Run([], 0, 0, None)
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
            new = Run(blocks, count, size, run)
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

    def _find(self, blocks: list[int], most: int) -> tuple[Run, int]:
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

    def _reusable(self, run: Run, count: int) -> int:
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

    def _keep_states(self, run: Run) -> None:
        """At the end of `run` and at every checkpoint before it."""
        every = self._every
        if not run.has_end_state:
            run.has_end_state = True
            if run.end % every:  # else it is counted with those at checkpoints
                self._num_states += 1
        here: Run | None = run
        while here is not None and not here.has_checkpoints:
            here.has_checkpoints = True
            self._num_states += here.end // every - here.start // every
            here = here.parent

    def _shorten(self, run: Run, excess_tokens: int) -> int:
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


def _split(run: Run, end: int) -> Run:
    """Cut a run in two, before its end; the first part, which is new."""
    parent = run.parent
    assert parent is not None
    first = Run(run.blocks, run.start, end, parent)
    first.has_checkpoints = run.has_checkpoints
    first.children[run.blocks[end]] = run
    parent.children[run.blocks[run.start]] = first
    run.parent, run.start = first, end
    return first
