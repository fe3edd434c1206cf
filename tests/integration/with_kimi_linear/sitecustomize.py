"""Python runs this at its start in engines that have the folder on their path: Kimi Linear on a CPU.

vLLM has no module of it for CPUs. That for ROCm needs neither CUTLASS nor AITER: its small Triton kernels run in
Triton's interpreter, and Kimi Delta Attention as in `kimi_delta.py`. Modules are changed when they are imported.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
# The runner that engines on CPUs have where Triton does nothing.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"

_HERE = str(Path(__file__).parent)


def _rocms_classes(module: Any) -> None:
    from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM

    module.KimiLinearForCausalLM = KimiLinearForCausalLM


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


_CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.models.kimi_k3": _rocms_classes,
    "vllm.v1.attention.backends.mla.cpu_mla": _larger_blocks,
    "vllm.model_executor.layers.mamba.ops.gather_initial_states": _states_on_cpus,
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda": _delta_attention,
}
# Their own code imports what is for NVIDIA alone.
_INSTEAD = ("vllm.models.kimi_k3",)


class _ChangedLoader(importlib.abc.Loader):
    def __init__(self, name: str, loader: importlib.abc.Loader) -> None:
        self._name, self._loader = name, loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._name not in _INSTEAD:
            self._loader.exec_module(module)
        _CHANGES[self._name](module)


class _ChangingFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangedLoader(name, spec.loader)
        return spec


def _interpret_triton() -> None:
    """A backend that compiles nothing: with none, vLLM uses no Triton."""
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

        @staticmethod
        def get_benchmarker() -> Any:
            # Of several configurations any will do.
            return lambda _, quantiles=None, **__: [1.0] * len(quantiles) if quantiles else 1.0

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=Driver)


def _run_next() -> None:
    """A second one on the path: Python runs the first alone."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path[sys.path.index(_HERE) + 1 :])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Not in helpers of such a process: they have nothing to import.
if "-m" in sys.orig_argv:
    _interpret_triton()
    sys.meta_path.insert(0, _ChangingFinder())
    _run_next()
