"""Readers of families with sparse attention: beside what they attend to, layers keep an index that chooses of it.

Names of files and classes as in `families`. Some compress: one entry stands for several tokens, and what is not yet
compressed is kept beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from prfaas.core.kv.config_fields import (
    FULL,
    LINEAR,
    CacheDtypeError,
    ConfigError,
    ConfigFields,
    ElementBytes,
)
from prfaas.core.kv.families import Reader, attention, latent_attention
from prfaas.core.kv.layers import CompressedAttention, FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import Group
from prfaas.core.kv.state_families import gated_delta_net

FP8_DS_MLA: Final = "fp8_ds_mla"
FP8_PLAIN: Final = "fp8_e4m3"
FP8_LAYOUTS = (FP8_DS_MLA, FP8_PLAIN)
"""vLLM's names (`CacheDType` in vllm/config/cache.py) of what an fp8 cache of sparse MLA may look like."""

# Per token of sparse MLA in DeepSeek's layout: 512 fp8 values, 4 fp32 scales and 64 bf16 values of RoPE.
# vllm/model_executor/layers/attention/mla_attention.py, MLAAttention.get_kv_cache_spec: state_content_bytes.
_DS_MLA_BYTES, _DS_MLA_LATENT, _DS_MLA_ROPE = 656, 512, 64
# Per entry of DeepSeek V4 in that layout, for heads of 512: 448 fp8 values, 64 of bf16, and scales. What fills up pages
# in memory does not move. vllm/models/deepseek_v4/attention.py, DeepseekV4Attention.get_kv_cache_spec.
_V4_BYTES, _V4_HEAD = 584, 512
_V4_PAGE_TOKENS = 256
# Per token of an indexer: fp8 values, with a 4-byte scale for every 128 of them.
# vllm/models/deepseek_v32/attention.py, DeepseekV32Indexer: head_dim + head_dim // quant_block_size * 4 bytes.
_INDEX_SCALE_TOKENS, _INDEX_SCALE_BYTES = 128, 4


