"""Transfer regions of one engine's KV, read from vLLM's KV cache groups and tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from prfaas.core.kv.groups import REQUEST_TOKENS, GroupKind, KvGroup, Region
from prfaas.core.kv.page_layout import PageLayout, PagePart
from prfaas.serving.engines.vllm.device_pages import layer_pages
from prfaas.serving.engines.vllm.drafter import NO_DRAFTER, Drafter
from prfaas.serving.engines.vllm.pages import LayerPages, LayoutError, raw_pages
from prfaas.serving.engines.vllm.state_layout import state_parts

# They split the last dimension of a block's tensor into keys and values (read in 0.32: `forward` of each).
_PLAIN_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
# Blocks of a multiple of that many tokens are packed alike.
_CPU_BLOCK_TOKENS = 32
# Packed as caches of 16 bits are (tried for the CPU backend in 0.32). Other kinds have scales among the elements.
_FP8_ELEMENTS = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
_ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Packing(Enum):
    """An attention backend's use of the memory of a block."""

    UNKNOWN = auto()
    """Its pages are only moved as they are."""
    PLAIN = auto()
    """As the tensor's shape says."""
    CPU_VECTORS = auto()
    """Of each head first all keys, element by element, then all values, token by token (tried in 0.32)."""


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
    layout: PageLayout
    """How it lies in a page."""
    is_drafters: bool
    """Of a layer of the drafter."""


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
        # A ring's block size is that of its rows: a request has one block.
        block_tokens = REQUEST_TOKENS if isinstance(spec, CircularBufferSpec) else spec.block_size
        groups.append(EngineGroup(index, kind, block_tokens, window_tokens, tuple(spec_group.layer_names)))
    return tuple(groups)


