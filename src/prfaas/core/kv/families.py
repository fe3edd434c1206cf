"""One reader per family of models: which layers keep what. Each names the code whose caches it counts.

Classes of vLLM 0.32 are in `vllm/model_executor/models/FILE` unless another folder stands there, configurations of
transformers 5.x in `transformers/models/FAMILY/configuration_FAMILY.py`. Families with a recurrent state are in
`state_families`, those with sparse attention in `sparse_families`.
"""

from collections.abc import Callable, Mapping, Sequence

from prfaas.core.kv.config_fields import (
    FULL,
    LINEAR,
    SLIDING,
    ConfigError,
    ConfigFields,
    ElementBytes,
)
from prfaas.core.kv.layers import ChunkedWindow, FullAttention, SlidingWindow
from prfaas.core.kv.model import Group

Reader = Callable[[ConfigFields, ElementBytes], list[Group]]


def attention(
    config: ConfigFields, types: Sequence[str], size: ElementBytes, *, more: int = 0
) -> list[Group]:
    """Full and sliding layers that share their shape; a token sees `more` than the file's window.

    llama.py `LlamaAttention` and vllm/model_executor/layers/attention/attention.py `Attention.get_kv_cache_spec`.
    """
    heads, head = config.kv_heads, config.head_size
    groups: list[Group] = [FullAttention(types.count(FULL), heads, head, head, size.kv)]
    if SLIDING in types:
        window = config.whole("sliding_window") + more
        groups.append(SlidingWindow(types.count(SLIDING), heads, head, head, window, dtype_bytes=size.kv))
    return groups


def latent_attention(config: ConfigFields, layers: int, size: ElementBytes) -> FullAttention:
    """MLA: one latent and its RoPE part per token. mla_attention.py `MLAAttention.get_kv_cache_spec`."""
    latent = config.whole("kv_lora_rank") + config.count("qk_rope_head_dim")
    return FullAttention(layers, 1, latent, 0, size.kv)


def _no_linear(types: Sequence[str], config: ConfigFields) -> Sequence[str]:
    if LINEAR in types:
        family = config.fields.get("model_type")
        raise ConfigError(f'layer_types: what a "{LINEAR}" layer of model_type "{family}" keeps is not known')
    return types


