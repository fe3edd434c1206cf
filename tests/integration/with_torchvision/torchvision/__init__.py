"""A stand-in: what vLLM and transformers need of it to load models of text that see too, and to make pixels."""

__version__ = "0.0"
