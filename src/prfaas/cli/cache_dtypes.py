"""Models on the command line, and `--kv-dtype` and `--state-dtype`: in which dtypes their caches are counted."""

from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.cli.common import CliError

if TYPE_CHECKING:
    from prfaas.core.kv.dtypes import CacheDtypes, StateDtype
    from prfaas.core.kv.model import KvModel
    from prfaas.core.kv.published import PublishedModel

KV_DTYPE_HELP = "Of K and V: bf16, fp16, fp32, fp8, fp8_e4m3, fp8_e5m2 or fp8_ds_mla; default: vLLM's auto."


def cache_dtypes(kv_dtype: str | None, state_dtype: str | None = None) -> "CacheDtypes":
    """The two options' values as vLLM's dtypes.

    Raises:
        CliError: one of them is none of its choices.
    """
    from dataclasses import replace

    from prfaas.core.kv.dtypes import CacheDtypes

    kept = {
        "auto": CacheDtypes(),
        "bf16": CacheDtypes(kv_cache="bfloat16"),
        "fp16": CacheDtypes(kv_cache="float16"),
        # vLLM keeps K and V in fp32 only where the whole model is.
        "fp32": CacheDtypes(model="float32"),
        "fp8": CacheDtypes(kv_cache="fp8"),
        "fp8_e4m3": CacheDtypes(kv_cache="fp8_e4m3"),
        "fp8_e5m2": CacheDtypes(kv_cache="fp8_e5m2"),
        "fp8_ds_mla": CacheDtypes(kv_cache="fp8_ds_mla"),
    }
    states: dict[str, StateDtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    for option, given, known in (
        ("--kv-dtype", kv_dtype, [*kept]),
        ("--state-dtype", state_dtype, [*states]),
    ):
        if given is not None and given not in known:
            raise CliError(f'{option}: must be one of {", ".join(known)}, not "{given}"')
    return replace(kept[kv_dtype or "auto"], state=states[state_dtype or "fp32"])


def named_model(name: str, dtypes: "CacheDtypes") -> "tuple[KvModel, PublishedModel | None]":
    """A published model by its name, or None for that and the one of a config.json or a checkpoint's directory.

    Raises:
        ConfigError: there is no such model, or it can't be read.
    """
    from prfaas.core.kv.hf_config import model_from_directory, model_from_file
    from prfaas.core.kv.published import published_model

    path = Path(name)
    if path.is_dir():
        return model_from_directory(path, dtypes=dtypes), None
    if "/" in name or name.endswith(".json"):
        return model_from_file(path, dtypes=dtypes), None
    found = published_model(name)
    return found.kept_in(dtypes), found
