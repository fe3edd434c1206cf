"""Small models with trained weights: one that is shipped, and some that a package registry has as quantized GGUF files.

Each has a folder here with what prfaas ships of it; of those that are fetched that is all but weights and tokenizer, so
that the shape of their KVCache is known before anything is fetched.
"""

from prfaas.serving.engines.trained.checkpoint import trained_model

__all__ = ["trained_model"]
