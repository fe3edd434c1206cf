"""The hash chain of a prompt's blocks.

What one prompt is looked up by.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from struct import Struct

from xxhash import xxh3_64_intdigest

DEFAULT_BLOCK_TOKENS = 256

TokenIds = Sequence[int] | bytes | bytearray | memoryview
"""Token ids: integers, or their little-endian uint32 bytes. An `array("I")` or bytes spare a copy."""

# Python's own integers take 32 bytes up to 60 bits, and a third more beyond.
_HASH_MASK = (1 << 60) - 1
_ID_BYTES = 4
# Where a C long has 64 bits, its array is filled three times as fast as "Q".
WORDS = "L" if array("L").itemsize == 8 else "Q"
"""Type code of arrays of unsigned 64-bit integers."""
_RAW = (bytes, bytearray, memoryview)


def chain_root(seed: int, salt: str = "", adapter: str = "") -> int:
    """What the first block of a chain has for a parent: 60 bits.

    Chains of other tenants (`salt`) and of other LoRA adapters share nothing, whatever their tokens.
    """
    # xxh3 mixes the seed into a text of few bytes too simply: (1, "b") and (2, "c") would be the same.
    return xxh3_64_intdigest(f"root of a chain {len(salt)}:{salt}{adapter}".encode(), seed) & _HASH_MASK


def id_bytes(token_ids: TokenIds) -> memoryview:
    """The ids as uint32 bytes (little-endian on every platform we run on).

    Raises OverflowError or TypeError for an id that is not an unsigned 32-bit integer.
    """
    if isinstance(token_ids, _RAW):
        return memoryview(token_ids).cast("B")
    if not (isinstance(token_ids, array) and token_ids.typecode == "I"):
        token_ids = array("I", token_ids)
    return memoryview(token_ids).cast("B")


class BlockHasher:
    """Chained 60-bit hashes of a prompt's whole blocks.

    Hash `i` covers tokens `[0, (i + 1) * block_tokens)`: the low 60 bits of xxh3_64 of the block's ids (uint32)
    with the previous hash as its seed, so equal hashes mean equal prefixes.
    The chain is not keyed: it serves routing only, where a collision costs time and never a wrong token.
    The seed differs per deployment so that a client cannot precompute colliding prompts for all of them.
    """

    __slots__ = ("_block", "_root", "block_tokens", "seed")

    def __init__(self, *, block_tokens: int = DEFAULT_BLOCK_TOKENS, seed: int = 0) -> None:
        """`block_tokens` > 0 tokens per block; `seed` any unsigned 64-bit integer."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}: it must be at least 1")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}: it must be an unsigned 64-bit integer")
        self.block_tokens = block_tokens
        self.seed = seed
        self._root = chain_root(seed)
        self._block = Struct(f"{block_tokens * _ID_BYTES}s")

    def hashes(
        self, token_ids: TokenIds, root: int | None = None, *, max_blocks: int | None = None
    ) -> tuple[int, ...]:
        """One hash per whole block of `token_ids`, the first `max_blocks` at most; a partial tail has none.

        `root`: what comes before the ids: a `chain_root`, or the hash of the block before them. None: the root
        without salt and adapter.
        Raises OverflowError or TypeError for an id that is not an unsigned 32-bit integer.
        """
        ids = id_bytes(token_ids)
        whole = ids[: len(ids) - len(ids) % self._block.size]
        parent = self._root if root is None else root
        blocks = islice(chain.from_iterable(self._block.iter_unpack(whole)), max_blocks)
        return tuple([parent := xxh3_64_intdigest(block, parent) & _HASH_MASK for block in blocks])


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
