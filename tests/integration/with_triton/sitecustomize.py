"""Python runs this at its start in engines that have the folder on their path: vLLM then has Triton, interpreted.

Triton's wheel has no backend for CPUs, so vLLM would do without it. With it vLLM takes the model runner that it takes
on GPUs, and the kernels that hybrids need to draft. They run in numpy.
"""

from typing import Any

from changing import change_modules, interpret_triton, is_engine, run_next


def _copy_whole_states(module: Any) -> None:
    """vLLM copies each state by sixteen programs, to fill a GPU; interpreted, each costs milliseconds a step."""
    module._TEMPORAL_TILES = 1


if is_engine():
    interpret_triton()
    change_modules({"vllm.v1.worker.mamba_utils": _copy_whole_states})
    run_next(__file__)
