"""Which instance holds which prefix: block hashes of token ids and the gateway's own record of what went
where."""

from prfaas.cache.blocks import DEFAULT_BLOCK_TOKENS, BlockHasher
from prfaas.cache.record import PrefixRecord

__all__ = ["DEFAULT_BLOCK_TOKENS", "BlockHasher", "PrefixRecord"]
