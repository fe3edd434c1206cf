"""How far a prefix can be continued from what is held of it: the rule of hybrid models, for every holder.

Full attention needs all blocks from the first token on, a sliding window those that its last token sees, linear
state the one at exactly that end (vLLM 0.32, `find_longest_cache_hit` of its KV cache managers).
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prfaas.core.kv.groups import GroupKind, KvGroup

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class PrefixDepth:
    """How much of a prefix is held."""

    usable_tokens: int
    """A prefill can go on behind them; 0: behind nothing that was asked for."""
    attention_tokens: int
    """All full-attention blocks up to there are held."""


def common_end(end: int, rules: Sequence[Callable[[int], int]]) -> int:
    """The largest end, at most `end`, to which all rules agree.

    Each rule answers with the end that it was given if that one suits it, else with a smaller one: nothing in
    between would suit it.
    """
    while end:
        start = end
        for rule in rules:
            end = rule(end)
        if end == start:
            break
    return end


def window_end(chain: Sequence[K], held: Container[K], step: int, blocks: int | None, end: int) -> int:
    """`end` if a sliding window's blocks before it are held, else the next smaller end that may do.

    Args:
        chain: what stands for the prefix's blocks, in order.
        held: those whose block of the window's group is held.
        step: elements of `chain` that make one block of that group.
        blocks: blocks that the window reaches back; None: all.
        end: elements of `chain`.
    """
    if end % step:
        return end - end % step
    start = 0 if blocks is None else max(end - step * blocks, 0)
    for place in range(end, start, -step):
        if chain[place - 1] not in held:
            return place - step
    return end


def state_end(chain: Sequence[K], held: Container[K], step: int, end: int) -> int:
    """The largest end, at most `end`, at which a state is held; arguments as those of `window_end`."""
    end -= end % step
    while end and chain[end - 1] not in held:
        end -= step
    return end


def attention_end(chain: Sequence[K], held: Container[K], step: int, start: int, end: int) -> int:
    """The end of the whole blocks from `start` on that are all held; arguments as those of `window_end`."""
    start -= start % step
    for place in range(start + step, end + 1, step):
        if chain[place - 1] not in held:
            return place - step
    return max(end - end % step, start)


def usable_end(
    groups: Sequence[KvGroup],
    chain: Sequence[K],
    step_tokens: int,
    held: Mapping[int, Container[K]],
    start_tokens: int,
    limit_tokens: int,
) -> PrefixDepth:
    """How far a prefill can go on from held pages, where the tokens before `start_tokens` are had already.

    Args:
        groups: of the model, with at least one of full attention.
        chain: one key per step of the prefix, from its first token on.
        step_tokens: tokens per key: a divisor of every group's block.
        held: which keys' pages are held, by the group's index.
        start_tokens: full attention is held elsewhere up to there.
        limit_tokens: the usable end may not lie behind that.

    Returns:
        The largest usable end above `start_tokens` (0 without) and how far full attention is held.
    """
    limit = min(limit_tokens // step_tokens, len(chain))
    start = start_tokens // step_tokens
    full = [group for group in groups if group.kind is GroupKind.FULL]
    ends = [
        attention_end(chain, held[group.index], group.block_tokens // step_tokens, start, limit)
        for group in full
    ]
    attention = max(min(ends), start)
    end = common_end(attention, [_rule(group, chain, step_tokens, held[group.index]) for group in groups])
    return PrefixDepth(end * step_tokens if end > start else 0, attention * step_tokens)


def needed_blocks(
    groups: Sequence[KvGroup], start_tokens: int, end_tokens: int
) -> tuple[tuple[int, range], ...]:
    """Which blocks of each group, by its index, a load of tokens [start_tokens, end_tokens) must fill."""
    return tuple((group.index, group.moving_blocks(end_tokens, start_tokens)) for group in groups)


def _rule(group: KvGroup, chain: Sequence[K], step_tokens: int, held: Container[K]) -> Callable[[int], int]:
    """What suits one group, as `common_end` asks for it."""
    step = group.block_tokens // step_tokens
    match group.kind:
        case GroupKind.FULL:
            return lambda end: end - end % step
        case GroupKind.WINDOW:
            blocks = -(-(group.window_tokens - 1) // group.block_tokens)
            return lambda end: window_end(chain, held, step, blocks, end)
        case GroupKind.STATE:
            return lambda end: state_end(chain, held, step, end)
