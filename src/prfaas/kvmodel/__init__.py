"""What a request's KVCache is made of, and how many bytes of it must move."""

from prfaas.kvmodel.config_fields import ConfigError
from prfaas.kvmodel.full_attention import FullAttention
from prfaas.kvmodel.hf_config import model_from_config, model_from_directory, model_from_file
from prfaas.kvmodel.linear_state import LinearState
from prfaas.kvmodel.model import Group, KvModel
from prfaas.kvmodel.published import PublishedModel, Source, published_model, published_models
from prfaas.kvmodel.sliding_window import SlidingWindow

__all__ = [
    "ConfigError",
    "FullAttention",
    "Group",
    "KvModel",
    "LinearState",
    "PublishedModel",
    "SlidingWindow",
    "Source",
    "model_from_config",
    "model_from_directory",
    "model_from_file",
    "published_model",
    "published_models",
]
