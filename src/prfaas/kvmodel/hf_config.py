"""Reads the KVCache's shape out of a Hugging Face `config.json`.

Field names and defaults are those of the model code in transformers 5.x and vLLM 0.32. Caches are counted as
vLLM lays them out with `--dtype auto` (two bytes) and fp32 recurrent state.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.kvmodel.full_attention import FullAttention
from prfaas.kvmodel.linear_state import LinearState
from prfaas.kvmodel.model import Group, KvModel
from prfaas.kvmodel.sliding_window import SlidingWindow

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


class ConfigError(ValueError):
    """A `config.json` that the KVCache can't be read out of."""


def model_from_directory(directory: Path, *, name: str | None = None, kv_dtype_bytes: int = 2) -> KvModel:
    """The KVCache of the checkpoint in `directory`.

    Raises:
        ConfigError: no readable `config.json`, an unknown `model_type`, or a field that is missing or wrong.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: can't be read as JSON ({error}); name a Hugging Face checkpoint"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold one JSON object")
    try:
        return model_from_config(config, name=name or directory.name, kv_dtype_bytes=kv_dtype_bytes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def model_from_config(
    config: Mapping[str, Any],
    *,
    name: str | None = None,
    kv_dtype_bytes: int = 2,
    state_dtype_bytes: int = 4,
) -> KvModel:
    """The KVCache of a model with this configuration. Multimodal ones are read from their `text_config`.

    Raises:
        ConfigError: the `model_type` is unknown, or a field is missing or wrong.
    """
    text = config.get("text_config")
    reader = _Config({**config, **text} if isinstance(text, Mapping) else config)
    model_type = str(reader.fields.get("model_type"))
    if model_type not in _READERS:
        raise ConfigError(
            f'the KVCache of model_type "{model_type}" is not known; known are {", ".join(sorted(_READERS))}'
        )
    groups = _READERS[model_type](reader, _Bytes(kv_dtype_bytes, state_dtype_bytes))
    return KvModel(name or model_type, tuple(group for group in groups if group.layers > 0))


@dataclass(frozen=True, slots=True)
class _Bytes:
    kv: int
    state: int


class _Config:
    """Typed access to fields, with an error that names the field."""

    def __init__(self, fields: Mapping[str, Any], inside: str = "") -> None:
        self.fields = fields
        self._inside = inside

    def whole(self, field: str, default: int | None = None) -> int:
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._inside}{field} must be a whole number above 0, not {value!r}")
        return value

    def section(self, field: str) -> "_Config":
        value = self.fields.get(field)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._inside}{field} must be an object, not {value!r}")
        return _Config(value, f"{self._inside}{field}.")

    def entries(self, field: str, length: int | None) -> Sequence[Any] | None:
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or (length is not None and len(value) != length):
            needed = "a list" if length is None else f"a list of {length} entries, one per layer"
            raise ConfigError(f"{self._inside}{field} must be {needed}")
        return value

    @property
    def layers(self) -> int:
        return self.whole("num_hidden_layers")

    @property
    def kv_heads(self) -> int:
        return self.whole("num_key_value_heads", self.whole("num_attention_heads"))

    @property
    def head_size(self) -> int:
        if self.fields.get("head_dim") is not None:
            return self.whole("head_dim")
        return self.whole("hidden_size") // self.whole("num_attention_heads")

    def layer_types(self, default: Callable[[int], str]) -> Sequence[str]:
        given = self.entries("layer_types", self.layers)
        types = [str(kind) for kind in given] if given else [default(i) for i in range(self.layers)]
        unknown = sorted(set(types) - {FULL, SLIDING, LINEAR})
        if unknown:
            raise ConfigError(
                f'layer_types: "{unknown[0]}" is not known; known are {FULL}, {SLIDING}, {LINEAR}'
            )
        return types


def _attention(config: _Config, types: Sequence[str], size: _Bytes) -> list[Group]:
    heads, head = config.kv_heads, config.head_size
    groups: list[Group] = [FullAttention(types.count(FULL), heads, head, head, size.kv)]
    if SLIDING in types:
        window = config.whole("sliding_window")
        groups.append(SlidingWindow(types.count(SLIDING), heads, head, head, window, size.kv))
    return groups


def _llama(config: _Config, size: _Bytes) -> list[Group]:
    return _attention(config, config.layer_types(lambda _: FULL), size)


def _mistral(config: _Config, size: _Bytes) -> list[Group]:
    kind = FULL if config.fields.get("sliding_window") is None else SLIDING
    return _attention(config, config.layer_types(lambda _: kind), size)


def _qwen(config: _Config, size: _Bytes) -> list[Group]:
    if not config.fields.get("use_sliding_window"):
        return _attention(config, [FULL] * config.layers, size)
    first = config.whole("max_window_layers", 28)
    return _attention(config, config.layer_types(lambda layer: SLIDING if layer >= first else FULL), size)


def _gpt_oss(config: _Config, size: _Bytes) -> list[Group]:
    return _attention(config, config.layer_types(lambda layer: FULL if layer % 2 else SLIDING), size)


def _qwen_next(config: _Config, size: _Bytes) -> list[Group]:
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


def _mimo_v2(config: _Config, size: _Bytes) -> list[Group]:
    pattern = config.entries("hybrid_layer_pattern", config.layers)
    if pattern is None:
        raise ConfigError("hybrid_layer_pattern must be a list with one entry per layer")
    full_head = config.head_size
    swa_head = config.whole("swa_head_dim")
    windows = sum(1 for entry in pattern if entry == 1)
    return [
        FullAttention(
            len(pattern) - windows, config.kv_heads, full_head, config.whole("v_head_dim", full_head), size.kv
        ),
        SlidingWindow(
            windows,
            config.whole("swa_num_key_value_heads"),
            swa_head,
            config.whole("swa_v_head_dim", swa_head),
            config.whole("sliding_window_size"),
            size.kv,
        ),
    ]


def _mla(config: _Config, layers: int, size: _Bytes) -> FullAttention:
    latent = config.whole("kv_lora_rank") + config.whole("qk_rope_head_dim")
    return FullAttention(layers, 1, latent, 0, size.kv)


def _deepseek(config: _Config, size: _Bytes) -> list[Group]:
    return [_mla(config, config.layers, size)]


def _kimi_linear(config: _Config, size: _Bytes) -> list[Group]:
    linear = config.section("linear_attn_config")
    layers = len(linear.entries("kda_layers", None) or ())
    heads, head = linear.whole("num_heads"), linear.whole("head_dim")
    state = LinearState.gated_delta_net(
        layers,
        key_heads=heads,
        value_heads=heads,
        key_head_size=head,
        value_head_size=head,
        conv_kernel=linear.whole("short_conv_kernel_size"),
        state_dtype_bytes=size.state,
    )
    return [_mla(config, config.layers - layers, size), state]


_READERS: Mapping[str, Callable[[_Config, _Bytes], list[Group]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "minimax_m2": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen_next,
    "qwen3_5": _qwen_next,
    "qwen3_5_text": _qwen_next,
    "qwen3_5_moe": _qwen_next,
    "qwen3_5_moe_text": _qwen_next,
    "mimo_v2_flash": _mimo_v2,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "kimi_linear": _kimi_linear,
}
