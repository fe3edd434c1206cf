"""The versions of vLLM that the connector is checked against."""

SUPPORTED_VLLM = ("0.32", "0.33")
"""Their sources have everything that the connector uses (`tests/serving/engines/vllm/test_contract.py`)."""


def release_of(version: str) -> str:
    """`0.32.0+cpu` → `0.32`; what is no version as it came."""
    return ".".join(version.partition("+")[0].split(".")[:2])
