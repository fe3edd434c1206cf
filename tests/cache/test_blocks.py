"""The hash chain: equal exactly when the prefixes are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cache import BlockHasher

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@settings(deadline=None)
@given(IDS, IDS, st.integers(1, 8))
def test_two_chains_agree_exactly_as_far_as_the_prompts_do(a: list[int], b: list[int], block: int) -> None:
    hasher = BlockHasher(block_tokens=block, seed=7)
    ours, theirs = hasher.hashes(a), hasher.hashes(b)
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    same = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
    shared_blocks = min(len(ours), len(theirs)) if same is None else same
    assert shared_blocks == common // block


@settings(deadline=None)
@given(IDS, st.integers(1, 8))
def test_one_hash_per_whole_block(ids: list[int], block: int) -> None:
    assert len(BlockHasher(block_tokens=block).hashes(ids)) == len(ids) // block


def test_deployments_hash_differently() -> None:
    assert BlockHasher(block_tokens=2, seed=1).hashes([1, 2]) != BlockHasher(block_tokens=2, seed=2).hashes(
        [1, 2]
    )


@pytest.mark.parametrize("kwargs", [{"block_tokens": 0}, {"seed": -1}, {"seed": 1 << 64}])
def test_absurd_settings_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        BlockHasher(**kwargs)
