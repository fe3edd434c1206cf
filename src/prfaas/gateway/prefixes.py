"""What each instance is believed to hold, counted in blocks that fit the engines' own."""

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence

from prfaas.cache import DEFAULT_BLOCK_TOKENS, BlockHasher, PrefixRecord
from prfaas.deployment import Instance
from prfaas.gateway.engine_client import EngineClient
from prfaas.gateway.options import GatewayOptions

logger = logging.getLogger(__name__)

_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')
_DEFAULT_CAPACITY_TOKENS = 1 << 20


class Prefixes:
    """Block chains of prompts and the record of who holds them.

    Until an engine has told its block size, nothing is believed to be held: a claimed prefix that does not
    end on the engine's block boundary would not be honoured and cost a whole local prefill.
    """

    def __init__(self, client: EngineClient, options: GatewayOptions, *, seed: int) -> None:
        self._client = client
        self._options = options
        self._seed = seed
        self._asked = False
        self._asking = asyncio.Lock()
        self._hasher: BlockHasher | None = None
        self._record: PrefixRecord | None = None

    async def learn(self, decode: Instance) -> None:
        """Take block size and capacity from the /metrics of `decode`. Raises EngineError when it is not
        reachable."""
        if self._asked:
            return
        async with self._asking:
            if not self._asked:
                answer = await self._client.get(decode, "/metrics", self._options.tokenize_timeout_s)
                self._asked = True
                self._use(decode, *cache_facts(answer))

    def _use(self, decode: Instance, block_tokens: int | None, capacity_tokens: int | None) -> None:
        if block_tokens is None:
            logger.warning("%s does not tell its KV block size: prefixes are not tracked", decode.name)
            return
        # Running requests need room in the cache too.
        capacity_tokens = (capacity_tokens or _DEFAULT_CAPACITY_TOKENS) // 2
        ours = block_tokens * -(-DEFAULT_BLOCK_TOKENS // block_tokens)
        self._hasher = BlockHasher(block_tokens=ours, seed=self._seed)
        self._record = PrefixRecord(block_tokens=ours, capacity_blocks=max(capacity_tokens // ours, 1))

    def chain(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The block hashes of a prompt less its last token, which no cache can spare."""
        return self._hasher.hashes(token_ids[:-1]) if self._hasher is not None else ()

    def cached_tokens(self, instances: Iterable[Instance], chain: Sequence[int]) -> dict[str, int]:
        """Instance name → tokens of the prompt that it is believed to hold."""
        if self._record is None or not chain:
            return {}
        return {i.name: self._record.cached_tokens(i.name, chain) for i in instances}

    def add(self, instance: str, chain: Sequence[int]) -> None:
        if self._record is not None and chain:
            self._record.add(instance, chain)

    def forget(self, instance: str) -> None:
        if self._record is not None:
            self._record.forget(instance)


def cache_facts(exposition: bytes) -> tuple[int | None, int | None]:
    """(tokens per block, tokens in all) of vLLM's cache_config_info series; None for what it does not say."""
    found = _CACHE_CONFIG.search(exposition)
    labels = dict(_LABEL.findall(found.group(1))) if found else {}

    def positive(name: bytes) -> int | None:
        value = labels.get(name, b"")
        return int(value) if value.isdigit() and 0 < int(value) < 1 << 40 else None

    return positive(b"block_size"), positive(b"kv_cache_size_tokens")
