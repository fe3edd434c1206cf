"""Rings of what is still to be compressed, in the one block of a request, and pages of unlike sizes in a group."""

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype
from prfaas.core.kv.groups import REQUEST_TOKENS, GroupKind, region_bytes
from prfaas.core.kv.layers import CompressedAttention, SlidingWindow
from prfaas.core.kv.published import published_model
from prfaas.core.kv.rank_shares import RankPair
from prfaas.core.pool.geometry import PoolGeometryError
from prfaas.serving.engines.vllm.layout import KvLayout, block_bytes, read_groups
from prfaas.serving.engines.vllm.rank_pages import pool_geometry

BLOCKS, TOKENS = 6, 128


def engine() -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """As DeepSeek V4.1 has them: compressed entries of two layers, one of them with an index, and a ring."""
    of_entries: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 1, "tokens_per_state": 2}
    entries = MLAAttentionSpec(**of_entries, head_size=584, dtype=torch.uint8)
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=16, head_size_v=0, dtype=torch.float32)
    sizes = {"entries": 64 * 584, "index": 64 * 132, "ring": 8 * 16 * 4}
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            # One layer's pages follow each other, or those of all layers of a block.
            KVCacheTensor(
                BLOCKS * sizes["entries"], ["entries"], BLOCKS * sizes["entries"], sizes["entries"]
            ),
            KVCacheTensor(BLOCKS * 40_000, ["index"], sizes["index"], 40_000),
            KVCacheTensor(BLOCKS * sizes["ring"], ["ring"], BLOCKS * sizes["ring"], sizes["ring"]),
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(["entries", "index"], entries),
            KVCacheGroupSpec(["ring"], ring),
        ],
    )
    caches = {
        "entries": torch.zeros((BLOCKS, 1, 64, 584), dtype=torch.uint8),
        "index": torch.zeros((BLOCKS, 1, 64, 132), dtype=torch.uint8),
        "ring": torch.zeros((BLOCKS, 1, 8, 16)),
    }
    return config, caches


def test_a_ring_is_a_state_in_the_first_block() -> None:
    config, caches = engine()
    groups = read_groups(config)
    assert [(group.kind, group.is_ring) for group in groups] == [
        (GroupKind.FULL, False),
        (GroupKind.STATE, True),
    ]
    ring = groups[1]
    for tokens in (1, 8, 9, 5000, REQUEST_TOKENS):
        assert ring.moving_blocks(tokens, 0) == range(1)
    assert (ring.ready_block(100, 99), ring.ready_block(100, 100)) == (0, 1)
    layout = KvLayout.of_engine(config, caches)
    moved = region_bytes(layout.regions, 2 * TOKENS, 0)
    assert dict(zip((region.layer_name for region in layout.regions), moved, strict=True)) == {
        "entries": 2 * 64 * 584,
        "index": 2 * 64 * 132,
        "ring": 8 * 16 * 4,
    }


def test_every_rank_gets_the_whole_ring() -> None:
    config, caches = engine()
    ring = KvLayout.of_engine(config, caches).regions[-1].layout
    for consumer in (0, 1):
        pair = RankPair(0, 1, consumer, 2)
        assert pair.share(ring, ring, "east", "home") == (ring, ring)


def test_sizes_of_blocks_are_those_of_the_tensors() -> None:
    config, _ = engine()
    # The group's spec is that of its first layer.
    assert block_bytes(config, read_groups(config)) == {0: 64 * (584 + 132), 1: 8 * 16 * 4}


def test_with_rings_there_is_no_pool() -> None:
    config, caches = engine()
    layout = KvLayout.of_engine(config, caches)
    with pytest.raises(PoolGeometryError, match="rings"):
        pool_geometry(layout, "fingerprint", 1)


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "bfloat16", "fp8_e4m3"])
def test_pages_of_deepseek_v4_are_those_of_vllms_specs(dtype: KvCacheDtype) -> None:
    """As `DeepseekV4Attention`, its indexer, window and `CompressorStateCache` make them; what fills them up stays."""
    packed = dtype == "fp8_ds_mla"
    elements = {"fp8_ds_mla": torch.uint8, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
    entries: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": elements[dtype]}
    entries |= {"alignment": 576, "state_content_bytes": 584 if packed else None}
    index: dict[str, Any] = {"num_kv_heads": 1, "head_size": 132, "dtype": torch.uint8, "alignment": 576}
    waiting: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32, "alignment": 576}

    def page(ratio: int, **fields: Any) -> int:
        return MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **fields).unpadded_page_size_bytes

    def window(block: int, tokens: int, **fields: Any) -> tuple[int, int, int]:
        spec = SlidingWindowMLASpec(block_size=block, sliding_window=tokens, **fields)
        return block, tokens, spec.unpadded_page_size_bytes

    sparse, heavy, *windows = published_model("deepseek-v4-flash").kept_in(CacheDtypes(dtype)).groups
    assert isinstance(sparse, CompressedAttention) and isinstance(heavy, CompressedAttention)
    assert (sparse.page_tokens, sparse.head_size_k) == (256, page(4, **entries) + page(4, **index))
    assert (heavy.page_tokens, heavy.head_size_k) == (256, page(128, **entries))
    assert [
        (group.block_tokens, group.window_tokens, group.block_tokens * group.head_size_k)
        for group in windows
        if isinstance(group, SlidingWindow)
    ] == [
        window(64, 128, **entries),
        window(4, 8, head_size=2 * 2 * 512, **waiting),
        window(4, 8, head_size=2 * 2 * 128, **waiting),
        window(8, 128, head_size=2 * 512, **waiting),
    ]