def _plain(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Full attention unless `layer_types` says otherwise, as in llama.py `LlamaAttention`."""
    return attention(config, _no_linear(config.layer_types(lambda _: FULL), config), size)


def _window_everywhere(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """A window in every layer if the file has one: vllm/engine/arg_utils.py `EngineArgs.create_engine_config`.

    A window of 0 is none: vllm/config/model.py `ModelConfig.__post_init__`.
    """
    kind = SLIDING if config.given("sliding_window") and config.count("sliding_window") else FULL
    return attention(config, _no_linear(config.layer_types(lambda _: kind), config), size)


def _qwen(first_window_layer: int) -> Reader:
    def read(config: ConfigFields, size: ElementBytes) -> list[Group]:
        """Windows from layer `max_window_layers` on, if used at all: transformers `Qwen2Config.__post_init__`."""
        if not config.fields.get("use_sliding_window"):
            return attention(config, [FULL] * config.layers, size)
        first = config.count("max_window_layers", first_window_layer)
        types = config.layer_types(lambda layer: SLIDING if layer >= first else FULL)
        return attention(config, _no_linear(types, config), size)

    return read


def _gpt_oss(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Windows in every other layer, from the first on: gpt_oss.py `OAIAttention`."""
    types = config.layer_types(lambda layer: FULL if layer % 2 else SLIDING)
    return attention(config, _no_linear(types, config), size)


def _interval_types(config: ConfigFields, default_interval: int) -> Sequence[str]:
    interval = config.whole("sliding_window_pattern", default_interval)
    types = config.layer_types(lambda layer: SLIDING if (layer + 1) % interval else FULL)
    return _no_linear(types, config)


def _gemma(default_interval: int) -> Reader:
    def read(config: ConfigFields, size: ElementBytes) -> list[Group]:
        """Every n-th layer is full: gemma3.py `Gemma3Attention`, transformers `Gemma3TextConfig.__post_init__`."""
        return attention(config, _interval_types(config, default_interval), size)

    return read


def _layers_of_their_own(config: ConfigFields, types: Sequence[str], default_shared: int) -> Sequence[str]:
    """Layers but the last `num_kv_shared_layers`, which read the caches of earlier ones."""
    shared = config.count("num_kv_shared_layers", default_shared)
    if shared >= config.layers:
        raise ConfigError(f"num_kv_shared_layers must be below the {config.layers} layers, not {shared}")
    return types[: config.layers - shared]


def _gemma3n(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """The last layers share the caches of earlier ones: gemma3n.py `Gemma3nAttention`."""
    types = _no_linear(config.layer_types(lambda layer: SLIDING if (layer + 1) % 5 else FULL), config)
    return attention(config, _layers_of_their_own(config, types, 15), size)


def _gemma4(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Full layers have heads of their own: gemma4.py `Gemma4Attention`, transformers `Gemma4TextConfig`.

    A full layer whose values are its keys keeps both all the same.
    """
    if config.given("per_layer_config") or config.fields.get("use_bidirectional_attention") == "all":
        raise ConfigError(
            "per_layer_config and use_bidirectional_attention of all: what layers keep is not known"
        )
    types = [*_no_linear(config.layer_types(lambda layer: SLIDING if (layer + 1) % 6 else FULL), config)]
    types[-1] = FULL
    own = _layers_of_their_own(config, types, 0)
    heads, head, full_head = config.kv_heads, config.head_size, config.whole("global_head_dim", 512)
    keys_are_values = bool(config.fields.get("attention_k_eq_v"))
    full_heads = config.whole("num_global_key_value_heads", heads) if keys_are_values else heads
    return [
        FullAttention(own.count(FULL), full_heads, full_head, full_head, size.kv),
        SlidingWindow(
            own.count(SLIDING), heads, head, head, config.whole("sliding_window"), dtype_bytes=size.kv
        ),
    ]


def _cohere2_moe(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """As `_cohere2`, but what its first layers see follows from more than an interval: cohere2_moe.py."""
    if not config.given("layer_types"):
        raise ConfigError("layer_types is missing, and with it which layers of cohere2_moe have a window")
    return _cohere2(config, size)


def _cohere2(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Three layers of four see `sliding_window` tokens before their own: commandr.py `CohereAttention`."""
    return attention(config, _interval_types(config, 4), size, more=1)


def _llama4(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Layers with RoPE see their chunk, those without all tokens: llama4.py `Llama4Attention`.

    Which they are where the file doesn't say it, or has an empty list: transformers `Llama4TextConfig`.
    """
    layers, interval = config.layers, config.whole("no_rope_layer_interval", 4)
    # 1 marks a layer with RoPE, as the published files have it.
    listed = config.entries("no_rope_layers", layers) if config.fields.get("no_rope_layers") else None
    marks = listed or [int((layer + 1) % interval != 0) for layer in range(layers)]
    chunk = config.count("attention_chunk_size", 0)
    chunked = sum(1 for mark in marks if mark) if chunk else 0
    heads, head = config.kv_heads, config.head_size
    groups: list[Group] = [FullAttention(layers - chunked, heads, head, head, size.kv)]
    if chunked:
        groups.append(ChunkedWindow(chunked, heads, head, head, chunk, dtype_bytes=size.kv))
    return groups


def _step3(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """One K and V head for all query heads: step3_text.py `Step3TextAttention`."""
    if config.whole("num_attention_groups", 1) != 1:
        raise ConfigError("num_attention_groups must be 1: vLLM's Step3TextAttention knows one KV head only")
    head = config.whole("head_dim", 256)
    return [FullAttention(config.layers, 1, head, head, size.kv)]


def _step3p5(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Windows with a shape of their own: step3p5.py `Step3p5Attention`."""
    # The published list goes on over the layers of multi-token prediction.
    types = config.layer_types(lambda _: FULL, longer_is_fine=True)
    groups = config.whole(
        "num_attention_groups", config.whole("num_key_value_heads", config.whole("num_attention_heads"))
    )
    head = config.head_size
    found: list[Group] = [FullAttention(types.count(FULL), groups, head, head, size.kv)]
    if SLIDING in types:
        window = config.whole("sliding_window")
        if config.given("attention_other_setting"):
            other = config.section("attention_other_setting")
            groups, head = other.whole("num_attention_groups", groups), other.whole("head_dim", head)
        found.append(SlidingWindow(types.count(SLIDING), groups, head, head, window, dtype_bytes=size.kv))
    _no_linear(types, config)
    return found


def _mimo_v2(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Windows with a shape of their own, K and V of different sizes: mimo_v2.py `MiMoV2Attention`."""
    pattern = config.entries("hybrid_layer_pattern", config.layers)
    if pattern is None:
        raise ConfigError("hybrid_layer_pattern must be a list with one entry per layer")
    full_head = config.head_size
    swa_head = config.whole("swa_head_dim")
    windows = sum(1 for entry in pattern if entry == 1)
    full_value = config.whole("v_head_dim", full_head)
    return [
        FullAttention(len(pattern) - windows, config.kv_heads, full_head, full_value, size.kv),
        SlidingWindow(
            windows,
            config.whole("swa_num_key_value_heads"),
            swa_head,
            config.whole("swa_v_head_dim", swa_head),
            config.whole("sliding_window_size"),
            dtype_bytes=size.kv,
        ),
    ]


def _deepseek(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """MLA in every layer: deepseek_v2.py `DeepseekV2MLAAttention`."""
    return [latent_attention(config, config.layers, size)]


def _longcat(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Two MLA blocks in every layer: longcat_flash.py `FlashDecoderLayer`."""
    return [latent_attention(config, 2 * config.whole("num_layers"), size)]


def _nemotron_nas(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Blocks with attention of their own width, or none: nemotron_nas.py `DeciLMDecoderLayer`."""
    heads, head = config.whole("num_attention_heads"), config.head_size
    layers: dict[int, int] = {}
    for number, block in enumerate(config.entries("block_configs", config.layers) or ()):
        place = f"block_configs[{number}]"
        part = ConfigFields({place: block}).section(place).section("attention")
        if not part.fields.get("no_op"):
            kv_heads = max(1, heads // part.whole("n_heads_in_group"))
            layers[kv_heads] = layers.get(kv_heads, 0) + 1
    if not layers:
        raise ConfigError(
            "block_configs must be a list with one entry per layer, some of them with attention"
        )
    return [FullAttention(count, kv_heads, head, head, size.kv) for kv_heads, count in layers.items()]


# Fields of caches that a list of layer types doesn't tell the shape of.
_UNUSUAL = (
    *("kv_lora", "swa_", "mamba", "ssm_", "linear_", "conv_", "index", "compress", "attention_chunk"),
    *("v_head_dim", "global_", "num_global", "num_kv_shared", "attention_other", "attention_k_eq_v"),
    *("hybrid_", "cross_attention", "recurrent", "lru_"),
)


def by_layer_types(config: ConfigFields, size: ElementBytes) -> list[Group] | None:
    """A family without a reader whose file lists its layers, all full or sliding attention; None where that fails."""
    listed = config.fields.get("layer_types")
    unusual = any(config.given(field) for field in config.fields if field.startswith(_UNUSUAL))
    if not isinstance(listed, list) or not set(map(str, listed)) <= {FULL, SLIDING} or unusual:
        return None
    return _plain(config, size)


_PLAIN = (
    *("apertus", "cohere", "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4", "glm4_moe"),
    *("glm4v", "glm4v_text", "glm4v_moe", "glm4v_moe_text", "granite", "granitemoe"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2", "internlm3", "llama", "minimax_m2"),
    *("olmo", "olmo2", "olmoe", "phi", "seed_oss", "smollm3"),
    # Ling 2.0. Whatever the file says, bailing_moe.py `BailingAttention` knows no window.
    *("bailing_moe", "bailing_moe_v2"),
    *("qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"),
)
_QWEN = ("mimo", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_QWEN_VL = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")

ATTENTION_READERS: Mapping[str, Reader] = {
    **dict.fromkeys(_PLAIN, _plain),
    **dict.fromkeys(
        ("ministral", "ministral3", "mistral", "mistral3", "mixtral", "phi3", "starcoder2"),
        _window_everywhere,
    ),
    **dict.fromkeys(_QWEN, _qwen(first_window_layer=28)),
    **dict.fromkeys(_QWEN_VL, _qwen(first_window_layer=80)),
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma(2),
    **dict.fromkeys(("gemma3", "gemma3_text"), _gemma(6)),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _gemma3n),
    **dict.fromkeys(("gemma4", "gemma4_text"), _gemma4),
    "cohere2": _cohere2,
    "cohere2_moe": _cohere2_moe,
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    **dict.fromkeys(("step3_vl", "step3_text"), _step3),
    **dict.fromkeys(("step3p5", "step3p7"), _step3p5),
    "mimo_v2_flash": _mimo_v2,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), _deepseek),
    "longcat_flash": _longcat,
    "nemotron-nas": _nemotron_nas,
}
