"""What one prompt is looked up by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prfaas.cache.blocks import BlockHasher, TokenIds, chain_root, id_bytes


@dataclass(frozen=True, slots=True)
class PromptChains:
    """The hash chains of one prompt less its last token, which is always computed.

    `num_tokens`: the whole prompt. `by_block_tokens`: tokens per block → one hash per whole block, for every
    block size that an engine of the deployment has (usually one).
    """

    num_tokens: int
    by_block_tokens: Mapping[int, tuple[int, ...]]


class Hashers:
    """The hashers of one deployment: one per block size, all with its seed."""

    def __init__(self, seed: int) -> None:
        """`seed`: any unsigned 64-bit integer."""
        self.seed = seed
        self._by_block_tokens: dict[int, BlockHasher] = {}

    def of(self, block_tokens: int) -> BlockHasher:
        """The hasher of blocks of so many tokens."""
        hasher = self._by_block_tokens.get(block_tokens)
        if hasher is None:
            hasher = self._by_block_tokens[block_tokens] = BlockHasher(
                block_tokens=block_tokens, seed=self.seed
            )
        return hasher

    def chains(
        self, token_ids: TokenIds, salt: str, adapter: str, block_sizes: Iterable[int]
    ) -> PromptChains:
        """The prompt's chains for blocks of `block_sizes` tokens.

        Raises OverflowError or TypeError for an id that is not an unsigned 32-bit integer.
        """
        root = chain_root(self.seed, salt, adapter)
        ids = id_bytes(token_ids)
        num_tokens = len(ids) // 4
        return PromptChains(
            num_tokens,
            {
                block_tokens: self.of(block_tokens).hashes(
                    ids, root, max_blocks=max(num_tokens - 1, 0) // block_tokens
                )
                for block_tokens in block_sizes
            },
        )
