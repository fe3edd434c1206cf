"""The layers that draft tokens for a model, as far as they keep a KVCache: MTP, EAGLE, or a model of their own.

What decides is read in vLLM 0.32: vllm/config/speculative.py, `__post_init__` and `hf_config_override`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prfaas.core.kv.config_fields import FULL, ConfigError, ConfigFields
from prfaas.core.kv.dtypes import CacheDtypes, KvCacheDtype
from prfaas.core.kv.hf_config import kept_dtype, model_from_config, read_config, text_fields
from prfaas.core.kv.model import Group, KvModel
from prfaas.core.kv.sparse_families import SPARSE_MLA


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an engine drafts tokens with. How many at a time is no part of it: a prompt's KVCache is the same."""

    method: str = ""
    """In vLLM's words; "": as the model says."""
    model: str = ""
    """Directory or name of the drafter's checkpoint; "": it is part of the model's own."""
    kv_cache_dtype: KvCacheDtype | None = None
    """What the drafter keeps K and V in; None: what the model does."""


class DrafterError(ConfigError):
    """A drafter whose KVCache is not known. The model's own is."""


# They look drafts up, or their heads keep nothing of a prompt.
_METHODS_WITHOUT_KV = (
    *("ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class"),
    *("medusa", "mlp_speculator", "extract_hidden_states"),
)
# The same by the drafter's file. Gemma 4's assistant reads the model's caches: models/gemma4_mtp.py.
_FAMILIES_WITHOUT_KV = ("medusa", "mlp_speculator", "gemma4_assistant", "gemma4_unified_assistant")


def with_drafter(
    model: KvModel, config: Mapping[str, Any], speculation: Speculation | None, dtypes: CacheDtypes
) -> KvModel:
    """The KVCache of an engine that drafts: of its model, and of what drafts for it.

    Args:
        model: what the engine keeps without a drafter.
        config: the fields of the model's `config.json`.
        speculation: of the engine; None: it has none.
        dtypes: of the engine's caches.

    Raises:
        DrafterError: what it keeps is not known, or its `config.json` is not here.
    """
    if speculation is None or _keeps_nothing(speculation):
        return model
    try:
        groups = _drafters_groups(config, speculation, dtypes)
    except ConfigError as error:
        raise DrafterError(f"what drafts tokens: {error}") from None
    # Machines may have the same checkpoint in other places.
    drafter = Path(speculation.model).name or "mtp"
    return replace(
        model, groups=(*model.groups, *groups), drafter=drafter if groups else "", drafter_groups=len(groups)
    )


def _drafters_groups(
    config: Mapping[str, Any], speculation: Speculation, dtypes: CacheDtypes
) -> tuple[Group, ...]:
    own = ConfigFields(_drafters_fields(speculation.model) if speculation.model else text_fields(config))
    family = str(own.fields.get("model_type"))
    if family in _FAMILIES_WITHOUT_KV:
        return ()
    kept: Any = kept_dtype(config, dtypes)
    # A drafter's checkpoint has no say in it.
    kv_cache = speculation.kv_cache_dtype or ("auto" if kept == "float32" else kept)
    fields = {**own.fields, "quantization_config": None}
    if family in _MTP:
        fields |= _MTP[family](own)
    elif not speculation.model:
        raise ConfigError(f'the layers of model_type "{family}" that do so are not known')
    return model_from_config(fields, dtypes=replace(dtypes, kv_cache=kv_cache)).groups


def _keeps_nothing(speculation: Speculation) -> bool:
    if speculation.method:
        return speculation.method in _METHODS_WITHOUT_KV
    # vLLM takes a dotted name for a class of the user's.
    parts = speculation.model.split(".")
    return speculation.model in _METHODS_WITHOUT_KV or (len(parts) > 1 and all(map(str.isidentifier, parts)))


