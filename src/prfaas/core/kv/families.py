"""One reader per family of models: which layers keep what. Field names and defaults are those of the model code in
transformers 5.x and vLLM 0.32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import Group

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
LAYER_TYPES = (FULL, SLIDING, LINEAR)


class ConfigError(ValueError):
    """A `config.json` that the KVCache can't be read out of, or a published model that isn't known."""


class ConfigFields:
    """The fields of one JSON object. Every error is a ConfigError that names the field; `inside` is its prefix."""

    def __init__(self, fields: Mapping[str, Any], inside: str = "") -> None:
        self.fields = fields
        self._inside = inside

    def whole(self, field: str, default: int | None = None) -> int:
        """A whole number above 0; `default` where it is missing or null."""
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._inside}{field} must be a whole number above 0, not {value!r}")
        return value

    def given(self, field: str) -> bool:
        """True if the field is there and not null."""
        return self.fields.get(field) is not None

    def section(self, field: str) -> "ConfigFields":
        """The object in a field."""
        value = self.fields.get(field)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._inside}{field} must be an object, not {value!r}")
        return ConfigFields(value, f"{self._inside}{field}.")

    def entries(self, field: str, length: int | None) -> Sequence[Any] | None:
        """The list in a field, of `length` entries unless that is None; None where the field is missing."""
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or (length is not None and len(value) != length):
            needed = "a list" if length is None else f"a list of {length} entries, one per layer"
            raise ConfigError(f"{self._inside}{field} must be {needed}")
        return value

    @property
    def layers(self) -> int:
        """Layers of the decoder."""
        return self.whole("num_hidden_layers")

    @property
    def kv_heads(self) -> int:
        """KV heads of full attention; as many as query heads unless the file says otherwise."""
        return self.whole("num_key_value_heads", self.whole("num_attention_heads"))

    @property
    def head_size(self) -> int:
        """Size of an attention head."""
        if self.given("head_dim"):
            return self.whole("head_dim")
        return self.whole("hidden_size") // self.whole("num_attention_heads")

    def layer_types(self, default: Callable[[int], str], longer_is_fine: bool = False) -> Sequence[str]:
        """The kind of every layer, from 0 on; `default` of its index where the file doesn't list them."""
        given = self.entries("layer_types", None if longer_is_fine else self.layers)
        if given is not None and len(given) < self.layers:
            raise ConfigError(
                f"{self._inside}layer_types must have an entry for each of {self.layers} layers"
            )
        types = [str(given[i]) if given is not None else default(i) for i in range(self.layers)]
        unknown = sorted(set(types) - set(LAYER_TYPES))
        if unknown:
            raise ConfigError(
                f'{self._inside}layer_types: "{unknown[0]}" is not known; known are {", ".join(LAYER_TYPES)}'
            )
        return types


