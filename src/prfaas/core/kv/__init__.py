"""Models of a request's KVCache, and how many bytes of it must move."""

from prfaas.core.kv.config_fields import CacheDtypeError, ConfigError, UnknownModelError
from prfaas.core.kv.drafters import DrafterError, Speculation, with_drafter
from prfaas.core.kv.dtypes import (
    DEFAULT_DTYPES,
    CacheDtypes,
    KvCacheDtype,
    ModelDtype,
    StateDtype,
    are_convertible,
)
from prfaas.core.kv.hf_config import (
    kept_dtype,
    model_from_config,
    model_from_directory,
    model_from_file,
    read_config,
)
from prfaas.core.kv.layers import (
    ChunkedWindow,
    CompressedAttention,
    FullAttention,
    LinearState,
    SlidingWindow,
)
from prfaas.core.kv.model import Group, KvModel, model_on_wire
from prfaas.core.kv.published import PublishedModel, published_model, published_models

__all__ = [
    "DEFAULT_DTYPES",
    "CacheDtypeError",
    "CacheDtypes",
    "ChunkedWindow",
    "CompressedAttention",
    "ConfigError",
    "DrafterError",
    "FullAttention",
    "Group",
    "KvCacheDtype",
    "KvModel",
    "LinearState",
    "ModelDtype",
    "PublishedModel",
    "SlidingWindow",
    "Speculation",
    "StateDtype",
    "UnknownModelError",
    "are_convertible",
    "kept_dtype",
    "model_from_config",
    "model_from_directory",
    "model_from_file",
    "model_on_wire",
    "published_model",
    "published_models",
    "read_config",
    "with_drafter",
]
