"""What the gateway remembers of who holds which prefix."""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixRecord:
    """Per instance, the block hashes of the prefixes sent there, least recently used first to be forgotten.

    A record, not an index: nothing here comes from the engines, so an answer can be too long (the engine
    evicted a block) or too short (it computed one we never sent). Either costs time, never a wrong token.

    Holdings are closed under prefixes: blocks are touched from the tail to the head, so the head of a chain
    is always younger than its tail and the tail is forgotten first. A lookup is therefore a bisection.
    """

    def __init__(self, *, block_tokens: int, capacity_blocks: int) -> None:
        """`capacity_blocks`: blocks remembered per instance, about what the instance's KV cache can hold."""
        if block_tokens < 1 or capacity_blocks < 1:
            raise ValueError("block_tokens and capacity_blocks must be at least 1")
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_blocks
        self._held: dict[str, OrderedDict[int, None]] = {}

    def cached_tokens(self, instance: str, hashes: Sequence[int]) -> int:
        """Tokens of the longest recorded prefix, a multiple of the block; refreshes nothing."""
        held = self._held.get(instance)
        if not held or not hashes or hashes[0] not in held:
            return 0
        low, high = 1, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low * self.block_tokens

    def add(self, instance: str, hashes: Sequence[int]) -> None:
        """Remember that `instance` holds the prefix whose chain is `hashes` (and make it the youngest)."""
        held = self._held.setdefault(instance, OrderedDict())
        # A chain longer than the capacity keeps its head: that is what another prompt can share.
        for block_hash in reversed(hashes[: self.capacity_blocks]):
            held[block_hash] = None
            held.move_to_end(block_hash)
        while len(held) > self.capacity_blocks:
            held.popitem(last=False)

    def forget(self, instance: str) -> None:
        """Drop everything recorded of `instance`: it failed or was restarted."""
        self._held.pop(instance, None)

    def blocks(self, instance: str) -> int:
        """Blocks recorded of `instance`."""
        return len(self._held.get(instance, ()))
