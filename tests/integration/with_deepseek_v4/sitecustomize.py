"""Python runs this at its start in engines that have the folder on their path: a tiny DeepSeek V4 on a CPU.

vLLM has classes of it for CPUs, which need some Triton kernels: these run in Triton's interpreter.
"""

from typing import Any

from changing import change_modules, interpret_triton, is_engine
from seeded import seeded_weights


class _RequestOfEachToken:
    """In place of a kernel: it is started as one, with a grid."""

    def __getitem__(self, grid: object) -> Any:
        import torch

        def run(starts: Any, out: Any, requests: int, mapped: int, tokens: int, **_: object) -> None:
            found = torch.searchsorted(
                starts[1 : requests + 1].contiguous(), torch.arange(tokens), right=True
            )
            found.clamp_(max=requests - 1)[mapped:] = 0
            out[:tokens] = found.to(out.dtype)

        return run


def _no_tiles(module: Any) -> None:
    """vLLM asks for the schedule of each kind of layer, and its classes for CPUs leave out two (0.32: KeyError)."""

    class Schedules(dict[str, None]):
        def __missing__(self, kind: str) -> None:
            return None

    for each in list(vars(module).values()):
        if isinstance(each, type) and "build_tile_scheduler" in vars(each):
            each.build_tile_scheduler = lambda *_: Schedules()  # type: ignore[attr-defined]


def _requests_of_tokens(module: Any) -> None:
    module._token_request_mapping_kernel = _RequestOfEachToken()


if is_engine():
    interpret_triton(first_runner=True)
    change_modules(
        {
            "vllm.models.deepseek_v4.cpu.cpu_mla": _no_tiles,
            "vllm.v1.attention.ops.metadata": _requests_of_tokens,
            "vllm.model_executor.model_loader": seeded_weights,
        }
    )
