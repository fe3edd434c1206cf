"""Reads the KVCache's shape out of a Hugging Face `config.json`.

Caches are counted as vLLM lays them out with `--dtype auto` (two bytes, whatever the checkpoint's own dtype) and
fp32 recurrent state, unless asked for otherwise.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prfaas.core.kv.config_fields import FAMILY_DEFAULTS, ConfigError, ConfigFields, ElementBytes
from prfaas.core.kv.families import (
    ATTENTION_READERS,
    FP8_DS_MLA,
    FP8_LAYOUTS,
    SPARSE_MLA,
    Reader,
    by_layer_types,
)
from prfaas.core.kv.layers import FullAttention, SlidingWindow
from prfaas.core.kv.model import Group, KvModel
from prfaas.core.kv.state_families import STATE_READERS

READERS: Mapping[str, Reader] = {**ATTENTION_READERS, **STATE_READERS}

# Files of LongCat-Flash have no model_type: vllm/transformers_utils/config.py, _ARCHITECTURE_TO_MODEL_TYPE.
_MODEL_TYPES = dict.fromkeys(("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"), "longcat_flash")

# Scalings of RoPE that leave max_position_embeddings as the whole context: vllm/config/model.py,
# _get_and_verify_max_len. Others (linear, dynamic) multiply it by their factor.
_WHOLE_CONTEXT_ROPE = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def model_from_directory(
    directory: Path,
    *,
    name: str | None = None,
    kv_dtype_bytes: int = 2,
    state_dtype_bytes: int = 4,
    fp8_layout: str | None = None,
) -> KvModel:
    """The KVCache of the checkpoint in `directory`; see `model_from_config`.

    Raises:
        ConfigError: no readable `config.json`, an unknown `model_type`, or a field that is missing or wrong.
    """
    return model_from_file(
        directory / "config.json",
        name=name or directory.name,
        kv_dtype_bytes=kv_dtype_bytes,
        state_dtype_bytes=state_dtype_bytes,
        fp8_layout=fp8_layout,
    )


def model_from_file(
    path: Path,
    *,
    name: str | None = None,
    kv_dtype_bytes: int = 2,
    state_dtype_bytes: int = 4,
    fp8_layout: str | None = None,
) -> KvModel:
    """The KVCache of the model that the `config.json` at `path` describes, named like its directory.

    Raises:
        ConfigError: an unreadable file, an unknown `model_type`, or a field that is missing or wrong.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path}: there is no such file; name the directory of a Hugging Face checkpoint, or its config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: can't be read as JSON ({error}); name a Hugging Face checkpoint"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold one JSON object")
    try:
        return model_from_config(
            config,
            name=name or path.absolute().parent.name,
            kv_dtype_bytes=kv_dtype_bytes,
            state_dtype_bytes=state_dtype_bytes,
            fp8_layout=fp8_layout,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def model_from_config(
    config: Mapping[str, Any],
    *,
    name: str | None = None,
    kv_dtype_bytes: int = 2,
    state_dtype_bytes: int = 4,
    fp8_layout: str | None = None,
) -> KvModel:
    """The KVCache of a model with this configuration. Multimodal ones are read from their `text_config`.

    A window of the whole context is full attention, since no token ever leaves it.

    Args:
        config: the fields of the `config.json`.
        name: of the model; default: its `model_type`.
        kv_dtype_bytes: bytes of one element of K and V.
        state_dtype_bytes: bytes of one element of recurrent state.
        fp8_layout: "fp8_ds_mla" or "fp8_e4m3", which of vLLM's layouts an fp8 cache of sparse MLA has. They differ in
            size, and the GPU decides which one vLLM takes.

    Raises:
        ConfigError: the `model_type` is unknown, or a field is missing or wrong.
    """
    if fp8_layout is not None and (fp8_layout not in FP8_LAYOUTS or kv_dtype_bytes != 1):
        raise ConfigError(
            f'fp8_layout must be one of {", ".join(FP8_LAYOUTS)}, of one byte, not "{fp8_layout}"'
        )
    # InternVL calls it llm_config: vllm/transformers_utils/config.py, _CONFIG_ATTRS_MAPPING.
    text = config.get("text_config", config.get("llm_config"))
    fields = ConfigFields({**config, **text} if isinstance(text, Mapping) else config)
    model_type = _model_type(fields)
    if fp8_layout == FP8_DS_MLA and model_type not in SPARSE_MLA:
        raise ConfigError(
            f'{FP8_DS_MLA} is a layout of sparse MLA ({", ".join(SPARSE_MLA)}), not of model_type "{model_type}"'
        )
    size = ElementBytes(kv_dtype_bytes, state_dtype_bytes, fp8_layout)
    read = READERS.get(model_type, by_layer_types)
    groups = read(fields.with_defaults(FAMILY_DEFAULTS.get(model_type, {})), size)
    if groups is None:
        raise ConfigError(
            f'the KVCache of model_type "{model_type}" is not known, and it has no layer_types that tell its shape; '
            f"known are {', '.join(sorted(READERS))}"
        )
    kept = [group for group in groups if group.layers > 0]
    return KvModel(name or model_type, _within_context(kept, _context_tokens(fields)))


def _model_type(fields: ConfigFields) -> str:
    if fields.given("model_type"):
        return str(fields.fields["model_type"])
    for architecture in fields.entries("architectures", None) or ():
        if architecture in _MODEL_TYPES:
            return _MODEL_TYPES[architecture]
    raise ConfigError("model_type is missing")


def _context_tokens(fields: ConfigFields) -> int | None:
    """Tokens of the longest request that the file allows; None where it doesn't say."""
    if not fields.given("max_position_embeddings"):
        return None
    context = fields.whole("max_position_embeddings")
    if "gemma3" in str(fields.fields.get("model_type")):
        return context
    for field in ("rope_scaling", "rope_parameters"):
        rope = fields.fields.get(field)
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) in _WHOLE_CONTEXT_ROPE:
            continue
        factor = rope.get("factor")
        if isinstance(factor, int | float):
            return int(context * factor)
    return context


def _within_context(groups: Sequence[Group], context: int | None) -> tuple[Group, ...]:
    """`groups` with windows that hold the whole context as full attention, joined to that of the same shape."""
    full: list[FullAttention] = []
    others: list[Group] = []
    for group in groups:
        if isinstance(group, SlidingWindow) and context is not None and group.window_tokens >= context:
            shape = group.kv_heads, group.head_size_k, group.head_size_v, group.dtype_bytes
            full = _joined(full, FullAttention(group.layers, *shape))
        elif isinstance(group, FullAttention):
            full.append(group)
        else:
            others.append(group)
    return (*full, *others)


def _joined(groups: Sequence[FullAttention], added: FullAttention) -> list[FullAttention]:
    """`groups` and the layers of `added`, in the group of the same shape if there is one."""
    for index, group in enumerate(groups):
        if replace(group, layers=added.layers) == added:
            return [*groups[:index], replace(group, layers=group.layers + added.layers), *groups[index + 1 :]]
    return [*groups, added]
