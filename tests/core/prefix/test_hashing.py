"""The hash chain: equal exactly when the prefixes are."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.prefix.hashing import BlockHasher, chain_root

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
def test_one_small_hash_per_whole_block(ids: list[int], block: int) -> None:
    hashes = BlockHasher(block_tokens=block).hashes(ids)
    assert len(hashes) == len(ids) // block
    assert all(0 <= each < 1 << 60 for each in hashes)


@settings(deadline=None)
@given(IDS, st.integers(1, 8), st.integers(0, 20))
def test_a_chain_can_be_continued_and_cut(ids: list[int], block: int, blocks: int) -> None:
    hasher = BlockHasher(block_tokens=block, seed=3)
    whole = hasher.hashes(ids)
    head = hasher.hashes(ids, max_blocks=blocks)
    assert head == whole[:blocks]
    rest = hasher.hashes(ids[len(head) * block :], head[-1] if head else None)
    assert head + rest == whole


@settings(deadline=None)
@given(IDS)
def test_ids_may_come_as_numbers_or_as_their_bytes(ids: list[int]) -> None:
    hasher = BlockHasher(block_tokens=4)
    packed = array("I", ids)
    expected = hasher.hashes(ids)
    for same in (tuple(ids), packed, array("Q", ids), packed.tobytes(), memoryview(packed)):
        assert hasher.hashes(same) == expected


def test_deployments_tenants_and_adapters_share_nothing() -> None:
    roots = [
        chain_root(seed, salt, adapter)
        for seed in (1, 2)
        for salt in ("", "a", "ab")
        for adapter in ("", "b", "c")
    ]
    assert len(set(roots)) == len(roots)
    hasher = BlockHasher(block_tokens=2)
    assert len({hasher.hashes([1, 2], root) for root in roots}) == len(roots)
    assert BlockHasher(block_tokens=2, seed=1).hashes([1, 2]) == hasher.hashes([1, 2], chain_root(1))


@pytest.mark.parametrize("kwargs", [{"block_tokens": 0}, {"seed": -1}, {"seed": 1 << 64}])
def test_absurd_settings_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        BlockHasher(**kwargs)


@pytest.mark.parametrize("ids", [[-1, 2], [1 << 32, 2]])
def test_absurd_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        BlockHasher(block_tokens=2).hashes(ids)
