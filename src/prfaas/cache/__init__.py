"""Which instance holds which prefix: block hashes of token ids, the index that the engines' events feed, and a
record of what went where for engines without events."""

from prfaas.cache.blocks import DEFAULT_BLOCK_TOKENS, BlockHasher, TokenIds, chain_root
from prfaas.cache.chains import PromptChains
from prfaas.cache.events import (
    Cleared,
    Event,
    EventBatch,
    MalformedEventsError,
    RemovedBlocks,
    StoredBlocks,
    decode_batch,
)
from prfaas.cache.held import NOTHING, Held
from prfaas.cache.index import DEFAULT_CAPACITY_BLOCKS, GlobalIndex, IndexStats
from prfaas.cache.record import PrefixRecord
from prfaas.cache.sequence import Gap, Offer, SequenceGuard

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
    "Held",
    "IndexStats",
    "MalformedEventsError",
    "Offer",
    "PrefixRecord",
    "PromptChains",
    "RemovedBlocks",
    "SequenceGuard",
    "StoredBlocks",
    "TokenIds",
    "chain_root",
    "decode_batch",
]
