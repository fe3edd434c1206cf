"""A record of prompts sent to instances: all that is known of engines that publish no events."""

from collections import OrderedDict
from collections.abc import Sequence

from prfaas.core.prefix.index import NOTHING, PrefixHit


class PrefixRecord:
    """Per instance, the block hashes of the prefixes that were sent there; the least recently used are forgotten first.

    Nothing here comes from the engines. So an answer can be too long (the engine evicted a block) or too short (it
    computed a block that was never sent). Either costs time, never a wrong token.

    An instance with a block here has all blocks before it: blocks are used from the tail to the head, so a chain's tail
    is always older than its head and is forgotten first. A lookup is therefore a bisection.
    """

    def __init__(self, *, block_tokens: int, capacity_blocks: int, only_ends: bool = False) -> None:
        """Make an empty record.

        Args:
            block_tokens: tokens per block, at least 1.
            capacity_blocks: blocks remembered per instance, about what its KV cache can hold; at least 1.
            only_ends: the model has linear states or windows. Engines keep these at the end of a prompt, and a
                prefill can start only there.
        """
        if block_tokens < 1 or capacity_blocks < 1:
            raise ValueError("block_tokens and capacity_blocks must be at least 1")
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_blocks
        self.only_ends = only_ends
        # Instance → block hash → whether a prefill can start after that block.
        self._held: dict[str, OrderedDict[int, bool]] = {}

    def held(self, instance: str, chain: Sequence[int]) -> PrefixHit:
        """The hit that `instance` is believed to have for the prompt with this chain; refreshes nothing."""
        held = self._held.get(instance)
        if not held or not chain or chain[0] not in held:
            return NOTHING
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        reusable = next((end for end in range(low, 0, -1) if held[chain[end - 1]]), 0)
        return PrefixHit(reusable * self.block_tokens, low * self.block_tokens)

    def add(self, instance: str, chain: Sequence[int]) -> None:
        """Remember that `instance` holds the prefix with this chain (and make it the youngest)."""
        held = self._held.setdefault(instance, OrderedDict())
        # A chain longer than the capacity keeps its head: that is what another prompt can share.
        for place in reversed(range(min(len(chain), self.capacity_blocks))):
            goes_on = not self.only_ends or place == len(chain) - 1
            held[chain[place]] = held.get(chain[place], False) or goes_on
            held.move_to_end(chain[place])
        while len(held) > self.capacity_blocks:
            held.popitem(last=False)

    def forget(self, instance: str) -> None:
        """Drop everything recorded of `instance`: it failed or was restarted."""
        self._held.pop(instance, None)

    def blocks(self, instance: str) -> int:
        """Blocks recorded of `instance`."""
        return len(self._held.get(instance, ()))