# Per token and layer of DeepSeek's sparse attention: 128 fp8 values of the indexer's key and a 4-byte scale.
_INDEX_SCALE_TOKENS, _INDEX_SCALE_BYTES = 128, 4


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of one element: `kv` of attention, `state` of recurrent states (convolutions keep two)."""

    kv: int
    state: int


Reader = Callable[[ConfigFields, ElementBytes], list[Group]]


def _attention(config: ConfigFields, types: Sequence[str], size: ElementBytes) -> list[Group]:
    heads, head = config.kv_heads, config.head_size
    groups: list[Group] = [FullAttention(types.count(FULL), heads, head, head, size.kv)]
    if SLIDING in types:
        window = config.whole("sliding_window")
        groups.append(SlidingWindow(types.count(SLIDING), heads, head, head, window, size.kv))
    return groups


def _no_linear(types: Sequence[str], config: ConfigFields) -> Sequence[str]:
    if LINEAR in types:
        family = config.fields.get("model_type")
        raise ConfigError(f'layer_types: what a "{LINEAR}" layer of model_type "{family}" keeps is not known')
    return types


def _plain(config: ConfigFields, size: ElementBytes) -> list[Group]:
    return _attention(config, _no_linear(config.layer_types(lambda _: FULL), config), size)


def _window_everywhere(config: ConfigFields, size: ElementBytes) -> list[Group]:
    kind = SLIDING if config.given("sliding_window") else FULL
    return _attention(config, _no_linear(config.layer_types(lambda _: kind), config), size)


def _qwen(config: ConfigFields, size: ElementBytes) -> list[Group]:
    if not config.fields.get("use_sliding_window"):
        return _attention(config, [FULL] * config.layers, size)
    first = config.whole("max_window_layers", 28)
    types = config.layer_types(lambda layer: SLIDING if layer >= first else FULL)
    return _attention(config, _no_linear(types, config), size)


def _gpt_oss(config: ConfigFields, size: ElementBytes) -> list[Group]:
    types = config.layer_types(lambda layer: FULL if layer % 2 else SLIDING)
    return _attention(config, _no_linear(types, config), size)


def _gemma(default_interval: int) -> Reader:
    def read(config: ConfigFields, size: ElementBytes) -> list[Group]:
        interval = config.whole("sliding_window_pattern", default_interval)
        types = config.layer_types(lambda layer: SLIDING if (layer + 1) % interval else FULL)
        return _attention(config, _no_linear(types, config), size)

    return read


def _step(config: ConfigFields, size: ElementBytes) -> list[Group]:
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
        found.append(SlidingWindow(types.count(SLIDING), groups, head, head, window, size.kv))
    _no_linear(types, config)
    return found


def _qwen_next(config: ConfigFields, size: ElementBytes) -> list[Group]:
    interval = config.whole("full_attention_interval", 4)
    types = config.layer_types(lambda layer: LINEAR if (layer + 1) % interval else FULL)
    linear = LinearState.gated_delta_net(
        types.count(LINEAR),
        key_heads=config.whole("linear_num_key_heads"),
        value_heads=config.whole("linear_num_value_heads"),
        key_head_size=config.whole("linear_key_head_dim"),
        value_head_size=config.whole("linear_value_head_dim"),
        conv_kernel=config.whole("linear_conv_kernel_dim"),
        state_dtype_bytes=size.state,
    )
    return [*_attention(config, types, size), linear]


def _mimo_v2(config: ConfigFields, size: ElementBytes) -> list[Group]:
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
            size.kv,
        ),
    ]


def _mla(config: ConfigFields, layers: int, size: ElementBytes) -> FullAttention:
    latent = config.whole("kv_lora_rank") + config.whole("qk_rope_head_dim")
    return FullAttention(layers, 1, latent, 0, size.kv)


def _deepseek(config: ConfigFields, size: ElementBytes) -> list[Group]:
    return [_mla(config, config.layers, size)]


def _deepseek_sparse(config: ConfigFields, size: ElementBytes) -> list[Group]:
    index = config.whole("index_head_dim")
    scales = index // _INDEX_SCALE_TOKENS * _INDEX_SCALE_BYTES
    return [_mla(config, config.layers, size), FullAttention(config.layers, 1, index + scales, 0, 1)]


def _kimi_linear(config: ConfigFields, size: ElementBytes) -> list[Group]:
    linear = config.section("linear_attn_config")
    listed = linear.entries("kda_layers", None)
    if listed is None:
        raise ConfigError("linear_attn_config.kda_layers must be a list of layer numbers")
    if not set(listed) <= set(range(1, config.layers + 1)) or len(set(listed)) != len(listed):
        raise ConfigError(
            f"linear_attn_config.kda_layers must be different layer numbers from 1 to {config.layers}"
        )
    state = LinearState.kimi_delta_attention(
        len(listed),
        heads=linear.whole("num_heads"),
        head_size=linear.whole("head_dim"),
        conv_kernel=linear.whole("short_conv_kernel_size"),
        state_dtype_bytes=size.state,
    )
    return [_mla(config, config.layers - len(listed), size), state]


def _nemotron_h(config: ConfigFields, size: ElementBytes) -> list[Group]:
    kinds = _nemotron_layers(config)
    mamba, attention = kinds.count("M"), kinds.count("*")
    state = LinearState.mamba2(
        mamba,
        heads=config.whole("mamba_num_heads"),
        head_size=config.whole("mamba_head_dim"),
        groups=config.whole("n_groups"),
        state_size=config.whole("ssm_state_size"),
        conv_kernel=config.whole("conv_kernel"),
        state_dtype_bytes=size.state,
    )
    head = config.head_size
    return [FullAttention(attention, config.kv_heads, head, head, size.kv), state]


def _nemotron_layers(config: ConfigFields) -> str:
    """One letter per layer: M Mamba2, * attention, - MLP, E experts. The pattern string, or a list of names."""
    names = {"mamba": "M", LINEAR: "M", "attention": "*", FULL: "*", "mlp": "-", "moe": "E"}
    pattern = config.fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set(names.values()):
        return pattern
    listed = config.entries("layers_block_type", None) or config.entries("layer_types", None)
    if pattern is None and listed and set(listed) <= set(names):
        return "".join(names[str(kind)] for kind in listed)
    raise ConfigError(
        f"hybrid_override_pattern must be text of M (Mamba2), * (attention), - (MLP) and E (experts), not {pattern!r}"
    )


def _granite_hybrid(config: ConfigFields, size: ElementBytes) -> list[Group]:
    names = {"mamba": "M", LINEAR: "M", "attention": "*", FULL: "*"}
    listed = config.entries("layer_types", config.layers)
    if not listed or not set(listed) <= set(names):
        raise ConfigError(f"layer_types must be a list of {', '.join(names)}, one per layer")
    kinds = [names[str(kind)] for kind in listed]
    heads = config.whole("mamba_n_heads")
    inner = config.whole("mamba_expand", 2) * config.whole("hidden_size")
    numbered = isinstance(config.fields.get("mamba_d_head"), int)
    state = LinearState.mamba2(
        kinds.count("M"),
        heads=heads,
        head_size=config.whole("mamba_d_head") if numbered else inner // heads,
        groups=config.whole("mamba_n_groups", 1),
        state_size=config.whole("mamba_d_state", 256),
        conv_kernel=config.whole("mamba_d_conv", 4),
        state_dtype_bytes=size.state,
    )
    head = config.head_size
    return [FullAttention(kinds.count("*"), config.kv_heads, head, head, size.kv), state]


def _bailing_hybrid(config: ConfigFields, size: ElementBytes) -> list[Group]:
    layers, group = config.layers, config.whole("layer_group_size")
    kda = config.given("short_conv_kernel_size")
    # Every layer_group_size-th layer is an attention layer; with KDA, so are those of an unfinished last group.
    attention = sum(
        1 for layer in range(layers) if (layer + 1) % group == 0 or (kda and layer >= layers // group * group)
    )
    heads, head = config.whole("num_attention_heads"), config.head_size
    state = (
        LinearState.kimi_delta_attention(
            layers - attention,
            heads=heads,
            head_size=head,
            conv_kernel=config.whole("short_conv_kernel_size"),
            state_dtype_bytes=size.state,
        )
        if kda
        else LinearState.lightning(
            layers - attention, heads=heads, head_size=head, state_dtype_bytes=size.state
        )
    )
    full = (
        _mla(config, attention, size)
        if config.given("kv_lora_rank")
        else FullAttention(attention, config.kv_heads, head, head, size.kv)
    )
    return [full, state]


def _minimax(config: ConfigFields, size: ElementBytes) -> list[Group]:
    marks = config.entries("attn_type_list", config.layers)
    types = (
        [FULL if mark == 1 else LINEAR for mark in marks]
        if marks is not None
        else config.layer_types(lambda layer: LINEAR if layer % 2 else FULL)
    )
    state = LinearState.lightning(
        types.count(LINEAR),
        heads=config.whole("num_attention_heads"),
        head_size=config.head_size,
        state_dtype_bytes=size.state,
    )
    return [*_attention(config, types, size), state]


# Fields of caches that a list of layer types doesn't tell the shape of.
_UNUSUAL = (
    *(
        "kv_lora",
        "swa_",
        "mamba",
        "ssm_",
        "linear_",
        "conv_",
        "index_",
        "compress",
        "attention_chunk",
        "v_head_dim",
    ),
    *(
        "global_",
        "num_global",
        "num_kv_shared",
        "attention_other",
        "hybrid_",
        "cross_attention",
        "recurrent",
        "lru_",
    ),
)


def by_layer_types(config: ConfigFields, size: ElementBytes) -> list[Group] | None:
    """A family without a reader whose file lists its layers, all full or sliding attention; None where that fails."""
    listed = config.fields.get("layer_types")
    unusual = any(config.given(field) for field in config.fields if field.startswith(_UNUSUAL))
    if not isinstance(listed, list) or not set(map(str, listed)) <= {FULL, SLIDING} or unusual:
        return None
    return _plain(config, size)


_PLAIN = (
    *("cohere", "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe"),
    *(
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "internlm2",
        "internlm3",
        "llama",
        "minimax_m2",
        "olmo",
        "olmo2",
        "olmoe",
    ),
    *("phi", "smollm3"),
)

READERS: Mapping[str, Reader] = {
    **dict.fromkeys(_PLAIN, _plain),
    **dict.fromkeys(("mistral", "mixtral", "phi3", "starcoder2"), _window_everywhere),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _qwen),
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma(2),
    **dict.fromkeys(("gemma3", "gemma3_text"), _gemma(6)),
    **dict.fromkeys(("step3p5", "step3p7"), _step),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _qwen_next),
    "mimo_v2_flash": _mimo_v2,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), _deepseek),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _deepseek_sparse),
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite_hybrid,
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear"), _bailing_hybrid),
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_text_01"), _minimax),
}
