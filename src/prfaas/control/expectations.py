"""What instances will hold in a moment: prompts that were just sent there, until their events tell."""

from collections.abc import Sequence

from prfaas.cache import PromptChains

LIFETIME_S = 5.0
MOST_BLOCKS = 1 << 15


class Expectations:
    """Prefixes by block hash and the instances that will hold them, as one bit mask each.

    Three generations of half a lifetime each: a prefix is believed for `lifetime_s` to one and a half times that, and
    nothing has to be searched for what has expired. When the youngest is full, the oldest goes at once.
    Whole prefixes are put in, so what an instance is expected to hold is closed under prefixes and a lookup is a
    bisection.
    """

    def __init__(self, *, lifetime_s: float = LIFETIME_S, most_blocks: int = MOST_BLOCKS) -> None:
        self._generation_s = lifetime_s / 2
        self._most_blocks = most_blocks
        self._generations: list[dict[int, int]] = [{}, {}, {}]
        self._turned_s = 0.0
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        """Blocks, those expected in two generations counted twice."""
        return sum(map(len, self._generations))

    def add(self, instance: str, chains: PromptChains, now_s: float) -> None:
        """`instance` will hold this prompt."""
        self._turn(now_s)
        bit = self._bits.setdefault(instance, 1 << len(self._bits))
        for hashes in chains.by_block_tokens.values():
            if len(self._generations[0]) + len(hashes) > self._most_blocks:
                self._push()
            youngest = self._generations[0]
            for block in hashes[: self._most_blocks]:
                youngest[block] = youngest.get(block, 0) | bit

    def drop(self, instance: str) -> None:
        """Nothing is expected of `instance` any more."""
        bit = self._bits.get(instance, 0)
        for generation in self._generations:
            for block, mask in generation.items():
                if mask & bit:
                    generation[block] = mask & ~bit

    def match(self, chains: PromptChains, now_s: float) -> dict[str, int]:
        """Instance → tokens of the prompt that it will hold; those with none are left out."""
        self._turn(now_s)
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

    def _turn(self, now_s: float) -> None:
        turns = int((now_s - self._turned_s) // self._generation_s)
        if turns:
            self._turned_s += turns * self._generation_s
            for _ in range(min(turns, len(self._generations))):
                self._push()

    def _push(self) -> None:
        self._generations = [{}, *self._generations[:-1]]