def _deepseek_sparse(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """MLA in every layer and an index in some: vllm/models/deepseek_v32/attention.py `DeepseekV32Attention`."""
    index = FullAttention(_indexed_layers(config), 1, _index_bytes(config), 0, 1)
    return [_sparse_latent(config, size), index]


def _index_bytes(config: ConfigFields) -> int:
    index = config.whole("index_head_dim", 128)
    return index + index // _INDEX_SCALE_TOKENS * _INDEX_SCALE_BYTES


def _indexed_layers(config: ConfigFields) -> int:
    """Layers with an indexer of their own. The others use the tokens that an earlier layer chose.

    `index_topk_pattern` marks them F and S, or they come every `index_topk_freq` layers, as vLLM's
    `DeepseekV32Attention` reads it. `indexer_types` is what transformers' `GlmMoeDsaConfig` writes in their place.
    """
    pattern = config.fields.get("index_topk_pattern")
    if pattern is not None:
        marked = isinstance(pattern, str) and len(pattern) == config.layers and set(pattern) <= set("FS")
        if not marked:
            raise ConfigError(
                f"index_topk_pattern must be text of F and S, one per layer of {config.layers}, not {pattern!r}"
            )
        return str(pattern).count("F")
    types = config.entries("indexer_types", config.layers)
    if types is not None and not config.given("index_topk_freq"):
        if not all(kind in ("full", "shared") for kind in types):
            raise ConfigError(f'indexer_types must be a list of "full" and "shared", not {types!r}')
        return sum(1 for kind in types if kind == "full")
    interval, offset = config.whole("index_topk_freq", 1), config.count("index_skip_topk_offset", 2)
    return sum(1 for layer in range(config.layers) if max(layer - offset + 1, 0) % interval == 0)


def _sparse_latent(config: ConfigFields, size: ElementBytes) -> FullAttention:
    if not _is_packed(size, by_default=False):
        return latent_attention(config, config.layers, size)
    shape = config.whole("kv_lora_rank"), config.whole("qk_rope_head_dim")
    if shape != (_DS_MLA_LATENT, _DS_MLA_ROPE):
        raise CacheDtypeError(
            f"{FP8_DS_MLA} is known for a kv_lora_rank of {_DS_MLA_LATENT} and a qk_rope_head_dim of {_DS_MLA_ROPE} "
            f"only, not {shape[0]} and {shape[1]}"
        )
    return FullAttention(config.layers, 1, _DS_MLA_BYTES, 0, 1)


def _is_packed(size: ElementBytes, *, by_default: bool) -> bool:
    """True for DeepSeek's layout of fp8, false for plain values."""
    if size.is_default:
        return by_default
    if size.kv == 1 and size.fp8_layout is None:
        raise CacheDtypeError(
            f"the fp8 cache of this model's sparse MLA has two layouts; say {FP8_DS_MLA} (vLLM's FlashMLA, on H100 and "
            f"H200) or {FP8_PLAIN} (vLLM's FlashInfer, on B200 and GB200)"
        )
    return size.kv == 1 and size.fp8_layout == FP8_DS_MLA


def _entry_bytes(config: ConfigFields, size: ElementBytes) -> int:
    """Of DeepSeek V4: packed unless asked for otherwise, as FlashMLA wants it (nvidia/model.py beside that file)."""
    head = config.whole("head_dim", _V4_HEAD)
    if not _is_packed(size, by_default=True):
        return head * size.kv
    if head != _V4_HEAD:
        raise CacheDtypeError(f"{FP8_DS_MLA} is known for a head_dim of {_V4_HEAD} only, not {head}")
    return _V4_BYTES


def _window(layers: int, block_tokens: int, token_bytes: int, window_tokens: int) -> SlidingWindow:
    return SlidingWindow(layers, 1, token_bytes, 0, window_tokens, dtype_bytes=1, block_tokens=block_tokens)


def _compressed(layers: int, ratio: int, entry_bytes: int) -> CompressedAttention:
    """Layers with an entry for `ratio` tokens."""
    page_bytes = _V4_PAGE_TOKENS // ratio * entry_bytes
    return CompressedAttention(layers, 1, page_bytes, 0, page_tokens=_V4_PAGE_TOKENS)


def _ratios(config: ConfigFields, known: Sequence[int]) -> Sequence[int]:
    """Of every layer, how many tokens share an entry; 0: it has a window alone. The list goes on over those of MTP."""
    listed = config.entries("compress_ratios", None) or ()
    if len(listed) < config.layers or not all(ratio in known for ratio in listed[: config.layers]):
        raise ConfigError(
            f"compress_ratios must have one of {', '.join(map(str, known))} for each of {config.layers} layers"
        )
    return listed[: config.layers]


def _deepseek_v4(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """A window everywhere, compressed 4 to 1 with an index or 128 to 1 beside it: `DeepseekV4Attention`, as above.

    What waits to be compressed, in fp32, is a window of its own: compressor.py `CompressorStateCache` in that folder.
    """
    ratios = _ratios(config, (0, 1, 4, 128))
    entry_bytes, sparse, heavy = _entry_bytes(config, size), ratios.count(4), ratios.count(128)
    head, index, window = (
        config.whole("head_dim", _V4_HEAD),
        config.whole("index_head_dim", 128),
        config.whole("sliding_window", 128),
    )
    return [
        _compressed(sparse, 4, entry_bytes + _index_bytes(config)),
        _compressed(heavy, 128, entry_bytes),
        _window(config.layers, 64, entry_bytes, window),
        # Two of fp32, of twice as many tokens as an entry stands for where they overlap.
        _window(sparse, 4, 2 * 2 * 4 * head, 8),
        _window(sparse, 4, 2 * 2 * 4 * index, 8),
        _window(heavy, 8, 2 * 4 * head, 128),
    ]


def _deepseek_v41(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """As V4, but layers share what earlier ones keep: vllm/models/deepseek_v41/attention.py `DeepseekV4Attention`.

    Packed entries are those of V4, which all GPUs but B200 and GB200 keep.
    """
    ratios = _ratios(config, (0, 1, 2))
    sources = config.layer_numbers("kv_source_layer_ids", first=0) or ()
    indexed = config.layer_numbers("index_source_layer_ids", first=0) or ()
    entry_bytes, index_bytes = _entry_bytes(config, size), _index_bytes(config)
    groups: list[Group] = []
    for ratio in (1, 2):
        layers = [layer for layer in sources if ratios[layer] == ratio]
        with_index = len({*layers} & {*indexed})
        groups.append(_compressed(with_index, ratio, entry_bytes + index_bytes))
        groups.append(_compressed(len(layers) - with_index, ratio, entry_bytes))
    # Eight rows of keys and scores in fp32: compressor.py `CompressorStateCache` beside it, without speculation.
    ring_bytes = 8 * 2 * 4 * config.whole("head_dim", _V4_HEAD)
    window = config.whole("sliding_window", 128)
    return [
        *groups,
        _window(config.layers, 32, entry_bytes, window),
        LinearState.ring(sum(1 for layer in sources if ratios[layer] == 2), nbytes=ring_bytes),
    ]


def _minimax_m3(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Keys for an index, in bf16, beside those of some layers: vllm/models/minimax_m3 `MiniMaxM3IndexerCache`."""
    sparse = config.section("sparse_attention_config")
    marks = sparse.entries("sparse_attention_freq", config.layers) or ()
    index = FullAttention(sum(map(bool, marks)), 1, sparse.whole("sparse_index_dim", 128), 0)
    return [*attention(config, [FULL] * config.layers, size), index]


def _full_where_indexed(config: ConfigFields) -> Sequence[str]:
    """Kinds of layers: transformers calls full attention with an index indexed attention."""
    listed = config.entries("layer_types", config.layers)
    if listed is not None:
        listed = [FULL if kind == "indexed_attention" else kind for kind in listed]
    interval = config.whole("full_attention_interval", 4)
    known = ConfigFields({**config.fields, "layer_types": listed})
    return known.layer_types(lambda layer: LINEAR if (layer + 1) % interval else FULL)


def _qwen4(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """As Qwen3.5, with an index of compressed keys and with embeddings per layer: vllm/models/qwen4_exp.

    Caches of the index are those of common/qsa_cache.py, of the embeddings' convolution `Qwen4ExpPLELayer`.
    """
    types = _full_where_indexed(config)
    groups: list[Group] = [
        *attention(config, types, size),
        gated_delta_net(config, types.count(LINEAR), size),
    ]
    if config.given("ple_layer_ids"):
        kernel = (config.whole("ple_conv_kernel_size", 4) - 1) * config.whole("ngram_size", 3) + 1
        convolution = LinearState.short_conv(
            len({*(config.entries("ple_layer_ids", None) or ())}),
            channels=config.whole("hidden_size") * config.whole("hc_count", 4),
            conv_kernel=kernel,
            size=size,
        )
        groups.append(replace(convolution, is_whole=True))
    if config.given("indexer_head_dim"):
        head, ratio = config.whole("indexer_head_dim"), config.whole("indexer_compress_ratio")
        groups.insert(1, CompressedAttention(types.count(FULL), 1, 2 * head, 0, page_tokens=ratio))
        # Files of models with images have positions of three kinds beside each raw key.
        rope = config.fields.get("rope_parameters") or config.fields.get("rope_scaling")
        positions = 3 * 4 if isinstance(rope, Mapping) and "mrope_section" in rope else 0
        row_bytes = 2 * (-(-head // 4) * 4 + positions if positions else head)
        groups.append(LinearState.ring(types.count(FULL), nbytes=ratio * row_bytes))
    return groups


def _glm5_next(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """KDA, and MLA with an index of pooled keys: vllm/models/glm5next/common attention.py and kda.py."""
    types = _full_where_indexed(config)
    full, pool = types.count(FULL), config.whole("index_kpool", 16)
    nested = config.section("linear_attn_config") if config.given("linear_attn_config") else None
    state = LinearState.kimi_delta_attention(
        types.count(LINEAR),
        heads=nested.whole("num_heads") if nested else config.whole("linear_num_heads", 64),
        head_size=nested.whole("head_dim") if nested else config.whole("linear_head_dim", 128),
        conv_kernel=(
            nested.whole("short_conv_kernel_size", 4) if nested else config.whole("linear_conv_kernel_dim", 4)
        ),
        size=size,
    )
    # A key and its gate in bf16 for each token of a pool.
    ring_bytes = 2 * 2 * pool * config.whole("index_head_dim", 128)
    return [
        latent_attention(config, full, size),
        CompressedAttention(full, 1, _index_bytes(config), 0, page_tokens=pool),
        state,
        LinearState.ring(full, nbytes=ring_bytes),
    ]


SPARSE_MLA = ("deepseek_v32", "glm_moe_dsa")
"""Families that keep an index beside their latent."""
PACKED = (*SPARSE_MLA, "deepseek_v4", "deepseek_v41")
"""Families with DeepSeek's layout of fp8."""

SPARSE_READERS: Mapping[str, Reader] = {
    **dict.fromkeys(SPARSE_MLA, _deepseek_sparse),
    "deepseek_v4": _deepseek_v4,
    "deepseek_v41": _deepseek_v41,
    **dict.fromkeys(("minimax_m3", "minimax_m3_text", "minimax_m3_vl", "minimax_m3_vl_text"), _minimax_m3),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _qwen4),
    **dict.fromkeys(("glm5_next", "glm5_next_text"), _glm5_next),
}
