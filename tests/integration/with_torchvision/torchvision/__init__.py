"""A stand-in: vLLM imports modules for images with some models of text, which use nothing of it."""

__version__ = "0.0"
