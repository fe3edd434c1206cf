"""Reads the KVCache's shape out of a Hugging Face `config.json`.

Caches are counted as vLLM lays them out with `--dtype auto` (two bytes, whatever the checkpoint's own dtype) and
fp32 recurrent state, unless asked for otherwise.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas.core.kv.families import READERS, ConfigError, ConfigFields, ElementBytes, by_layer_types
from prfaas.core.kv.model import KvModel


def model_from_directory(
    directory: Path, *, name: str | None = None, kv_dtype_bytes: int = 2, state_dtype_bytes: int = 4
) -> KvModel:
    """The KVCache of the checkpoint in `directory`.

    Raises:
        ConfigError: no readable `config.json`, an unknown `model_type`, or a field that is missing or wrong.
    """
    return model_from_file(
        directory / "config.json",
        name=name or directory.name,
        kv_dtype_bytes=kv_dtype_bytes,
        state_dtype_bytes=state_dtype_bytes,
    )


def model_from_file(
    path: Path, *, name: str | None = None, kv_dtype_bytes: int = 2, state_dtype_bytes: int = 4
) -> KvModel:
    """The KVCache of the model that the `config.json` at `path` describes, named like its directory.

    Raises:
        ConfigError: an unreadable file, an unknown `model_type`, or a field that is missing or wrong.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
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
        )
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
    fields = ConfigFields({**config, **text} if isinstance(text, Mapping) else config)
    if not fields.given("model_type"):
        raise ConfigError("model_type is missing")
    model_type = str(fields.fields["model_type"])
    size = ElementBytes(kv_dtype_bytes, state_dtype_bytes)
    groups = READERS[model_type](fields, size) if model_type in READERS else by_layer_types(fields, size)
    if groups is None:
        raise ConfigError(
            f'the KVCache of model_type "{model_type}" is not known, and it has no layer_types that tell its shape; '
            f"known are {', '.join(sorted(READERS))}"
        )
    return KvModel(name or model_type, tuple(group for group in groups if group.layers > 0))
