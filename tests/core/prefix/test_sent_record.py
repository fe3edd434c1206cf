"""The record of who holds what: bounded, prefix-closed, forgetful."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.prefix import BlockHasher, PrefixHit, PrefixRecord

HASHER = BlockHasher(block_tokens=2)
PROMPT = st.lists(st.integers(0, 2), max_size=16)


def common_blocks(a: list[int], b: list[int]) -> int:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return length // 2


@settings(deadline=None)
@given(st.lists(PROMPT, max_size=12), PROMPT, st.booleans())
def test_without_a_bound_the_longest_added_prefix_is_found(
    added: list[list[int]], asked: list[int], only_ends: bool
) -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=1000, only_ends=only_ends)
    for prompt in added:
        record.add("a", HASHER.hashes(prompt))
    longest = max((common_blocks(prompt, asked) for prompt in added), default=0)
    ends = [len(prompt) // 2 for prompt in added if common_blocks(prompt, asked) == len(prompt) // 2]
    reusable = max(ends, default=0) if only_ends else longest
    assert record.held("a", HASHER.hashes(asked)) == PrefixHit(reusable * 2, longest * 2)
    assert record.held("b", HASHER.hashes(asked)) == PrefixHit(0, 0)


@settings(deadline=None)
@given(st.lists(PROMPT, max_size=30), st.integers(1, 6))
def test_what_is_held_is_bounded_and_closed_under_prefixes(added: list[list[int]], capacity: int) -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=capacity)
    for prompt in added:
        record.add("a", HASHER.hashes(prompt))
    assert record.blocks("a") <= capacity
    for prompt in added:
        chain = HASHER.hashes(prompt)
        cached = record.held("a", chain).attention_tokens // 2
        # Bisection must agree with a scan, which it does only if no chain is held without its head.
        assert [record.held("a", chain[: i + 1]).attention_tokens for i in range(len(chain))] == [
            min(i + 1, cached) * 2 for i in range(len(chain))
        ]


def test_the_least_recently_added_tail_goes_first() -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=3)
    old, new = HASHER.hashes([1, 1, 2, 2]), HASHER.hashes([3, 3, 4, 4])
    record.add("a", old)
    record.add("a", new)
    assert record.held("a", new) == PrefixHit(4, 4)
    assert record.held("a", old) == PrefixHit(2, 2)


def test_of_a_prompt_longer_than_the_record_the_head_is_kept() -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=2, only_ends=True)
    chain = HASHER.hashes([1, 1, 2, 2, 3, 3])
    record.add("a", chain)
    assert record.held("a", chain) == PrefixHit(0, 4)


def test_a_failed_instance_holds_nothing() -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=3)
    record.add("a", HASHER.hashes([1, 1]))
    record.forget("a")
    record.forget("never seen")
    assert record.held("a", HASHER.hashes([1, 1])) == PrefixHit(0, 0)
    assert record.blocks("a") == 0
