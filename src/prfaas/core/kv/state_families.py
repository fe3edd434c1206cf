"""Readers of families with a recurrent state or a short convolution in some layers, beside attention in others.

Names of files and classes as in `families`. Shapes of states are in vLLM's `MambaStateShapeCalculator`
(vllm/model_executor/layers/mamba/mamba_utils.py), which `LinearState` follows.
"""

from collections.abc import Mapping, Sequence

from prfaas.core.kv.config_fields import FULL, LINEAR, ConfigError, ConfigFields, ElementBytes
from prfaas.core.kv.families import Reader, attention, latent_attention
from prfaas.core.kv.layers import FullAttention, LinearState
from prfaas.core.kv.model import Group

MAMBA, ATTENTION = "M", "*"
_BLOCK_TYPES = {"mamba": MAMBA, LINEAR: MAMBA, "attention": ATTENTION, FULL: ATTENTION}


def _attention_layers(config: ConfigFields, layers: int, size: ElementBytes) -> FullAttention:
    head = config.head_size
    return FullAttention(layers, config.kv_heads, head, head, size.kv)


def _qwen_next(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Every n-th layer is full attention, the others Gated DeltaNet: qwen3_next.py `Qwen3NextDecoderLayer`."""
    interval = config.whole("full_attention_interval", 4)
    types = config.layer_types(lambda layer: LINEAR if (layer + 1) % interval else FULL)
    return [*attention(config, types, size), gated_delta_net(config, types.count(LINEAR), size)]


def gated_delta_net(config: ConfigFields, layers: int, size: ElementBytes) -> LinearState:
    """Gated DeltaNet by the names of fields that Qwen's families share."""
    return LinearState.gated_delta_net(
        layers,
        key_heads=config.whole("linear_num_key_heads"),
        value_heads=config.whole("linear_num_value_heads"),
        key_head_size=config.whole("linear_key_head_dim"),
        value_head_size=config.whole("linear_value_head_dim"),
        conv_kernel=config.whole("linear_conv_kernel_dim"),
        size=size,
    )


def _kimi_linear(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """MLA and Kimi Delta Attention: vllm/models/kimi_k3 `KimiDecoderLayer`."""
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
        size=size,
    )
    return [latent_attention(config, config.layers - len(listed), size), state]


def _nemotron_h(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Attention, Mamba2, and layers without a cache: nemotron_h.py `NemotronHForCausalLM`.

    Without a `head_dim` it is 128, whatever the width: transformers `NemotronHConfig`.
    """
    kinds = _nemotron_layers(config)
    state = LinearState.mamba2(
        kinds.count(MAMBA),
        heads=config.whole("mamba_num_heads"),
        head_size=config.whole("mamba_head_dim"),
        groups=config.whole("n_groups"),
        state_size=config.whole("ssm_state_size"),
        conv_kernel=config.whole("conv_kernel"),
        size=size,
    )
    return [_attention_layers(config, kinds.count(ATTENTION), size), state]


def _nemotron_layers(config: ConfigFields) -> str:
    """One letter per layer: M Mamba2, * attention, - MLP, E experts. The pattern string, or a list of names."""
    names = {**_BLOCK_TYPES, "mlp": "-", "moe": "E"}
    pattern = config.fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set(names.values()):
        return pattern
    listed = config.entries("layers_block_type", None) or config.entries("layer_types", None)
    if pattern is None and listed and set(listed) <= set(names):
        return "".join(names[str(kind)] for kind in listed)
    raise ConfigError(
        f"hybrid_override_pattern must be text of M (Mamba2), * (attention), - (MLP) and E (experts), not {pattern!r}"
    )


def _block_types(config: ConfigFields, field: str) -> Sequence[str] | None:
    """M or * for every layer that `field` lists; None where the file has no such field."""
    listed = config.entries(field, config.layers)
    if listed is None:
        return None
    if not set(map(str, listed)) <= set(_BLOCK_TYPES):
        raise ConfigError(f"{field} must be a list of {', '.join(_BLOCK_TYPES)}, one per layer")
    return [_BLOCK_TYPES[str(kind)] for kind in listed]


def _mamba2(config: ConfigFields, layers: int, inner: int, size: ElementBytes) -> LinearState:
    """Mamba2 of width `inner`, with the field names that Granite 4 and Falcon-H1 share."""
    heads = config.whole("mamba_n_heads")
    if inner % heads:
        raise ConfigError(f"mamba_n_heads must divide the width of Mamba2, {inner}; {heads} does not")
    numbered = isinstance(config.fields.get("mamba_d_head"), int)
    return LinearState.mamba2(
        layers,
        heads=heads,
        head_size=config.whole("mamba_d_head") if numbered else inner // heads,
        groups=config.whole("mamba_n_groups", 1),
        state_size=config.whole("mamba_d_state", 256),
        conv_kernel=config.whole("mamba_d_conv", 4),
        size=size,
    )


def _granite_hybrid(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Attention and Mamba2: granitemoehybrid.py `GraniteMoeHybridForCausalLM`."""
    kinds = _block_types(config, "layer_types")
    if not kinds:
        raise ConfigError(f"layer_types must be a list of {', '.join(_BLOCK_TYPES)}, one per layer")
    inner = config.whole("mamba_expand", 2) * config.whole("hidden_size")
    state = _mamba2(config, kinds.count(MAMBA), inner, size)
    return [_attention_layers(config, kinds.count(ATTENTION), size), state]


def _falcon_h1(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Attention and Mamba2 side by side in every layer: falcon_h1.py `FalconH1ParallelHybrid`."""
    inner = (
        config.whole("mamba_d_ssm")
        if config.given("mamba_d_ssm")
        else config.whole("mamba_expand", 2) * config.whole("hidden_size")
    )
    layers = config.layers
    return [_attention_layers(config, layers, size), _mamba2(config, layers, inner, size)]


def _jamba(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Attention every `attn_layer_period` layers, Mamba in the others: jamba.py `JambaForCausalLM`."""
    period, offset = config.whole("attn_layer_period", 8), config.count("attn_layer_offset", 4)
    if offset >= period:
        raise ConfigError(f"attn_layer_offset must be below attn_layer_period ({period}), not {offset}")
    full = sum(1 for layer in range(config.layers) if layer % period == offset)
    state = LinearState.mamba1(
        config.layers - full,
        channels=config.whole("mamba_expand", 2) * config.whole("hidden_size"),
        state_size=config.whole("mamba_d_state", 16),
        conv_kernel=config.whole("mamba_d_conv", 4),
        size=size,
    )
    return [_attention_layers(config, full, size), state]


def _lfm2(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Attention, and short convolutions without a recurrent state: lfm2.py `Lfm2ForCausalLM`, lfm2_moe.py.

    `full_attn_idxs` of older files: transformers `Lfm2Config.__post_init__`.
    """
    types = config.entries("layer_types", config.layers)
    if types is not None:
        if not all(kind in (FULL, "conv") for kind in types):
            raise ConfigError(f"layer_types must be a list of {FULL} and conv, not {types!r}")
        full = sum(1 for kind in types if kind == FULL)
    else:
        indices = config.layer_numbers("full_attn_idxs", first=0)
        full = len(indices) if indices is not None else config.layers
    channels = config.whole("conv_dim") if config.given("conv_dim") else config.whole("hidden_size")
    kernel = config.whole("conv_L_cache", 3)
    state = LinearState.short_conv(config.layers - full, channels=channels, conv_kernel=kernel, size=size)
    return [_attention_layers(config, full, size), state]


def _bailing_hybrid(config: ConfigFields, size: ElementBytes) -> list[Group]:
    """Lightning (Ring 2.5) or KDA (Ling 3): bailing_moe_linear.py `BailingMoeV25DecoderLayer`, bailing_moe_v3.py."""
    layers, group = config.layers, config.whole("layer_group_size")
    kda = config.given("short_conv_kernel_size")
    # Every layer_group_size-th layer is an attention layer; with KDA, so are those of an unfinished last group.
    full_layers = sum(
        1 for layer in range(layers) if (layer + 1) % group == 0 or (kda and layer >= layers // group * group)
    )
    heads, head = config.whole("num_attention_heads"), config.head_size
    state = (
        LinearState.kimi_delta_attention(
            layers - full_layers,
            heads=heads,
            head_size=head,
            conv_kernel=config.whole("short_conv_kernel_size"),
            size=size,
        )
        if kda
        else LinearState.lightning(layers - full_layers, heads=heads, head_size=head, size=size)
    )
    full = (
        latent_attention(config, full_layers, size)
        if config.given("kv_lora_rank")
        else _attention_layers(config, full_layers, size)
    )
    return [full, state]


STATE_READERS: Mapping[str, Reader] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _qwen_next),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), _kimi_linear),
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear"), _bailing_hybrid),
}
