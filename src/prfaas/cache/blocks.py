"""The hash chain of a prompt's blocks."""

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

DEFAULT_BLOCK_TOKENS = 256


class BlockHasher:
    """Chained 64-bit hashes of a prompt's whole blocks.

    Hash `i` covers tokens `[0, (i + 1) * block_tokens)`: xxh3_64 of the block's ids (little-endian uint32 on
    every platform we run on) with the previous hash as its seed, so equal hashes mean equal prefixes.
    The chain is not keyed: it serves routing only, where a collision costs time and never a wrong token.
    The seed differs per deployment so that a client cannot precompute colliding prompts for all of them.
    """

    __slots__ = ("block_tokens", "seed")

    def __init__(self, *, block_tokens: int = DEFAULT_BLOCK_TOKENS, seed: int = 0) -> None:
        """`block_tokens` > 0 tokens per block; `seed` any unsigned 64-bit integer."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}: it must be at least 1")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}: it must be an unsigned 64-bit integer")
        self.block_tokens = block_tokens
        self.seed = seed

    def hashes(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """One hash per whole block of `token_ids`; a partial tail has none.

        Raises OverflowError or TypeError for an id that is not an unsigned 32-bit integer.
        """
        ids = memoryview(array("I", token_ids))
        block = self.block_tokens
        chain: list[int] = []
        parent = self.seed
        for start in range(0, len(ids) - block + 1, block):
            parent = xxh3_64_intdigest(ids[start : start + block], parent)
            chain.append(parent)
        return tuple(chain)
