"""The work of a model per token: parameters, attention and weights, counted from its `config.json`.

Counted are the matrices, which are all but a thousandth of a model. Norms, biases, convolutions, routers, a vision
tower and the layers of multi-token prediction are not.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.core.kv.config_fields import ConfigError, ConfigFields, family_defaults
from prfaas.core.kv.dtypes import DEFAULT_DTYPES, CacheDtypes
from prfaas.core.kv.hf_config import model_from_config, text_fields
from prfaas.core.kv.layers import CompressedAttention, FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.model import KvModel
from prfaas.core.latency.feed_forward import Experts, feed_forward, with_usual_names


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored, and what the matrix units multiply."""

    name: str
    dense_bytes: float
    """Per parameter outside of the routed experts."""
    expert_bytes: float
    compute: str
    """"bf16", "fp8" or "fp4"."""


# Four bits with one scale of 8 bits per 16 (nvfp4) or 32 values (mxfp4), or of 16 bits per 128 (int4 of AWQ and GPTQ).
WEIGHT_FORMATS = {
    each.name: each
    for each in (
        WeightFormat("bf16", 2, 2, "bf16"),
        WeightFormat("fp8", 1, 1, "fp8"),
        WeightFormat("int4", 0.53, 0.53, "bf16"),
        WeightFormat("int4-experts", 2, 0.53, "bf16"),
        WeightFormat("mxfp4-experts", 2, 0.53, "bf16"),
        WeightFormat("nvfp4", 0.5625, 0.5625, "fp4"),
    )
}


