"""Which layers ranks of one engine keep alike, and how the ranks meet."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from prfaas.core.kv.rank_shares import rank_copies
from prfaas.serving.engines.vllm.drafter import Drafter
from prfaas.serving.engines.vllm.sibling_ranks import layer_copies, meet_siblings


def engine(ranks: int, heads: int) -> tuple[Any, Any]:
    """A layer of full attention, one of a window, and one of latents."""
    own = max(1, heads // ranks)
    shape = {"block_size": 16, "num_kv_heads": own, "head_size": 32, "dtype": torch.bfloat16}
    specs = {
        "full": FullAttentionSpec(**shape),
        "window": SlidingWindowSpec(**shape, sliding_window=64),
        "latent": MLAAttentionSpec(**(shape | {"num_kv_heads": 1})),
    }
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    cache = KVCacheConfig(num_blocks=4, kv_cache_tensors=list[KVCacheTensor](), kv_cache_groups=groups)
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": heads,
        "head_dim": 32,
    }
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config)),
    )
    return cache, vllm_config


@pytest.mark.parametrize(
    ("ranks", "heads", "expected"),
    [
        (1, 2, {}),
        (2, 2, {"latent": 2}),
        (4, 2, {"full": 2, "latent": 4}),
        (8, 1, {"full": 8, "latent": 8}),
        (2, 8, {"latent": 2}),
    ],
)
def test_heads_that_are_fewer_than_ranks_and_latents_are_alike(
    ranks: int, heads: int, expected: dict[str, int]
) -> None:
    assert layer_copies(*engine(ranks, heads)) == expected


def test_layers_of_a_drafter_may_have_other_heads() -> None:
    cache, vllm_config = engine(4, 2)
    assert layer_copies(cache, vllm_config, Drafter("mtp", frozenset(["full"]))) == {"latent": 4}


def test_copies_that_are_not_certain() -> None:
    assert [rank_copies(heads, rank_heads, 4) for heads, rank_heads in ((3, 1), (2, 2), (4, 1), (8, 2))] == [
        1
    ] * 4


class Gathering:
    """What vLLM's group does between its ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._brought: list[Any] = [None] * ranks

    def of(self, rank: int) -> Any:
        def gather(mine: object) -> Sequence[Any]:
            self._brought[rank] = mine
            self._barrier.wait(30)
            found = list(self._brought)
            self._barrier.wait(30)
            return found

        return gather


def test_ranks_meet() -> None:
    gathering = Gathering(3)
    with ThreadPoolExecutor(3) as threads:
        sockets = list(threads.map(lambda rank: meet_siblings(rank, gathering.of(rank)), range(3)))
    assert [sorted(each) for each in sockets] == [[1, 2], [0, 2], [0, 1]]
    for rank, each in enumerate(sockets):
        for other in each:
            each[other].sendall(bytes([rank]))
    for each in sockets:
        assert {other: sock.recv(1) for other, sock in each.items()} == {
            other: bytes([other]) for other in each
        }
        for sock in each.values():
            sock.close()


def test_where_one_rank_cannot_meet_none_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    from prfaas.serving.engines.vllm import sibling_ranks

    connected = sibling_ranks._connected

    def failing(name: str, rank: int) -> Any:
        sock = connected(name, rank)
        if rank == 1:
            sock.close()
            raise OSError("a test")
        return sock

    monkeypatch.setattr(sibling_ranks, "_connected", failing)
    gathering = Gathering(2)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda rank: meet_siblings(rank, gathering.of(rank)), range(2))) == [{}, {}]
