"""Reads the KVCache's shape out of a Hugging Face `config.json`.

Caches are counted as vLLM lays them out with `--dtype auto`, `--kv-cache-dtype auto` and fp32 recurrent state, unless
asked for otherwise (`CacheDtypes`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prfaas.core.bounded_file import MODEL_BYTES, file_json
from prfaas.core.kv.config_fields import (
    CacheDtypeError,
    ConfigError,
    ConfigFields,
    UnknownModelError,
    family_defaults,
)
from prfaas.core.kv.dtypes import DEFAULT_DTYPES, CacheDtypes
from prfaas.core.kv.families import ATTENTION_READERS, Reader, by_layer_types
from prfaas.core.kv.layers import FullAttention, SlidingWindow
from prfaas.core.kv.model import Group, KvModel
from prfaas.core.kv.sparse_families import FP8_DS_MLA, PACKED, SPARSE_READERS
from prfaas.core.kv.state_families import STATE_READERS

READERS: Mapping[str, Reader] = {**ATTENTION_READERS, **STATE_READERS, **SPARSE_READERS}

# Files of LongCat-Flash have no model_type: vllm/transformers_utils/config.py, _ARCHITECTURE_TO_MODEL_TYPE. Those of
# DeepSeek V4 that others made of it have one of their own.
_MODEL_TYPES = {
    **dict.fromkeys(("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"), "longcat_flash"),
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
}

# Scalings of RoPE that leave max_position_embeddings as the whole context: vllm/config/model.py,
# _get_and_verify_max_len. Others (linear, dynamic) multiply it by their factor.
_WHOLE_CONTEXT_ROPE = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_MOST_FACTOR = 1 << 20


def model_from_directory(
    directory: Path,
    *,
    name: str | None = None,
    dtypes: CacheDtypes = DEFAULT_DTYPES,
) -> KvModel:
    """The KVCache of the checkpoint in `directory`; see `model_from_config`.

    Raises:
        ConfigError: no readable `config.json`, an unknown `model_type`, or a field that is missing or wrong.
    """
    return model_from_file(
        directory / "config.json",
        name=name or directory.name,
        dtypes=dtypes,
    )


def model_from_file(
    path: Path,
    *,
    name: str | None = None,
    dtypes: CacheDtypes = DEFAULT_DTYPES,
) -> KvModel:
    """The KVCache of the model that the `config.json` at `path` describes, named like its directory.

    Raises:
        ConfigError: an unreadable file, an unknown `model_type`, or a field that is missing or wrong.
    """
    config = read_config(path)
    try:
        return model_from_config(
            config,
            name=name or path.absolute().parent.name,
            dtypes=dtypes,
        )
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def read_config(path: Path) -> dict[str, Any]:
    """The fields of the `config.json` at `path`, with the quantization that older checkpoints have in a file beside it.

    Raises:
        ConfigError: one of the two files can't be read, or holds something else.
    """
    config = _json_object(path)
    # Where ModelOpt up to 0.29 wrote it: vllm/transformers_utils/config.py, get_config.
    beside = path.parent / "hf_quant_config.json"
    if config.get("quantization_config") is None and beside.is_file():
        config["quantization_config"] = _json_object(beside)
    return config


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json` for the text model: a multimodal one has them in a section."""
    # InternVL calls it llm_config: vllm/transformers_utils/config.py, _CONFIG_ATTRS_MAPPING.
    sections = ("text_config", "llm_config")
    text = next((config[section] for section in sections if section in config), None)
    own = {field: value for field, value in config.items() if field not in sections}
    return {**own, **text} if isinstance(text, Mapping) else own


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = file_json(path, MODEL_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{path}: there is no such file; name the directory of a Hugging Face checkpoint, or its config.json"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: can't be read as JSON ({error}); name a Hugging Face checkpoint"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold one JSON object")
    return found


def model_from_config(
    config: Mapping[str, Any],
    *,
    name: str | None = None,
    dtypes: CacheDtypes = DEFAULT_DTYPES,
) -> KvModel:
    """The KVCache of a model with this configuration. Multimodal ones are read from their `text_config`.

    A window of the whole context is full attention, since no token ever leaves it.

    Args:
        config: the fields of the `config.json`.
        name: of the model; default: its `model_type`.
        dtypes: of the engine's caches. Sparse MLA has two layouts of an fp8 cache that differ in size, `fp8_ds_mla` and
            `fp8_e4m3`; the GPU decides which one vLLM takes, so `fp8` is refused for it.

    Raises:
        ConfigError: a field is missing or wrong, or its caches have no such dtype.
        UnknownModelError: the `model_type` is unknown.
    """
    fields = ConfigFields(text_fields(config))
    model_type = _model_type(fields)
    if dtypes.kv_cache == FP8_DS_MLA and model_type not in PACKED:
        raise CacheDtypeError(
            f'{FP8_DS_MLA} is a layout of sparse MLA ({", ".join(PACKED)}), not of model_type "{model_type}"'
        )
    size = dtypes.element_bytes(config.get("quantization_config"), is_latent=fields.given("kv_lora_rank"))
    read = READERS.get(model_type, by_layer_types)
    groups = read(fields.with_defaults(family_defaults(model_type)), size)
    if groups is None:
        raise UnknownModelError(
            f'the KVCache of model_type "{model_type}" is not known, and it has no layer_types that tell its shape; '
            f"known are {', '.join(sorted(READERS))}"
        )
    kept = [group for group in groups if group.layers > 0]
    return KvModel(name or model_type, _within_context(kept, _context_tokens(fields)))


def kept_dtype(config: Mapping[str, Any], dtypes: CacheDtypes) -> str:
    """`CacheDtypes.kept` for the model with this configuration.

    Raises:
        CacheDtypeError: as `CacheDtypes.kept`.
    """
    fields = ConfigFields(text_fields(config))
    # transformers 4.x wrote it as torch_dtype.
    own = fields.fields.get("dtype") or fields.fields.get("torch_dtype")
    return dtypes.kept(config.get("quantization_config"), own, is_latent=fields.given("kv_lora_rank"))


def _model_type(fields: ConfigFields) -> str:
    named = str(fields.fields["model_type"]) if fields.given("model_type") else None
    if named is not None and named in READERS:
        return named
    for architecture in fields.entries("architectures", None) or ():
        if architecture in _MODEL_TYPES:
            return _MODEL_TYPES[architecture]
    if named is None:
        raise ConfigError("model_type is missing")
    return named


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
            if not 0 < factor <= _MOST_FACTOR:
                raise ConfigError(f"{field}.factor must be above 0 and at most {_MOST_FACTOR}, not {factor}")
            return int(context * factor)
    return context


def _within_context(groups: Sequence[Group], context: int | None) -> tuple[Group, ...]:
    """`groups` with windows that hold the whole context as full attention, joined to that of the same shape."""
    full: list[FullAttention] = []
    others: list[Group] = []
    for group in groups:
        if isinstance(group, SlidingWindow) and context is not None and group.window_tokens >= context:
            heads, k, v = group.kv_heads, group.head_size_k, group.head_size_v
            full = _joined(full, FullAttention(group.layers, heads, k, v, group.dtype_bytes))
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
