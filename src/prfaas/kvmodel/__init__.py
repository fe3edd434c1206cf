"""What a request's KVCache is made of, and how many bytes of it must move."""

from prfaas.kvmodel.full_attention import FullAttention
from prfaas.kvmodel.hf_config import ConfigError, model_from_config, model_from_directory
from prfaas.kvmodel.linear_state import LinearState
from prfaas.kvmodel.model import Group, KvModel
from prfaas.kvmodel.sliding_window import SlidingWindow

__all__ = [
    "ConfigError",
    "FullAttention",
    "Group",
    "KvModel",
    "LinearState",
    "SlidingWindow",
    "model_from_config",
    "model_from_directory",
]