@dataclass(frozen=True, slots=True)
class SoftmaxLayers:
    """`layers` attention layers; a pair of query and key costs 2 · `width` FLOPs in each."""

    layers: int
    width: int
    """Query heads × (size of a key + size of a value)."""
    window_tokens: int | None = None
    """None: every token sees all before it."""

    def prefill_flops(self, tokens: float) -> float:
        """FLOPs over the pairs of a causal prompt."""
        seen = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        return 2 * self.layers * self.width * (seen * (seen + 1) / 2 + (tokens - seen) * seen)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """One model, whole: what all its ranks together compute and read."""

    name: str
    layers: int
    hidden_size: int
    dense_params: int
    """Parameters that every token is multiplied with, routed experts and output head left out."""
    head_params: int
    """Of the output head: for the last token of a prompt, and for every token that is decoded."""
    experts: Experts | None
    softmax: tuple[SoftmaxLayers, ...]
    kv: KvModel
    weights: WeightFormat

    @property
    def total_params(self) -> int:
        """Parameters of the model; its input embedding counts as large as the output head."""
        experts = self.experts.layers * self.experts.count * self.experts.params if self.experts else 0
        return self.dense_params + 2 * self.head_params + experts

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied with, the output head included."""
        experts = self.experts.layers * self.experts.per_token * self.experts.params if self.experts else 0
        return self.dense_params + self.head_params + experts

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in memory."""
        return self.read_bytes(float("inf")) + self.head_params * self.weights.dense_bytes

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights that a step over `tokens` tokens reads: once, and of the experts only those it takes."""
        read = (self.dense_params + self.head_params) * self.weights.dense_bytes
        if self.experts is not None:
            touched = self.experts.touched(tokens)
            read += self.experts.layers * touched * self.experts.params * self.weights.expert_bytes
        return read

    def prefill_flops(self, tokens: float) -> tuple[float, float]:
        """FLOPs of a prompt of `tokens` tokens: (in matrices of weights, in softmax attention)."""
        matrices = 2 * ((self.active_params - self.head_params) * tokens + self.head_params)
        return matrices, sum(each.prefill_flops(tokens) for each in self.softmax)


def model_work(
    config: Mapping[str, Any],
    name: str,
    weights: WeightFormat | None = None,
    dtypes: CacheDtypes = DEFAULT_DTYPES,
) -> ModelWork:
    """The work of the model with this configuration. Multimodal ones are read from their `text_config`.

    Args:
        config: what its `config.json` holds.
        name: of the model, for people.
        weights: how its weights are stored; None: as its `quantization_config` says.
        dtypes: of its caches.

    Raises:
        ConfigError: the model is not known, a field is missing or wrong, or its caches have no such dtype.
    """
    kv = model_from_config(config, name=name, dtypes=dtypes)
    # Shapes are those of caches of two bytes: an fp8 layout may be no multiple of them.
    # A layer that reads the cache of another one computes as much as that.
    text = text_fields(config)
    own_caches = {**text, "num_kv_shared_layers": 0} if "num_kv_shared_layers" in text else text
    shapes = model_from_config(own_caches, name=name, dtypes=CacheDtypes("bfloat16"))
    family = str(text.get("model_type"))
    defaults = {**family_defaults(family), **_VOCABULARY.get(family, {})}
    fields = with_usual_names(ConfigFields(text)).with_defaults(defaults)
    hidden = fields.whole("hidden_size")
    mixers = 0
    softmax: list[SoftmaxLayers] = []
    for group in shapes.groups:
        if isinstance(group, LinearState):
            mixers += group.layers * _linear_params(group, fields)
        elif isinstance(group, FullAttention) and group.is_mla:
            params, layers = _latent(group, fields)
            mixers += params
            softmax += layers
        else:
            params, layer = _grouped(group, fields)
            mixers += params
            softmax.append(layer)
    dense, experts = feed_forward(fields)
    return ModelWork(
        name=name,
        layers=fields.layers,
        hidden_size=hidden,
        dense_params=mixers + dense,
        head_params=fields.whole("vocab_size") * hidden,
        experts=experts,
        softmax=tuple(softmax),
        kv=kv,
        weights=weights or weight_format(config),
    )


def weight_format(config: Mapping[str, Any]) -> WeightFormat:
    """How the checkpoint of this configuration stores its weights, by its `quantization_config`; else bf16.

    Raises:
        ConfigError: it is stored in a way that is not known.
    """
    given = config.get("quantization_config") or text_fields(config).get("quantization_config")
    if not isinstance(given, Mapping):
        return WEIGHT_FORMATS["bf16"]
    found = _of_weights(given)
    method = str(found.get("quant_method", "")).lower()
    detail = str(found).lower()
    stored = list(_stored(found))
    if method == "mxfp4":
        return WEIGHT_FORMATS["mxfp4-experts"]
    if "nvfp4" in detail:
        return WEIGHT_FORMATS["nvfp4"]
    if method in ("fp8", "fbgemm_fp8") or "fp8" in detail or (8, "float") in stored:
        return WEIGHT_FORMATS["fp8"]
    if "w4a16" in detail or (method in ("awq", "gptq", "auto-round") and found.get("bits", 4) == 4):
        return WEIGHT_FORMATS["int4"]
    if any(bits == 4 for bits, _ in stored):
        # What stays as it is is listed; in a mixture of experts, that is all but the routed ones.
        return WEIGHT_FORMATS["int4-experts" if "expert" in detail else "int4"]
    raise ConfigError(
        f'quantization_config: how "{method}" stores weights is not known; say it: {", ".join(WEIGHT_FORMATS)}'
    )


def _of_weights(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section on quantization, without what it says of KV caches."""
    return {
        field: _of_weights(value) if isinstance(value, Mapping) else value
        for field, value in section.items()
        if not str(field).startswith("kv_cache")
    }


def _stored(section: Any) -> Iterator[tuple[int, str]]:
    """(bits, "int" or "float") of all weights that a section of compressed-tensors describes, however deep."""
    if isinstance(section, Mapping):
        if isinstance(section.get("num_bits"), int):
            yield section["num_bits"], str(section.get("type", "int"))
        for part in section.values():
            yield from _stored(part)


def _grouped(group: FullAttention | SlidingWindow, fields: ConfigFields) -> tuple[int, SoftmaxLayers]:
    """Parameters of all layers with K and V of some heads, and their attention."""
    window = group.window_tokens if isinstance(group, SlidingWindow) else None
    heads = fields.whole("num_attention_heads")
    if window is not None:
        heads = fields.whole("swa_num_attention_heads", heads)
    hidden, key, value = fields.whole("hidden_size"), group.head_size_k, group.head_size_v
    gate = heads * value if _output_gate(fields) else 0
    # Step 3 projects queries in two steps: step3_text.py `Step3TextAttention`.
    low_rank = fields.whole("share_q_dim") if fields.given("share_q_dim") else None
    params = _query_params(hidden, heads * key, low_rank)
    params += hidden * (heads * value + gate + group.kv_heads * (key + value))
    return group.layers * params, SoftmaxLayers(group.layers, heads * (key + value), window)


