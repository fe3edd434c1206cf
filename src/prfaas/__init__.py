"""Prefill-as-a-Service: long prompts are prefilled in another cluster and decoded here, on unmodified vLLM."""

__version__ = "0.1.0"
