"""KV-cache events on the wire, field for field as vLLM 0.32 writes them (msgpack; defaults are left out)."""

from typing import Any

import msgspec


class _Event(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    pass


class BlockStored(_Event):
    """Blocks of one group that can now be reused. `token_ids` covers more than `block_hashes` where only the last
    boundary was kept (linear state, windows)."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    """Blocks of one group that were evicted: one copy of each hash."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """Nothing is held any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one engine step did to the cache."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
