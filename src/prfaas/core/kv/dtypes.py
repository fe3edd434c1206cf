"""In which dtypes an engine keeps its caches, in vLLM's words, and how many bytes that makes of one element."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prfaas.core.kv.config_fields import CacheDtypeError, ConfigError, ElementBytes
from prfaas.core.kv.sparse_families import FP8_LAYOUTS, FP8_PLAIN

KvCacheDtype = Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"]
"""Those of vLLM's `--kv-cache-dtype` (`CacheDType` in vllm/config/cache.py) that keep nothing but values, and the one
layout whose size is known. The others pack scales beside values of 3, 4 or 8 bits."""
ModelDtype = Literal["auto", "bfloat16", "float16", "float32"]
"""Of vLLM's `--dtype`. `auto` has two bytes, whatever the checkpoint's own: float32 becomes half of it."""
StateDtype = Literal["bfloat16", "float16", "float32"]
"""Of vLLM's `--mamba-ssm-cache-dtype`."""

_BYTES: Mapping[str, int] = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class CacheDtypes:
    """The options that decide how large an engine's caches are."""

    kv_cache: KvCacheDtype = "auto"
    """Of K and V. `auto`: as the checkpoint's quantization says, else the model's."""
    model: ModelDtype = "auto"
    """Of the model, and with it of its convolutions' states."""
    state: StateDtype = "float32"
    """Of recurrent states."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a dtype that is not known."""
        for what, given, known in (
            ("KV cache dtype", self.kv_cache, get_args(KvCacheDtype)),
            ("model dtype", self.model, get_args(ModelDtype)),
            ("state dtype", self.state, get_args(StateDtype)),
        ):
            if given not in known:
                raise ConfigError(f'the {what} must be one of {", ".join(known)}, not "{given}"')

    @property
    def of_kv(self) -> str | None:
        """The dtype that was chosen for K and V, for people; None: none was."""
        named = self.kv_cache if self.kv_cache != "auto" else self.model
        return None if named == "auto" else named

    @property
    def named(self) -> str:
        """The dtype of K and V by its one name, since fp8 is fp8_e4m3; "auto": what the checkpoint says."""
        return _ONE_NAME.get(self.of_kv or "auto", self.of_kv or "auto")

    def kept(self, quantization: object, checkpoint: object, *, is_latent: bool) -> str:
        """The dtype as `named`, with "auto" resolved by a checkpoint; "auto" where that says nothing.

        Args:
            quantization: as in `element_bytes`.
            checkpoint: `dtype` (once `torch_dtype`) of the model's `config.json`.
            is_latent: as in `element_bytes`.

        Raises:
            CacheDtypeError: as `element_bytes`.
        """
        if self.kv_cache != "auto":
            return self.named
        quantized = _of_checkpoint(quantization, is_latent)
        if quantized != "auto":
            return _ONE_NAME.get(quantized, quantized)
        # An engine that is told nothing has no float32: `ModelDtype`.
        return str(checkpoint) if self.model == "auto" and checkpoint in _OF_16_BITS else self.named

    def element_bytes(self, quantization: object, *, is_latent: bool) -> ElementBytes:
        """Bytes of one element of each cache.

        Args:
            quantization: `quantization_config` of the model's `config.json`; None where it has none.
            is_latent: the model's attention is MLA.

        Raises:
            CacheDtypeError: the checkpoint asks for a KV cache whose size is not known.
        """
        kv_cache = self.kv_cache
        if kv_cache == "auto":
            kv_cache = _of_checkpoint(quantization, is_latent)
        return ElementBytes(
            kv=1 if kv_cache.startswith("fp8") else _BYTES[self.model if kv_cache == "auto" else kv_cache],
            state=_BYTES[self.state],
            fp8_layout=kv_cache if kv_cache in FP8_LAYOUTS else None,
            conv=_BYTES[self.model],
            is_default=kv_cache == "auto",
        )


DEFAULT_DTYPES = CacheDtypes()
"""Those of engines that are told nothing."""

_ONE_NAME: Mapping[str, str] = {"fp8": FP8_PLAIN}

ELEMENT_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Elements of keys and values that can be turned into each other, if one has half the bytes of the other."""

_OF_16_BITS = tuple(element for element, nbytes in ELEMENT_BYTES.items() if nbytes == 2)
_OF_8_BITS = tuple(element for element, nbytes in ELEMENT_BYTES.items() if nbytes == 1)


def are_convertible(one: str, other: str) -> bool:
    """True if K and V kept in the first dtype can be converted to the second on the way, both as `CacheDtypes.named`.

    "auto" counts as 16 bits of either kind: what is known of it has another name.
    """
    whole = {each for each in (one, other) if each in ("auto", *_OF_16_BITS)}
    narrow = {each for each in (one, other) if each in _OF_8_BITS}
    return one == other or (len(whole) == len(narrow) == 1) or (whole == {one, other} and "auto" in whole)


def _of_checkpoint(quantization: object, is_latent: bool) -> KvCacheDtype:
    """What vLLM makes of `auto` by the checkpoint's quantization.

    ModelOpt's: vllm/utils/torch_utils.py `get_kv_cache_quant_algo_string`. That of compressed-tensors:
    vllm/model_executor/layers/attention/attention.py `Attention.__init__`, which MLA has no counterpart of.
    """
    if not isinstance(quantization, Mapping):
        return "auto"
    method = str(quantization.get("quant_method", "")).lower().replace("_", "-")
    producer = quantization.get("producer")
    if method.startswith("modelopt") or (
        isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    ):
        return _of_modelopt(quantization)
    if method == "compressed-tensors" and quantization.get("kv_cache_scheme") is not None and not is_latent:
        return "fp8"
    return "auto"


def _of_modelopt(quantization: Mapping[str, Any]) -> KvCacheDtype:
    inner = quantization.get("quantization")
    places = (inner, quantization) if isinstance(inner, Mapping) else (quantization,)
    given = [
        place[key] for key in ("kv_cache_scheme", "kv_cache_quant_algo") for place in places if place.get(key)
    ]
    found = given[0] if given else None
    if isinstance(found, Mapping) and found.get("type") == "float":
        bits = found.get("num_bits")
        if bits == 8 and found.get("dynamic") is False:
            found = "fp8"
        elif bits == 4:
            found = "nvfp4"
    if isinstance(found, str) and found.lower() == "fp8":
        return FP8_PLAIN
    if isinstance(found, str) and found.lower() == "nvfp4":
        raise CacheDtypeError(
            "quantization_config: the checkpoint's KV cache is nvfp4, whose size is not known; name another KV cache "
            "dtype, for example fp8"
        )
    return "auto"
