"""The record of who holds what: bounded, prefix-closed, forgetful."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cache import BlockHasher, PrefixRecord

HASHER = BlockHasher(block_tokens=2)
PROMPT = st.lists(st.integers(0, 2), max_size=16)


@settings(deadline=None)
@given(st.lists(PROMPT, max_size=12), PROMPT)
def test_without_a_bound_the_longest_added_prefix_is_found(added: list[list[int]], asked: list[int]) -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=1000)
    for prompt in added:
        record.add("a", HASHER.hashes(prompt))
    longest = 0
    for prompt in added:
        while prompt[: longest + 2] == asked[: longest + 2] and len(prompt) >= longest + 2 <= len(asked):
            longest += 2
    assert record.cached_tokens("a", HASHER.hashes(asked)) == longest
    assert record.cached_tokens("b", HASHER.hashes(asked)) == 0


@settings(deadline=None)
@given(st.lists(PROMPT, max_size=30), st.integers(1, 6))
def test_what_is_held_is_bounded_and_closed_under_prefixes(added: list[list[int]], capacity: int) -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=capacity)
    for prompt in added:
        record.add("a", HASHER.hashes(prompt))
    assert record.blocks("a") <= capacity
    for prompt in added:
        chain = HASHER.hashes(prompt)
        cached = record.cached_tokens("a", chain) // 2
        # Bisection must agree with a scan, which it does only if no chain is held without its head.
        assert [record.cached_tokens("a", chain[: i + 1]) for i in range(len(chain))] == [
            min(i + 1, cached) * 2 for i in range(len(chain))
        ]


def test_the_least_recently_added_tail_goes_first() -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=3)
    old, new = HASHER.hashes([1, 1, 2, 2]), HASHER.hashes([3, 3, 4, 4])
    record.add("a", old)
    record.add("a", new)
    assert record.cached_tokens("a", new) == 4
    assert record.cached_tokens("a", old) == 2


def test_a_failed_instance_holds_nothing() -> None:
    record = PrefixRecord(block_tokens=2, capacity_blocks=3)
    record.add("a", HASHER.hashes([1, 1]))
    record.forget("a")
    record.forget("never seen")
    assert record.cached_tokens("a", HASHER.hashes([1, 1])) == 0