def _drafters_fields(name: str) -> dict[str, Any]:
    """What a drafter's `config.json` says of its layers."""
    if not Path(name).is_dir():
        raise ConfigError(f"{name} is no directory on this machine; name that of its checkpoint")
    fields = text_fields(read_config(Path(name) / "config.json"))
    # Where the library "speculators" has it.
    layers = fields.get("transformer_layer_config")
    return {**fields, **layers} if isinstance(layers, Mapping) else fields


_Fields = Callable[[ConfigFields], Mapping[str, Any]]
_COUNT = "num_nextn_predict_layers"


def _layers(
    *, counted_by: str | None = _COUNT, each: Mapping[str, str | list[Any]] | None = None, **fields: Any
) -> _Fields:
    """What the file would say of the layers of multi-token prediction, were they a model.

    Args:
        counted_by: the field that says how many there are; None: one. Published files that leave it out have one:
            `getattr` in qwen3_next_mtp.py and others.
        each: by field, what stands there for every layer.
        fields: what else.
    """

    def read(config: ConfigFields) -> Mapping[str, Any]:
        layers = 1 if counted_by is None else config.layer_count(counted_by, 1)
        listed = {name: entry * layers for name, entry in (each or {}).items()}
        return {"num_hidden_layers": layers, **fields, **listed}

    return read


def _layers_of_step(config: ConfigFields) -> Mapping[str, Any]:
    """The file's list of kinds goes on over them: step3p5_mtp.py."""
    layers = config.layer_count(_COUNT, 1)
    listed = config.entries("layer_types", None) or []
    types = [*listed[config.layers : config.layers + layers]]
    return {
        "num_hidden_layers": layers,
        "layer_types": [*types, *[FULL] * (layers - len(types))] if listed else None,
    }


def _pattern_of_nemotron(config: ConfigFields) -> Mapping[str, Any]:
    """Attention and experts in turns: nemotron_h_mtp.py."""
    pattern = config.fields.get("mtp_hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise ConfigError("mtp_hybrid_override_pattern must be text of * (attention) and E (experts)")
    return {"hybrid_override_pattern": pattern * config.layer_count(_COUNT, 1)}


_QWEN3_5 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_MTP: Mapping[str, _Fields] = {
    # Full attention, whatever the model's own are: qwen3_next_mtp.py, glm4_moe_mtp.py, ernie_mtp.py.
    **dict.fromkeys(("qwen3_next", "glm4_moe", "ernie4_5_moe"), _layers(each={"layer_types": [FULL]})),
    # qwen3_5_mtp.py `Qwen3_5MultiTokenPredictor`.
    **dict.fromkeys(_QWEN3_5, _layers(counted_by="mtp_num_hidden_layers", each={"layer_types": [FULL]})),
    # MLA: deepseek_mtp.py and glm4_moe_lite_mtp.py.
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), _layers()),
    # Each has an index of its own: `is_mtp_layer` in vllm/models/deepseek_v32/attention.py.
    **dict.fromkeys(SPARSE_MLA, _layers(each={"index_topk_pattern": "F"}, indexer_types=None)),
    # One of MLA, where the model's own have two each: longcat_flash_mtp.py.
    "longcat_flash": _layers(counted_by=None, model_type="deepseek_v3"),
    # MLA in each: bailing_moe_mtp.py.
    "bailing_hybrid": _layers(layer_group_size=1),
    # vLLM knows the first one, with the window of the model's: mimo_v2_mtp.py `MiMoV2MTPLayer`.
    "mimo_v2_flash": _layers(counted_by=None, each={"hybrid_layer_pattern": [1]}),
    **dict.fromkeys(("step3p5", "step3p7"), _layers_of_step),
    "nemotron_h": _pattern_of_nemotron,
    # As layers of Qwen2: mimo_mtp.py.
    "mimo": _layers(),
    # A window alone: vllm/models/deepseek_v4, where the list of ratios goes on over these layers.
    "deepseek_v4": _layers(each={"compress_ratios": [0]}),
}
"""By family, the fields of a file of its layers of multi-token prediction."""
