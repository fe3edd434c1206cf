"""Kimi Linear by vLLM's classes for ROCm: NVIDIA's import CUTLASS, which neither CPUs nor every GPU machine have."""

from typing import Any

MODULE = "vllm.models.kimi_k3"
"""Its own code imports what is for NVIDIA alone, so that `rocms_classes` stands in its place."""


def rocms_classes(module: Any) -> None:
    """Change `vllm.models.kimi_k3`."""
    from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM

    module.KimiLinearForCausalLM = KimiLinearForCausalLM
