"""`--kv-dtype` and `--state-dtype`: in which dtypes a model's caches are counted."""

from typing import TYPE_CHECKING

from prfaas.cli.common import CliError

if TYPE_CHECKING:
    from prfaas.core.kv import CacheDtypes, StateDtype

KV_DTYPE_HELP = "Of K and V: bf16, fp16, fp32, fp8, fp8_e4m3, fp8_e5m2 or fp8_ds_mla; default: vLLM's auto."


def cache_dtypes(kv_dtype: str | None, state_dtype: str | None = None) -> "CacheDtypes":
    """The two options' values as vLLM's dtypes.

    Raises:
        CliError: one of them is none of its choices.
    """
    from dataclasses import replace

    from prfaas.core.kv import CacheDtypes

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
