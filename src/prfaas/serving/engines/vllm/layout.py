"""How one engine's KV is cut into transfer regions, and the fingerprint that two sides must share."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

from prfaas.core.kv.groups import (
    GroupKind,
    KvGroup,
    Region,
    full_attention_first,
    region_bytes,
    usable_tokens,
)
from prfaas.serving.engines.model_identity import ModelIdentity
from prfaas.serving.engines.page_digests import DIGEST_FORMAT, DigestPlan
from prfaas.serving.engines.vllm.device_pages import layer_pages
from prfaas.serving.engines.vllm.pages import LayerPages, LayoutError, raw_pages

# The fingerprint is part of a handshake of 8 KiB; a difference is one line.
_MOST_TOLD_CHARS = 64


@dataclass(frozen=True, slots=True)
class EngineGroup(KvGroup):
    """One of the engine's KV cache groups."""

    layer_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineRegion(Region):
    """One layer's share of a transfer, or one tensor's of a layer that vLLM stores as several."""

    index: int
    """Number of the region in a transfer."""
    layer_name: str
    part: int
    """Which of the layer's tensors."""
    pages: LayerPages
    """Where the engine keeps it."""


def read_groups(kv_cache_config: KVCacheConfig) -> tuple[EngineGroup, ...]:
    """The transferable KV cache groups of an engine.

    Raises:
        LayoutError: a group of a kind that the connector doesn't know how to continue from.
    """
    groups = []
    for index in kv_cache_config.transfer_group_ids:
        spec_group = kv_cache_config.kv_cache_groups[index]
        spec = _representative(spec_group.kv_cache_spec)
        kind, window_tokens = _kind(spec)
        groups.append(EngineGroup(index, kind, spec.block_size, window_tokens, tuple(spec_group.layer_names)))
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


def block_bytes(kv_cache_config: KVCacheConfig, groups: Sequence[EngineGroup]) -> dict[int, int]:
    """What a block of each group takes on one rank, as vLLM counts it, by the group's index."""
    sizes = {}
    for group in groups:
        spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
        layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
        sizes[group.index] = spec.page_size_bytes * layers
    return sizes


class KvLayout:
    """Regions of an engine's KV with their pages, in the order of a transfer: by groups, then by layers."""

    def __init__(
        self,
        groups: Sequence[EngineGroup],
        pages: Mapping[str, Sequence[LayerPages]],
        built_order: Sequence[str] = (),
    ) -> None:
        """
        Args:
            groups: the engine's.
            pages: of every layer of the groups by its name, one for each tensor that it has.
            built_order: the names of the model's layers as it was built; none if a step may go over a layer twice.
        """
        parts = [
            (group, name, part, layer)
            for group in full_attention_first(groups)
            for name in group.layer_names
            for part, layer in enumerate(pages[name])
        ]
        self.regions = tuple(
            EngineRegion(group, layer.page_bytes, index, name, part, layer)
            for index, (group, name, part, layer) in enumerate(parts)
        )
        by_layer: dict[str, list[EngineRegion]] = {}
        for region in self.regions:
            by_layer.setdefault(region.layer_name, []).append(region)
        self.regions_of_layer: Mapping[str, Sequence[EngineRegion]] = by_layer
        self.places = _places(tuple(by_layer), built_order)
        """Of the layers by name, in the order in which a step computes them; empty where that is not certain."""
        self.closing_layers = tuple(
            sorted(
                (name for name, of_layer in by_layer.items() if of_layer[0].group.kind is not GroupKind.FULL),
                key=lambda name: self.places.get(name, 0),
            )
        )
        """Layers of linear state and sliding windows: what moves of them is final in the last chunk."""

    @classmethod
    def of_engine(
        cls,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        built_order: Sequence[str] = (),
    ) -> "KvLayout":
        """Build from what vLLM hands to `register_kv_caches`; `built_order`: see `__init__`.

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
        return cls(groups, pages, built_order)

    def region_bytes(self, num_tokens: int, skip_tokens: int) -> list[int]:
        """See `kv_groups.region_bytes`."""
        return region_bytes(self.regions, num_tokens, skip_tokens)

    def usable_tokens(self, num_tokens: int, skip_tokens: int, covered_end: Callable[[int, int], int]) -> int:
        """See `kv_groups.usable_tokens`."""
        return usable_tokens(self.regions, num_tokens, skip_tokens, covered_end)

    def digest_plan(self, rank: int) -> DigestPlan:
        """Where the digests of this layout's pages lie in a transfer of a tensor-parallel rank."""
        return DigestPlan(
            self.regions, [f"{region.layer_name}/{region.part}" for region in self.regions], rank
        )


def _places(names: Sequence[str], built_order: Sequence[str]) -> Mapping[str, int]:
    """The number in each layer's name, if a model that was built in their order has these layers.

    Names and building are two witnesses that a step computes layers in this order. Layers with the same number (an
    attention beside a linear one) have the same place: nothing is known of their order.
    """
    built = {name: place for place, name in enumerate(built_order)}
    numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in names}
    if any(len(found) != 1 for found in numbers.values()) or not built.keys() >= numbers.keys():
        return {}
    places = {name: numbers[name][0] for name in sorted(names, key=built.__getitem__)}
    return places if list(places.values()) == sorted(places.values()) else {}


def fingerprint(
    layout: KvLayout,
    vllm_config: VllmConfig,
    identity: ModelIdentity,
    conv_state_layout: str,
    *,
    page_digests: bool,
) -> dict[str, str | int]:
    """What must be equal on both sides for raw pages to mean the same, by names that an error can give."""
    model = vllm_config.model_config
    regions = [
        (r.layer_name, r.part, r.group.kind.value, r.group.block_tokens, r.group.window_tokens, r.page_bytes)
        for r in layout.regions
    ]
    # In the order in which a difference is looked for: what says most comes before digests of many things.
    return {
        "architecture": ",".join(getattr(model.hf_config, "architectures", None) or ()),
        **_told_settings(model.hf_text_config.to_dict()),
        "weights": identity.weights,
        "quantization": str(model.quantization),
        "tokenizer": identity.tokenizer,
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "block_tokens": ",".join(str(b) for b in sorted({r.group.block_tokens for r in layout.regions})),
        "conv_state_layout": conv_state_layout,
        "layers": len(layout.regions),
        "model_config": _digest(_portable(model.hf_config.to_dict())),
        "pages": _digest(regions),
        "page_digests": DIGEST_FORMAT if page_digests else "off",
    }


def pool_fingerprint(marks: Mapping[str, str | int]) -> str:
    """What must be equal for two engines to share a pool: all but what belongs to transfers alone."""
    return _digest({name: mark for name, mark in marks.items() if name != "page_digests"})


def _told_settings(config: Mapping[str, object]) -> dict[str, str]:
    """Settings of a model that an error shall give with both values: its vocabulary and its rotary positions."""
    told = {"vocab_size": str(config.get("vocab_size"))}
    for key, value in sorted(config.items()):
        if "rope" in key or "rotary" in key:
            told |= _leaves(key, value)
    return told


def _leaves(name: str, value: object) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {key: text for part in value for key, text in _leaves(f"{name}.{part}", value[part]).items()}
    text = str(value)
    return {name: text if len(text) <= _MOST_TOLD_CHARS else _digest(value)}


def _portable(value: object) -> object:
    """A configuration without what depends on where it lies and who has read it."""
    if isinstance(value, Mapping):
        return {
            key: _portable(part)
            for key, part in value.items()
            if not str(key).startswith("_") and key != "transformers_version"
        }
    return [_portable(part) for part in value] if isinstance(value, list | tuple) else value


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
