"""bench/gpu/operators.py: vLLM's compiled operators in torch."""

import itertools

import operators
import pytest
import torch
from torch.nn.functional import silu

AUTO = torch.ones(1)


def routed(scores: torch.Tensor, count: int, *, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Weights, ids and places of `topk_softmax`, renormalized, with the last token a filler."""
    shape = (len(scores), count)
    weights, ids = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)
    places = torch.zeros(shape, dtype=torch.int32)
    is_padding = torch.arange(len(scores)) == len(scores) - 1
    operators.topk_softmax(weights, ids, places, scores, True, bias, is_padding)
    return weights, ids, places


def test_experts_are_those_of_the_highest_scores() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 4.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    weights, ids, places = routed(scores, 2)
    assert ids.tolist() == [[1, 3], [0, 2], [-1, -1]]
    assert torch.allclose(weights[0], torch.tensor([3.0, 2.0]).softmax(0))
    assert places.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_bias_chooses_and_does_not_weigh() -> None:
    scores = torch.zeros(2, 4)
    weights, ids, _ = routed(scores, 2, bias=torch.tensor([0.0, 1.0, 0.0, 2.0]))
    assert ids[0].tolist() == [3, 1]
    assert weights[0].tolist() == [0.5, 0.5]


def aligned(ids: torch.Tensor, experts: int, block: int) -> tuple[list[int], list[int], int]:
    room = ids.numel() + experts * (block - 1)
    order = torch.full((room,), -7, dtype=torch.int32)
    owners = torch.full((-(-room // block),), -7, dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    operators.moe_align_block_size(ids, experts, block, order, owners, total, None, None)
    return order.tolist(), owners.tolist(), int(total)


def test_routes_lie_in_blocks_of_one_expert() -> None:
    # The example in the docstring of vLLM's `moe_align_block_size`, whose experts are counted from one there.
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]]) - 1
    order, owners, total = aligned(ids, 4, 4)
    assert total == 16
    assert order[:16] == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert owners[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_each_route_is_in_a_block_of_its_expert(seed: int, block: int) -> None:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 6, (11, 2), generator=random)
    order, owners, total = aligned(ids, 6, block)
    flat = ids.flatten().tolist()
    found = []
    for start, owner in zip(range(0, total, block), owners, strict=False):
        routes = [route for route in order[start : start + block] if route < len(flat)]
        assert routes and all(flat[route] == owner for route in routes)
        found += routes
    assert sorted(found) == [route for route, expert in enumerate(flat) if expert >= 0]
    assert set(order[total:]) <= {len(flat)}


def test_experts_outputs_are_summed_without_those_of_fillers() -> None:
    outputs = torch.arange(12.0).view(2, 2, 3)
    summed = torch.zeros(2, 3)
    operators.moe_sum(outputs, summed, torch.tensor([[0, 1], [-1, -1]]), None)
    assert summed.tolist() == [[3.0, 5.0, 7.0], [0.0, 0.0, 0.0]]


def test_latents_are_kept_where_they_are_gathered_from() -> None:
    block, latent, rope = 4, 5, 3
    cache = torch.full((6, block, latent + rope), -1.0)
    table = torch.tensor([[2, 5], [1, 0]])
    lengths = (7, 3)
    rows = torch.randn(sum(lengths), latent + rope)
    slots = torch.tensor(
        [
            int(table[request, place // block]) * block + place % block
            for request, count in enumerate(lengths)
            for place in range(count)
        ]
    )
    slots = torch.cat([slots, torch.tensor([-1])])
    filler = torch.zeros(1, latent + rope)
    written = torch.cat([rows, filler])
    operators.concat_and_cache_mla(written[:, :latent], written[:, None, latent:], cache, slots, "auto", AUTO)
    assert int((cache != -1).all(dim=-1).sum()) == sum(lengths)
    # Of the first request what follows its second token, all of the second one.
    starts, counts = (2, 0), (5, 3)
    ends = torch.tensor([0, *itertools.accumulate(counts)])
    owners = torch.tensor([0] * 5 + [1] * 3)
    gathered = torch.zeros(10, latent + rope)
    operators.gather_and_maybe_dequant_cache(
        cache, gathered, table, ends, owners, 8, "auto", AUTO, torch.tensor(starts)
    )
    assert torch.equal(gathered[:8], torch.cat([rows[2:7], rows[7:]]))


def test_a_gate_multiplies_in_the_models_precision() -> None:
    both = torch.randn(3, 8, dtype=torch.bfloat16)
    out = torch.zeros(3, 4, dtype=torch.bfloat16)
    operators.silu_and_mul(out, both)
    assert torch.equal(out, silu(both[:, :4].float()).bfloat16() * both[:, 4:])


def test_pinned_memory_is_shown_where_it_lies() -> None:
    rows = torch.arange(12, dtype=torch.int32).view(3, 4)
    shown = operators.as_cuda_array(rows[:, :2])
    told = shown.__cuda_array_interface__
    assert told["data"] == (rows.data_ptr(), False)
    assert (told["shape"], told["strides"], told["typestr"]) == ((3, 2), (16, 4), "<i4")
