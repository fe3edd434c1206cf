"""Which instance holds which prefix: block hashes of token ids, the index that the engines' events feed, and a
record of what went where for engines without events."""

from prfaas.core.prefix.events import (
    Cleared,
    Event,
    EventBatch,
    Gap,
    MalformedEventsError,
    Offer,
    RemovedBlocks,
    SequenceGuard,
    StoredBlocks,
    decode_batch,
)
from prfaas.core.prefix.hashing import (
    DEFAULT_BLOCK_TOKENS,
    BlockHasher,
    PromptChains,
    PromptTokens,
    TokenIds,
    chain_root,
)
from prfaas.core.prefix.index import (
    DEFAULT_CAPACITY_BLOCKS,
    NOTHING,
    GlobalIndex,
    IndexStats,
    PoolHit,
    PrefixHit,
)
from prfaas.core.prefix.sent_record import PrefixRecord

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "DEFAULT_CAPACITY_BLOCKS",
    "NOTHING",
    "BlockHasher",
    "Cleared",
    "Event",
    "EventBatch",
    "Gap",
    "GlobalIndex",
    "IndexStats",
    "MalformedEventsError",
    "Offer",
    "PoolHit",
    "PrefixHit",
    "PrefixRecord",
    "PromptChains",
    "PromptTokens",
    "RemovedBlocks",
    "SequenceGuard",
    "StoredBlocks",
    "TokenIds",
    "chain_root",
    "decode_batch",
]
