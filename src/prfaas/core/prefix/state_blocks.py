"""After which prefixes which instances hold the linear states of all their groups."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Reach(NamedTuple):
    """`holders` (bits as in `BlockTree.lengths`) hold `attention_blocks` and can go on after `reusable_blocks`."""

    holders: int
    attention_blocks: int
    reusable_blocks: int


class StateEnds:
    """Block hash → instances that hold the state at the end of that block, in every linear group of theirs."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, holder: int, block: int) -> None:
        """`holder`: its bit."""
        self._masks[block] = self._masks.get(block, 0) | holder

    def discard(self, holder: int, blocks: Iterable[int]) -> None:
        """`holder` has these states no more (or never had them in all groups)."""
        for block in blocks:
            mask = self._masks.get(block, 0) & ~holder
            if mask:
                self._masks[block] = mask
            else:
                self._masks.pop(block, None)
        if not self._masks:
            self._masks = {}

    def last_end(self, holder: int, chain: Sequence[int], end: int) -> int:
        """The last boundary of `chain`, at most `end` blocks, where `holder` has its states; 0 without."""
        while end and not self._masks.get(chain[end - 1], 0) & holder:
            end -= 1
        return end

    def reaches(self, chain: Sequence[int], lengths: Sequence[tuple[int, int]]) -> list[Reach]:
        """How far instances can reuse `chain`, given what `BlockTree.lengths` says of it (not empty)."""
        found: list[Reach] = []
        longest = lengths[0][1]
        # The end of what is held is where the state mostly is: only without it, go through the chain.
        waiting = self._settle(found, lengths, chain[longest - 1], longest)
        if waiting:
            backwards = chain[longest - 1 :: -1]
            for block in filter(self._masks.__contains__, backwards):
                waiting = self._settle(found, waiting, block, longest - backwards.index(block))
                if not waiting:
                    break
        return found + [Reach(holders, blocks, 0) for holders, blocks in waiting]

    def _settle(
        self, found: list[Reach], waiting: Sequence[tuple[int, int]], block: int, end: int
    ) -> Sequence[tuple[int, int]]:
        """Move those who can go on from `block`, at `end`, from `waiting` to `found`."""
        ready = self._masks.get(block, 0)
        left = []
        for holders, blocks in waiting:
            done = holders & ready if blocks >= end else 0
            if done:
                found.append(Reach(done, blocks, end))
            if done != holders:
                left.append((holders ^ done, blocks))
        return left
