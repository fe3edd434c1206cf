"""vLLM's compiled operators in torch: those that the tiny models of `engines.py` call on a GPU.

`pack.py` puts this file in place of vLLM's compiled library, under its name, so that vLLM imports it where it would
import that. What is here may be captured into a graph: nothing waits for the device, and no shape depends on values.
Operators that are not here do not exist, which vLLM's own `hasattr(torch.ops._C, …)` tells it.
"""

from types import SimpleNamespace
from typing import Any

import torch

_ABSENT = -1


def supports_nothing(_: int) -> bool:
    """What vLLM asks when it is imported: whether there are kernels for 8-bit products."""
    return False


def silu_and_mul(out: torch.Tensor, input: torch.Tensor) -> None:
    gate, up = input.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate.float()).to(input.dtype) * up)


def weak_ref_tensor(input: torch.Tensor) -> torch.Tensor:
    """The compiled one does not keep memory alive; this one does, which costs a tiny model little."""
    return input.view_as(input)


def get_cuda_view_from_cpu_tensor(input: torch.Tensor) -> torch.Tensor:
    """Pinned memory as the device sees it: where addresses are unified, at the same address."""
    if not input.numel():
        return torch.empty(input.shape, dtype=input.dtype, device="cuda")
    view = torch.as_tensor(as_cuda_array(input), device="cuda")
    if view.data_ptr() != input.data_ptr():
        raise RuntimeError(
            "torch copied pinned memory instead of looking at it: this needs vLLM's own operators"
        )
    return view


def as_cuda_array(pinned: torch.Tensor) -> Any:
    """What torch and others take for an array on the device; it keeps the memory alive."""
    told = pinned.numpy().__array_interface__
    fields = {name: told[name] for name in ("shape", "typestr", "data", "strides")}
    return SimpleNamespace(__cuda_array_interface__={**fields, "version": 3}, kept=pinned)


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    indices: torch.Tensor,
    gating: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    _route(gating.float().softmax(dim=-1), weights, ids, indices, renormalize, 1.0, bias, is_padding)


def topk_sigmoid(
    weights: torch.Tensor,
    ids: torch.Tensor,
    indices: torch.Tensor,
    gating: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    scaling: float,
    is_padding: torch.Tensor | None,
) -> None:
    _route(gating.float().sigmoid(), weights, ids, indices, renormalize, scaling, bias, is_padding)


def _route(
    scores: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    indices: torch.Tensor,
    renormalize: bool,
    scaling: float,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    """A bias chooses experts, and weighs none."""
    tokens, count = ids.shape
    chosen = (scores if bias is None else scores + bias.float()).topk(count, dim=-1).indices
    taken = scores.gather(-1, chosen)
    if renormalize:
        taken = taken / taken.sum(dim=-1, keepdim=True)
    weights.copy_(taken * scaling)
    ids.copy_(chosen if is_padding is None else chosen.masked_fill(is_padding[:, None], _ABSENT))
    numbers = torch.arange(tokens * count, device=ids.device, dtype=indices.dtype)
    indices.copy_(numbers.view(count, tokens).t())


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None,
    scatter_idx: torch.Tensor | None,
) -> None:
    """Routes by expert, each expert's filled up to whole blocks with a route that there is not."""
    if expert_map is not None or scatter_idx is not None:
        raise NotImplementedError("experts of several ranks need vLLM's compiled operators")
    routes = topk_ids.flatten().long()
    numbers = torch.arange(len(routes), device=routes.device)
    # Routes of no expert come behind those of the last one, in places that nothing reads.
    experts = torch.where(routes < 0, num_experts, routes)
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=routes.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    blocks = (counts[:num_experts] + block_size - 1) // block_size
    block_ends = blocks.cumsum(0)
    starts = torch.cat([block_ends - blocks, block_ends[-1:]]) * block_size
    order = experts.argsort(stable=True)
    of_order = experts[order]
    places = starts[of_order] + numbers - (counts.cumsum(0) - counts)[of_order]
    spare = len(sorted_token_ids)
    places = torch.where(of_order < num_experts, places, spare)
    filled = torch.full((spare + 1,), len(routes), dtype=sorted_token_ids.dtype, device=routes.device)
    filled.scatter_(0, places, order.to(filled.dtype))
    sorted_token_ids.copy_(filled[:spare])
    block_numbers = torch.arange(len(experts_ids), device=routes.device)
    owners = torch.searchsorted(block_ends, block_numbers, right=True)
    experts_ids.copy_(torch.where(owners < num_experts, owners, _ABSENT))
    num_tokens_post_pad.copy_(block_ends[-1:] * block_size)


def moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None,
    _: torch.Tensor | None,
) -> None:
    if topk_ids is not None:
        input = input.masked_fill((topk_ids < 0)[..., None], 0)
    output.copy_(input.float().sum(dim=1))


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    _: torch.Tensor,
) -> None:
    """A token without a slot changes nothing: its row is written over a row of block 0 as that row is."""
    _only_plain(kv_cache_dtype)
    count, block_size = len(slot_mapping), kv_cache.shape[1]
    rows = torch.cat([kv_c[:count], k_pe[:count].flatten(1)], dim=-1).to(kv_cache.dtype)
    slots = slot_mapping.clamp(min=0)
    blocks, places = slots // block_size, slots % block_size
    kept = kv_cache[blocks, places]
    kv_cache[blocks, places] = torch.where((slot_mapping >= 0)[:, None], rows, kept)


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    _: torch.Tensor,
    seq_starts: torch.Tensor | None,
) -> None:
    """The rows of several requests behind each other, each request's from its own start on."""
    _only_plain(kv_cache_dtype)
    block_size = src_cache.shape[1]
    requests = token_to_seq[:num_tokens].long()
    places = torch.arange(num_tokens, device=requests.device) - cu_seq_lens[requests].long()
    if seq_starts is not None:
        places = places + seq_starts[requests].long()
    blocks = block_table[requests, places // block_size].long()
    dst[:num_tokens] = src_cache[blocks, places % block_size].to(dst.dtype)


def _only_plain(kv_cache_dtype: str) -> None:
    if kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        raise NotImplementedError(f"a cache of {kv_cache_dtype} needs vLLM's compiled operators")


SCHEMAS = {
    "_C": {
        silu_and_mul: "(Tensor! out, Tensor input) -> ()",
        weak_ref_tensor: "(Tensor(a) input) -> Tensor(a)",
        get_cuda_view_from_cpu_tensor: "(Tensor input) -> Tensor",
    },
    "_moe_C": {
        topk_softmax: "(Tensor! weights, Tensor! ids, Tensor! indices, Tensor gating, bool renormalize, "
        "Tensor? bias, Tensor? is_padding) -> ()",
        topk_sigmoid: "(Tensor! weights, Tensor! ids, Tensor! indices, Tensor gating, bool renormalize, "
        "Tensor? bias, float scaling, Tensor? is_padding) -> ()",
        moe_align_block_size: "(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids, "
        "Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? expert_map, Tensor!? scatter_idx) -> ()",
        moe_sum: "(Tensor input, Tensor! output, Tensor? topk_ids, Tensor? expert_map) -> ()",
    },
    "_C_cache_ops": {
        concat_and_cache_mla: "(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, "
        "str kv_cache_dtype, Tensor scale) -> ()",
        gather_and_maybe_dequant_cache: "(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, "
        "Tensor token_to_seq, int num_tokens, str kv_cache_dtype, Tensor scale, Tensor? seq_starts) -> ()",
    },
}
"""Namespace → operator → its schema, as vLLM's `_custom_ops.py` calls it."""

QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
"""In the namespace `_C`: see `supports_nothing`."""

_libraries: list[Any] = []


def register() -> None:
    """Make them torch's: `torch.ops._C.silu_and_mul` and so on."""
    for namespace, schemas in SCHEMAS.items():
        library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        for function, schema in schemas.items():
            library.define(function.__name__ + schema)
            library.impl(function.__name__, function, "CompositeExplicitAutograd")
        if namespace == "_C":
            for name in QUESTIONS:
                library.define(f"{name}(int capability) -> bool")
                library.impl(name, supports_nothing, "CompositeExplicitAutograd")
        # A library that is collected takes its operators away.
        _libraries.append(library)


if __name__.startswith("vllm."):
    register()
