"""Python runs this at its start in engines that have the folder on their path: data-parallel groups on CPUs.

What ranks gather before their experts, and sum after them, vLLM has for GPUs alone. So it has that an expert is one of
another rank: its CPU kernel would read behind its own.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from changing import change_modules, is_engine, run_next


def _uneven_collectives(module: Any) -> None:
    import torch
    import torch.distributed as dist

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        sizes = sizes or [input_.shape[0]] * self.world_size
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])

    def reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        summed = input_.float().contiguous()
        dist.all_reduce(summed, group=self.device_group)
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        first = sum(sizes[: self.rank_in_group])
        return summed[first : first + sizes[self.rank_in_group]].to(input_.dtype).contiguous()

    module.CpuCommunicator.all_gatherv = all_gatherv
    module.CpuCommunicator.reduce_scatterv = reduce_scatterv


def _experts_elsewhere(module: Any) -> None:
    apply = module.CPUUnquantizedExperts.apply

    def of_own_experts(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(apply).bind(self, *args, **kwargs)
        own, ids = given.arguments["expert_map"], given.arguments["topk_ids"]
        if own is not None:
            local = own[ids.long()]
            given.arguments["topk_ids"] = local.clamp(min=0).to(ids.dtype)
            given.arguments["topk_weights"] = given.arguments["topk_weights"].masked_fill(local < 0, 0.0)
        apply(*given.args, **given.kwargs)

    module.CPUUnquantizedExperts.apply = of_own_experts


if is_engine():
    change_modules(
        {
            "vllm.distributed.device_communicators.cpu_communicator": _uneven_collectives,
            "vllm.model_executor.layers.fused_moe.experts.cpu_moe": _experts_elsewhere,
        }
    )
run_next(__file__)
