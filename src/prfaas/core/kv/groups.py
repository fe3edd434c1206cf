"""Groups of KV layers that share a block table, and the regions of a transfer that follow from them.

Every engine cuts a transfer alike, so both of its ends compute the same regions. Needs neither torch nor vLLM.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

REQUEST_TOKENS = 1 << 24
"""Tokens of a block that a request has one of, however long it is: no other layer's block is as large."""


class GroupKind(Enum):
    """Kinds of KV that a request needs of a layer to go on after n tokens."""

    FULL = "full_attention"
    """The KV of all n tokens."""
    WINDOW = "sliding_window"
    """The KV of the tokens that the window still reaches."""
    STATE = "linear_state"
    """The state after exactly n tokens."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers of one kind that share a block table."""

    index: int
    """Number of the group in the engine, which its block tables and KV events use."""
    kind: GroupKind
    block_tokens: int
    """Tokens of one block."""
    window_tokens: int
    """Tokens that a layer sees, 0 for other kinds."""

    @property
    def is_ring(self) -> bool:
        """True for a state that stays in a request's first block, and that no prefix of a prompt is kept with."""
        return self.kind is GroupKind.STATE and self.block_tokens == REQUEST_TOKENS

    def first_block(self, num_tokens: int, skip_tokens: int) -> int:
        """Index of the first block that must move so that token `num_tokens` can be computed elsewhere.

        Full attention: the first block that is not wholly held already. Sliding window: the block of the oldest
        token that token `num_tokens` sees (vLLM frees what lies before it). Linear state: the block in which
        vLLM leaves the state after `num_tokens` tokens.
        """
        match self.kind:
            case GroupKind.FULL:
                return skip_tokens // self.block_tokens
            case GroupKind.WINDOW:
                return max(0, num_tokens - self.window_tokens + 1) // self.block_tokens
            case GroupKind.STATE:
                return (num_tokens - 1) // self.block_tokens

    def end_block(self, num_tokens: int) -> int:
        """One past the index of the last block that must move (a partial last block is one of them)."""
        return -(-num_tokens // self.block_tokens)

    def ready_block(self, num_tokens: int, done_tokens: int) -> int:
        """One past the index of the last block that can move when `done_tokens` of `num_tokens` are computed.

        Blocks move once they are full, of windows too: the prompt's end is known, and with it what a window holds
        there. The rest, and a linear state, are there with the last token.
        """
        if done_tokens >= num_tokens:
            return self.end_block(num_tokens)
        return 0 if self.kind is GroupKind.STATE else done_tokens // self.block_tokens

    def moving_blocks(self, num_tokens: int, skip_tokens: int) -> range:
        """Indices of the blocks that a transfer of tokens [skip_tokens, num_tokens) moves."""
        return range(self.first_block(num_tokens, skip_tokens), self.end_block(num_tokens))


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's share of a transfer: the pages of its moving blocks, one after the other."""

    group: KvGroup
    page_bytes: int
    """Bytes of one block of this layer."""


G = TypeVar("G", bound=KvGroup)


def full_attention_first(groups: Sequence[G]) -> list[G]:
    """The order of groups in a transfer: full attention first, since it streams while the prefill runs."""
    return sorted(groups, key=lambda group: group.kind is not GroupKind.FULL)


def region_bytes(regions: Sequence[Region], num_tokens: int, skip_tokens: int) -> list[int]:
    """Bytes of every region in a transfer of the KV of tokens [skip_tokens, num_tokens).

    Raises:
        ValueError: not 0 <= skip_tokens <= num_tokens, or no token.
    """
    if not 0 <= skip_tokens <= num_tokens or num_tokens < 1:
        raise ValueError(f"a transfer of tokens [{skip_tokens}, {num_tokens}) is not possible")
    return [
        len(region.group.moving_blocks(num_tokens, skip_tokens)) * region.page_bytes for region in regions
    ]


def usable_tokens(
    regions: Sequence[Region],
    num_tokens: int,
    skip_tokens: int,
    covered_end: Callable[[int, int], int],
    checkpoints: Collection[int] = (),
) -> int:
    """From how many tokens an engine can go on with what has come of a transfer that broke.

    Whole blocks of full attention are enough, wherever the transfer broke. A linear state is one of exactly so many
    tokens, and a window moves once, at the end. So with such layers an engine goes on from a checkpoint, which has
    both, of tokens whose full attention is there.

    Args:
        regions: Of the transfer, in its order.
        num_tokens: Of the transfer.
        skip_tokens: Of the transfer.
        covered_end: (region, start) → where the bytes that have come from there on end.
        checkpoints: After how many tokens there is one, with whole blocks before it.

    Returns:
        A multiple of every full-attention group's block, more than `skip_tokens`; or 0.
    """
    if not regions:
        return 0
    tokens, blocks_tokens, is_cut = num_tokens, [1], False
    for index, region in enumerate(regions):
        group = region.group
        if group.kind is not GroupKind.FULL:
            is_cut = True
            continue
        blocks = group.first_block(num_tokens, skip_tokens) + covered_end(index, 0) // region.page_bytes
        tokens = min(tokens, blocks * group.block_tokens)
        blocks_tokens.append(group.block_tokens)
    if is_cut:
        tokens = max((end for end in checkpoints if end <= tokens), default=0)
    tokens -= tokens % math.lcm(*blocks_tokens)
    return tokens if tokens > skip_tokens else 0


def checkpoint_step_tokens(groups: Iterable[KvGroup]) -> int:
    """Of what a checkpoint's tokens are a multiple: before it, full attention and windows have whole blocks."""
    return math.lcm(*(group.block_tokens for group in groups if group.kind is not GroupKind.STATE))
