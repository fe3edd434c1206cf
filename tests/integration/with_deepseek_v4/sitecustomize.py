"""Python runs this at its start in engines that have the folder on their path: a tiny DeepSeek V4 on a CPU.

vLLM has classes of it for CPUs, which need some Triton kernels: these run in Triton's interpreter. `--load-format
seeded` makes weights that are the same in every engine.
"""

import math
import zlib
from typing import Any

from changing import change_modules, interpret_triton, is_engine


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


def _seeded_weights(module: Any) -> None:
    import torch
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @module.register_model_loader("seeded")
    class SeededLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            for name, parameter in model.named_parameters():
                if not torch.is_floating_point(parameter):
                    # Which experts a token goes to.
                    count = torch.arange(parameter.numel()).view(parameter.shape)
                    parameter.data.copy_(count % model_config.hf_config.n_routed_experts)
                    continue
                seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                drawn = torch.randn(parameter.shape, generator=seed)
                if parameter.dim() == 1:
                    drawn = 1 + 0.1 * drawn if "norm" in name else 0.5 * drawn
                elif "embed" not in name:
                    drawn *= 1.5 / math.sqrt(parameter.shape[-1])
                parameter.data.copy_(drawn.to(parameter.dtype))


if is_engine():
    interpret_triton(first_runner=True)
    change_modules(
        {
            "vllm.models.deepseek_v4.cpu.cpu_mla": _no_tiles,
            "vllm.v1.attention.ops.metadata": _requests_of_tokens,
            "vllm.model_executor.model_loader": _seeded_weights,
        }
    )
