"""The tokens of one request, with a digest of every prefix of them."""

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_SPREAD = 0xD6E8FEB86659FD93


class TokenChain:
    """Token ids that grow, cut into blocks of `block_tokens`.

    The digest of n tokens is a chain over whole blocks (xxh3_64 of the ids, seeded with the digest before) and a
    rolling product over the rest. It is the same in every process: the KV of a prefix must be.
    """

    __slots__ = ("_blocks", "_root", "_tip", "block_tokens", "ids")

    def __init__(self, token_ids: Sequence[int], block_tokens: int, adapter: str = "") -> None:
        """Raises OverflowError or TypeError for an id that is not an unsigned 32-bit integer."""
        self.ids = array("I", token_ids)
        self.block_tokens = block_tokens
        self._root = xxh3_64_intdigest(adapter.encode()) if adapter else 0
        self._blocks: list[int] = []
        digest = self._root
        with memoryview(self.ids) as ids:
            for start in range(0, len(ids) - block_tokens + 1, block_tokens):
                digest = xxh3_64_intdigest(ids[start : start + block_tokens], digest)
                self._blocks.append(digest)
        self._tip = self._rolled(len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def blocks(self) -> Sequence[int]:
        """Digest at the end of every whole block."""
        return self._blocks

    def digest(self, num_tokens: int) -> int:
        """Digest of the first `num_tokens` tokens."""
        return self._tip if num_tokens == len(self.ids) else self._rolled(num_tokens)

    def extend(self, count: int, taint: int, vocabulary: Sequence[int]) -> None:
        """Append `count` tokens, each chosen from `vocabulary` by all tokens before it and by `taint`."""
        ids, block_tokens, size = self.ids, self.block_tokens, len(vocabulary)
        tip, room = self._tip, self.block_tokens - len(self.ids) % self.block_tokens
        for _ in range(count):
            # The high half of the product chooses: its low bits hardly depend on the digest's high ones.
            token = vocabulary[((((tip ^ taint) * _SPREAD) & MASK) >> 32) * size >> 32]
            ids.append(token)
            room -= 1
            if room:
                tip = (tip * _STEP + token + 1) & MASK
            else:
                tip = self._close_block()
                room = block_tokens
        self._tip = tip

    def _close_block(self) -> int:
        parent = self._blocks[-1] if self._blocks else self._root
        digest = xxh3_64_intdigest(self.ids[-self.block_tokens :], parent)
        self._blocks.append(digest)
        return digest

    def _rolled(self, num_tokens: int) -> int:
        whole = num_tokens // self.block_tokens
        digest = self._blocks[whole - 1] if whole else self._root
        for token in self.ids[whole * self.block_tokens : num_tokens]:
            digest = (digest * _STEP + token + 1) & MASK
        return digest
