"""Tiny checkpoints of real model families, made on the spot: seeded, offline, a few seconds.

They carry random weights, so their answers mean nothing; what matters is that a real engine runs them with every kind
of KV group that its family has, and that the greedy answer depends on the whole prompt.
"""

from prfaas.serving.engines.tiny.checkpoint import tiny_model
from prfaas.serving.engines.tiny.configs import TINY_MODEL_NAMES, tiny_config

__all__ = ["TINY_MODEL_NAMES", "tiny_config", "tiny_model"]
