"""How one engine's KV is cut into transfer regions, and the fingerprint that two sides must share."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.serving.engines.vllm.pages import LayerPages, LayoutError, layer_pages, raw_pages


class GroupKind(Enum):
    """What a request needs of a layer to go on after n tokens."""

    FULL = "full_attention"
    WINDOW = "sliding_window"
    STATE = "linear_state"


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group of the engine: layers that share a block table."""

    index: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int
    layer_names: tuple[str, ...]

    def first_block(self, num_tokens: int, skip_tokens: int) -> int:
        """Index of the first block that must move so that token `num_tokens` can be computed.

        Full attention: from the first block that is not wholly held. Sliding window: the block of the oldest
        position that token `num_tokens` sees (vLLM frees what lies before it). Linear state: the block in
        which vLLM leaves the state after `num_tokens` tokens.
        """
        match self.kind:
            case GroupKind.FULL:
                return skip_tokens // self.block_tokens
            case GroupKind.WINDOW:
                return max(0, num_tokens - self.window_tokens + 1) // self.block_tokens
            case GroupKind.STATE:
                return (num_tokens - 1) // self.block_tokens

    def end_block(self, num_tokens: int) -> int:
        """One past the index of the last block that must move (the partial tail is one of them)."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's share of a transfer: consecutive pages of `page_bytes`."""

    group: Group
    layer_name: str
    part: int
    page_bytes: int


def read_groups(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """The transferable KV cache groups of an engine.

    Raises:
        LayoutError: a group of a kind that the connector doesn't know how to continue from.
    """
    groups = []
    for index in kv_cache_config.transfer_group_ids:
        spec_group = kv_cache_config.kv_cache_groups[index]
        spec = _representative(spec_group.kv_cache_spec)
        kind, window_tokens = _kind(spec)
        groups.append(Group(index, kind, spec.block_size, window_tokens, tuple(spec_group.layer_names)))
    return tuple(groups)


def _representative(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _kind(spec: KVCacheSpec) -> tuple[GroupKind, int]:
    if isinstance(spec, MambaSpec):
        return GroupKind.STATE, 0
    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.WINDOW, spec.sliding_window + spec.extra_retained_tokens
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL, 0
    raise LayoutError(f"KV cache groups of kind {type(spec).__name__} can't be transferred yet")


class KVLayout:
    """Regions of an engine's KV with their pages; sizes of a transfer as both sides compute them.

    Regions come in the order of groups (full attention first, since it streams while prefill runs) and
    layers. A layer that vLLM stores as several tensors has one region per tensor (`part`).
    """

    def __init__(self, groups: Sequence[Group], pages: Mapping[str, Sequence[LayerPages]]) -> None:
        ordered = sorted(groups, key=lambda group: group.kind is not GroupKind.FULL)
        self.regions = tuple(
            Region(group, name, part, layer.page_bytes)
            for group in ordered
            for name in group.layer_names
            for part, layer in enumerate(pages[name])
        )
        self.pages = tuple(pages[region.layer_name][region.part] for region in self.regions)
        by_layer: dict[str, list[int]] = {}
        for index, region in enumerate(self.regions):
            by_layer.setdefault(region.layer_name, []).append(index)
        self.regions_of_layer: Mapping[str, Sequence[int]] = by_layer

    @classmethod
    def of_engine(
        cls,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    ) -> "KVLayout":
        """Build from what vLLM hands to `register_kv_caches`.

        Raises:
            LayoutError: a group or tensor that can't be moved as pages.
        """
        pages: dict[str, list[LayerPages]] = {}
        groups = read_groups(kv_cache_config)
        for group in groups:
            spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
            for name in group.layer_names:
                tensors = kv_caches[name]
                parts = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                whole = isinstance(spec, MambaSpec) and len(parts) == 1
                content_bytes = spec.state_content_size_bytes if whole else None
                pages[name] = [
                    layer_pages(raw_pages(part, kv_cache_config.num_blocks, content_bytes)) for part in parts
                ]
        return cls(groups, pages)

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """Bytes of every region in a transfer of the KV of tokens [skip_tokens, num_tokens).

        Raises:
            ValueError: not 0 <= skip_tokens <= num_tokens, or no token.
        """
        if not 0 <= skip_tokens <= num_tokens or num_tokens < 1:
            raise ValueError(f"a transfer of tokens [{skip_tokens}, {num_tokens}) is not possible")
        return [
            (region.group.end_block(num_tokens) - region.group.first_block(num_tokens, skip_tokens))
            * region.page_bytes
            for region in self.regions
        ]


def fingerprint(layout: KVLayout, vllm_config: VllmConfig, conv_state_layout: str) -> dict[str, str | int]:
    """What must be equal on both sides for raw pages to mean the same, named so that an error can say which."""
    model = vllm_config.model_config
    regions = [
        (r.layer_name, r.part, r.group.kind.value, r.group.block_tokens, r.group.window_tokens, r.page_bytes)
        for r in layout.regions
    ]
    return {
        "model_config": _digest(_portable(model.hf_config.to_dict())),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "block_tokens": ",".join(str(b) for b in sorted({r.group.block_tokens for r in layout.regions})),
        "conv_state_layout": conv_state_layout,
        "layers": len(layout.regions),
        "pages": _digest(regions),
    }


def _portable(config: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
