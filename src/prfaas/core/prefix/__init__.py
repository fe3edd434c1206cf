"""Which instance holds which prefix: block hashes of token ids, and the index that the engines' events feed."""

from prfaas.core.prefix.events import (
    Cleared,
    Event,
    MalformedEventsError,
    RemovedBlocks,
    StoredBlocks,
    decode_batch,
)
from prfaas.core.prefix.hashing import (
    DEFAULT_BLOCK_TOKENS,
    BlockHasher,
    MediaItem,
    PromptChains,
    PromptTokens,
    chain_root,
)
from prfaas.core.prefix.index import (
    NOTHING,
    GlobalIndex,
    PoolHit,
    PrefixHit,
)

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "NOTHING",
    "BlockHasher",
    "Cleared",
    "Event",
    "GlobalIndex",
    "MalformedEventsError",
    "MediaItem",
    "PoolHit",
    "PrefixHit",
    "PromptChains",
    "PromptTokens",
    "RemovedBlocks",
    "StoredBlocks",
    "chain_root",
    "decode_batch",
]