def _representative(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _kind(spec: KVCacheSpec) -> tuple[GroupKind, int]:
    if isinstance(spec, MambaSpec | CircularBufferSpec):
        return GroupKind.STATE, 0
    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.WINDOW, spec.sliding_window + spec.extra_retained_tokens
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL, 0
    raise LayoutError(f"KV cache groups of kind {type(spec).__name__} can't be transferred yet")


def block_bytes(kv_cache_config: KVCacheConfig, groups: Sequence[EngineGroup]) -> dict[int, int]:
    """Bytes of a block of each group on one rank, by the group's index, as vLLM's tensors have them.

    The spec of a group is that of one of its layers, and others may have larger pages.
    """
    # Either a layer's pages follow each other, or those of all layers (read in 0.32: `KVCacheTensor`).
    page_bytes = {
        name: min(tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    return {group.index: sum(page_bytes[name] for name in group.layer_names) for group in groups}


class KvLayout:
    """Regions of an engine's KV with their pages, in the order of a transfer.

    It is the model's own: an engine with a drafter has its layers in other groups than one without. Full attention
    comes first, since it streams while the prefill runs; what the drafter has comes last.
    """

    def __init__(
        self,
        groups: Sequence[EngineGroup],
        pages: Mapping[str, Sequence[LayerPages]],
        built_order: Sequence[str] = (),
        page_layouts: Mapping[str, Sequence[PageLayout]] | None = None,
        drafter: Drafter = NO_DRAFTER,
        copies: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            groups: the engine's.
            pages: of every layer of the groups by its name, one for each tensor that it has.
            built_order: the names of the model's layers as it was built; none if a step may go over a layer twice.
            page_layouts: of the same tensors, where it is known how KV lies in them.
            drafter: of the model, if it has one.
            copies: of layers of full attention by name, how many ranks keep the same and read it out of the staging of
                the one that it is sent to; those that are missing: 1.
        """
        self.drafter = drafter
        layers = [(group, name) for group in groups for name in group.layer_names]
        layers.sort(key=lambda layer: (layer[1] in drafter.layer_names, *transfer_place(*layer)))
        tensors = [
            (group, name, part, layer) for group, name in layers for part, layer in enumerate(pages[name])
        ]
        self.regions = tuple(
            EngineRegion(
                group,
                layer.page_bytes,
                index,
                name,
                part,
                pages=layer,
                layout=page_layouts[name][part] if page_layouts else opaque_layout(group, layer.page_bytes),
                is_drafters=name in drafter.layer_names,
            )
            for index, (group, name, part, layer) in enumerate(tensors)
        )
        by_layer: dict[str, list[EngineRegion]] = {}
        for region in self.regions:
            by_layer.setdefault(region.layer_name, []).append(region)
        full = {name for group in groups if group.kind is GroupKind.FULL for name in group.layer_names}
        self._copies = {name: count for name, count in (copies or {}).items() if name in full}
        self.copies = tuple(self.copies_of(region.layer_name) for region in self.regions)
        """Of each region, see `__init__`."""
        self.layer_names = tuple(by_layer)
        """In the order of a transfer."""
        self.places = _places(self.layer_names, built_order)
        """Of the layers by name, in the order in which a step computes them; empty where that is not certain."""
        self.closing_layers = tuple(
            sorted(
                (name for name, of_layer in by_layer.items() if of_layer[0].group.kind is not GroupKind.FULL),
                key=lambda name: self.places.get(name, 0),
            )
        )
        """Layers of linear state and sliding windows: all that moves of them is there in the last chunk alone."""
        self.closing_before = {
            name: tuple(each for each in self.closing_layers if self.places[each] < place)
            for name, place in self.places.items()
        }
        """Of a layer by name: those of `closing_layers` that a step computes before it, as far as that is certain."""

    def copies_of(self, layer_name: str) -> int:
        """The number of ranks that keep the same of a layer, see `__init__`."""
        return self._copies.get(layer_name, 1)

    @classmethod
    def of_engine(
        cls,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        built_order: Sequence[str] = (),
        packings: Mapping[str, Packing] | None = None,
        elements: Mapping[str, str] | None = None,
        drafter: Drafter = NO_DRAFTER,
        copies: Mapping[str, int] | None = None,
    ) -> "KvLayout":
        """Build from what vLLM hands to `register_kv_caches`.

        Args:
            kv_cache_config: the engine's KV cache groups.
            kv_caches: the KV tensor or tensors of every layer, by the layer's name.
            built_order: see `__init__`.
            packings: of the layers by name; those that are missing are not known.
            elements: the same, of keys and values.
            drafter: see `__init__`.
            copies: see `__init__`.

        Raises:
            LayoutError: a group or tensor that can't be moved as pages.
        """
        pages: dict[str, list[LayerPages]] = {}
        layouts: dict[str, list[PageLayout]] = {}
        known, kept_in = packings or {}, elements or {}
        groups = read_groups(kv_cache_config)
        for group in groups:
            spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
            for name in group.layer_names:
                given = kv_caches[name]
                tensors = [given] if isinstance(given, torch.Tensor) else list(given)
                state = spec if isinstance(spec, MambaSpec) and len(tensors) == 1 else None
                content_bytes = None if state is None else state.state_content_size_bytes
                pages[name] = [
                    layer_pages(raw_pages(tensor, kv_cache_config.num_blocks, content_bytes))
                    for tensor in tensors
                ]
                if state is not None:
                    opaque = opaque_layout(group, pages[name][0].page_bytes)
                    layouts[name] = [replace(opaque, parts=state_parts(state))]
                    continue
                layouts[name] = [
                    page_layout(
                        group,
                        tensor,
                        _heads(spec, name),
                        known.get(name, Packing.UNKNOWN),
                        layer.page_bytes,
                        kept_in.get(name, ""),
                    )
                    for tensor, layer in zip(tensors, pages[name], strict=True)
                ]
        return cls(groups, pages, built_order, layouts, drafter, copies)


_KINDS = list(GroupKind)


def transfer_place(group: KvGroup, layer_name: str) -> tuple[object, ...]:
    """Orders layers by kind, then by name, with numbers by their size."""
    parts = tuple((part.isdigit(), int(part) if part.isdigit() else part) for part in layer_name.split("."))
    return _KINDS.index(group.kind), group.window_tokens, parts


def _heads(spec: KVCacheSpec, layer_name: str) -> int:
    """Heads of a layer's KV on this rank; 0 for a linear state."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[layer_name]
    return spec.num_kv_heads if isinstance(spec, AttentionSpec) else 0


def opaque_layout(group: KvGroup, page_bytes: int) -> PageLayout:
    """The layout of pages that are only moved as they are."""
    return PageLayout(group.kind, group.block_tokens, group.block_tokens, page_bytes)


def page_layout(
    group: KvGroup, tensor: torch.Tensor, heads: int, packing: Packing, page_bytes: int, element: str = ""
) -> PageLayout:
    """The layout of a layer's KV in its pages; opaque where that is not known.

    Args:
        group: of the layer.
        tensor: its KV, in vLLM's logical order: blocks (of the kernels), heads, tokens, keys and values of a head.
        heads: of the layer's KV, on this rank.
        packing: how the layer's attention backend uses the memory of a block.
        page_bytes: of a block of the group.
        element: what keys and values consist of; "" if they are only moved as they are.
    """
    opaque, item_bytes = opaque_layout(group, page_bytes), tensor.element_size()
    if packing is Packing.UNKNOWN or tensor.dim() != 4 or tensor.stride(-1) != 1:
        return opaque
    _, found_heads, page_tokens, width = tensor.shape
    per_block, rest = divmod(group.block_tokens, page_tokens)
    if rest or found_heads != heads or page_bytes != per_block * tensor[0].numel() * item_bytes:
        return opaque
    _, head_stride, token_stride, _ = (stride * item_bytes for stride in tensor.stride())
    head_stride = head_stride if heads > 1 else 0
    if packing is Packing.PLAIN:
        parts = [
            PagePart(
                heads,
                1,
                width * item_bytes,
                0,
                token_stride,
                head_stride_bytes=head_stride,
                row_stride_bytes=0,
            )
        ]
    elif tensor[0].is_contiguous() and not width % 2 and not page_tokens % _CPU_BLOCK_TOKENS:
        elements = width // 2
        values = elements * page_tokens * item_bytes
        parts = [
            PagePart(
                heads,
                elements,
                item_bytes,
                0,
                item_bytes,
                head_stride_bytes=head_stride,
                row_stride_bytes=page_tokens * item_bytes,
            ),
            PagePart(
                heads,
                1,
                elements * item_bytes,
                values,
                elements * item_bytes,
                head_stride_bytes=head_stride,
                row_stride_bytes=0,
            ),
        ]
    else:
        return opaque
    return PageLayout(group.kind, group.block_tokens, page_tokens, page_bytes, tuple(parts), element=element)


def read_packings(vllm_config: VllmConfig) -> Mapping[str, Packing]:
    """Packings of the attention layers by name, as far as their backends are known."""
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    return {name: _packing(layer, vllm_config) for name, layer in layers.items()}


def _packing(layer: Any, vllm_config: VllmConfig) -> Packing:
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend is not None else ""
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if is_quantized_kv_cache(cache_dtype) and cache_dtype not in _FP8_ELEMENTS:
        return Packing.UNKNOWN
    if name in _PLAIN_BACKENDS:
        return Packing.PLAIN
    if name == "CPU_ATTN":
        isa = _get_attn_isa(vllm_config.model_config.dtype, _CPU_BLOCK_TOKENS, layer.head_size, cache_dtype)
        is_known = isa == "vec" and layer.head_size == layer.head_size_v
        return Packing.CPU_VECTORS if is_known else Packing.UNKNOWN
    return Packing.UNKNOWN


def read_elements(vllm_config: VllmConfig) -> Mapping[str, str]:
    """Element types of the attention layers' keys and values by name, where prfaas can convert them."""
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    return {name: _element(layer, vllm_config) for name, layer in layers.items()}


def _element(layer: Any, vllm_config: VllmConfig) -> str:
    cache = vllm_config.cache_config
    element = _FP8_ELEMENTS.get(str(cache.cache_dtype))
    if element is None:
        is_plain = not is_quantized_kv_cache(str(cache.cache_dtype))
        return _ELEMENTS.get(vllm_config.model_config.dtype, "") if is_plain else ""
    # The scales of a checkpoint would have to travel too.
    scales = [getattr(layer, name, None) for name in ("_k_scale_float", "_v_scale_float")]
    return "" if scales != [1.0, 1.0] or current_platform.is_fp8_fnuz() else element


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
