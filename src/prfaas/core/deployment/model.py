"""The model that a deployment's engines serve."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.core.kv import CacheDtypes, KvCacheDtype, KvModel, ModelDtype, model_from_directory

TINY_MODELS = ("qwen3-next", "gpt-oss", "mimo-v2-flash", "qwen3")
"""Models that prfaas makes itself: `serving/engines/tiny/configs.py` has one for each of these names."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """The model that every engine serves."""

    served_name: str
    """What clients write as the model."""
    max_model_len: int
    """Tokens of a prompt and its answer together, at most."""
    path: Path
    """The checkpoint's directory."""
    tiny: str | None
    """Name of the tiny model that prfaas makes there; None: the checkpoint is the user's."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """LoRA adapters' directories, by the name that clients write as the model."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """What engines keep K and V in, unless their cluster has its own: vLLM's `--kv-cache-dtype`."""
    dtype: ModelDtype = "auto"
    """What engines compute in: vLLM's `--dtype`."""

    def kv_model(self, kv_cache_dtype: KvCacheDtype | None = None) -> KvModel:
        """The KVCache of the checkpoint as the engines keep it. Reads its `config.json`.

        Args:
            kv_cache_dtype: of the engines' cluster, where it has its own.

        Raises:
            ConfigError: it can't be read, the model is not known, or its caches have no such dtype.
        """
        dtypes = CacheDtypes(kv_cache_dtype or self.kv_cache_dtype, self.dtype)
        return model_from_directory(self.path, name=self.served_name, dtypes=dtypes)
