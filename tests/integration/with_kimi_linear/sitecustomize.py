"""Python runs this at its start in engines that have the folder on their path: Kimi Linear on a CPU.

vLLM has no module of it for CPUs. That for ROCm needs neither CUTLASS nor AITER: its small Triton kernels run in
Triton's interpreter, and Kimi Delta Attention as in `kimi_delta.py`.
"""

from typing import Any

from changing import change_modules, interpret_triton, is_engine, run_next
from kimi_classes import MODULE, rocms_classes


def _larger_blocks(module: Any) -> None:
    """As large as a linear state, in blocks of the kernel's 16."""
    module.CPUMLABackend.supports_block_size = classmethod(lambda _, size: size is None or size % 16 == 0)


def _states_on_cpus(module: Any) -> None:
    def gather_initial_states(state: Any, indices: Any, has_initial_state: Any) -> Any:
        gathered = state[indices.long()].clone()
        gathered[~has_initial_state] = 0
        return gathered

    module.gather_initial_states = gather_initial_states


def _delta_attention(module: Any) -> None:
    import kimi_delta

    module.chunk_kda_with_fused_gate = kimi_delta.chunk_kda_with_fused_gate
    module.fused_recurrent_kda_packed_decode = kimi_delta.fused_recurrent_kda_packed_decode


if is_engine():
    interpret_triton(first_runner=True)
    change_modules(
        {
            MODULE: rocms_classes,
            "vllm.v1.attention.backends.mla.cpu_mla": _larger_blocks,
            "vllm.model_executor.layers.mamba.ops.gather_initial_states": _states_on_cpus,
            "vllm.models.kimi_k3.nvidia.ops.third_party.kda": _delta_attention,
        },
        instead=[MODULE],
    )
    run_next(__file__)