def _query_params(hidden: int, width: int, low_rank: int | None) -> int:
    """Parameters that make queries of `width` values, through `low_rank` values where that is not None."""
    return hidden * width if low_rank is None else low_rank * (hidden + width)


def _output_gate(fields: ConfigFields) -> bool:
    """Whether each attention head's output is gated: Qwen3-Next always, Qwen3.5 where `attn_output_gate` says so."""
    return bool(
        fields.fields.get("attn_output_gate", str(fields.fields.get("model_type")).startswith("qwen3_next"))
    )


def _latent(group: FullAttention, fields: ConfigFields) -> tuple[int, list[SoftmaxLayers]]:
    """Parameters of all MLA layers, and their attention; of the index of sparse attention, where it is one."""
    if isinstance(group, CompressedAttention) or not fields.given("kv_lora_rank"):
        family = fields.fields.get("model_type")
        raise ConfigError(
            f'what sparse layers of model_type "{family}" cost is not known; measure: prfaas profile'
        )
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    latent, rope = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim")
    low_rank = fields.whole("q_lora_rank") if fields.given("q_lora_rank") else None
    if group.head_size_k != latent + rope:
        index_heads, index = fields.whole("index_n_heads"), fields.whole("index_head_dim")
        params = (low_rank or hidden) * index_heads * index + hidden * (index + index_heads)
        return group.layers * params, [SoftmaxLayers(group.layers, index_heads * index)]
    key, value = fields.whole("qk_nope_head_dim", 128) + rope, fields.whole("v_head_dim", 128)
    params = _query_params(hidden, heads * key, low_rank)
    params += hidden * (latent + rope) + latent * heads * (key - rope + value) + heads * value * hidden
    sparse = fields.whole("index_topk") if fields.given("index_topk") else None
    return group.layers * params, [SoftmaxLayers(group.layers, heads * (key + value), sparse)]


def _linear_params(group: LinearState, fields: ConfigFields) -> int:
    """Parameters of one layer with a recurrent state, from the shapes of its state and convolution."""
    hidden = fields.whole("hidden_size")
    if group.kind == "ShortConv":
        # Two gates and what they gate, and the way back: vllm/model_executor/layers/mamba/short_conv.py `ShortConv`.
        return 4 * hidden * hidden
    # LinearState counts fp32 states and bf16 convolutions of kernel - 1 columns.
    elements = group.recurrent_bytes // 4
    if not group.conv_bytes:
        inner = group.heads * math.isqrt(elements // group.heads)
        return hidden * 5 * inner
    section = fields.fields.get("linear_attn_config")
    kernel = fields.whole(
        "linear_conv_kernel_dim",
        fields.whole("conv_kernel", fields.whole("mamba_d_conv", fields.whole("short_conv_kernel_size", 4))),
    )
    if isinstance(section, Mapping):
        kernel = fields.section("linear_attn_config").whole("short_conv_kernel_size", kernel)
    column = 2 * (kernel - 1)
    grouped = group.grouped_conv_bytes // column
    inner = group.conv_bytes // column - grouped
    if group.kind == "KDA":
        # Decay and output gate go through one head's size.
        gates = 2 * (hidden + inner) * (inner // group.heads) + hidden * group.heads
        return hidden * (grouped + inner) + gates + inner * hidden
    per_head = 2 if group.kind == "GDN" else 1
    return hidden * (grouped + 2 * inner + per_head * group.heads) + inner * hidden


# Tokens that published files of Gemma 3 leave out: transformers/models/gemma3/configuration_gemma3.py.
_VOCABULARY = {family: {"vocab_size": 262_208} for family in ("gemma3", "gemma3_text")}
