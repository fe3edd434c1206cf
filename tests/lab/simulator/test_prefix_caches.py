"""All instances' caches against one naive cache per instance."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.prefix.index import PrefixHit
from prfaas.lab.simulator.prefix_caches import CacheOptions, PrefixCaches

NAMES = ("pd-0", "pd-1", "prfaas-0")


@dataclass
class NaiveCache:
    """One instance. `entries`: block → (when it was used, whether a state is kept at its end)."""

    capacity_tokens: int
    block_tokens: int
    checkpoint_blocks: int | None
    state_tokens: int
    clock: int = 0
    entries: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def held(self, blocks: tuple[int, ...], num_tokens: int) -> PrefixHit:
        attention = reusable = 0
        for number, block in enumerate(blocks[: num_tokens // self.block_tokens], 1):
            if block not in self.entries:
                break
            attention = number * self.block_tokens
            if self.checkpoint_blocks is None or self.entries[block][1]:
                reusable = attention
        return PrefixHit(reusable, attention)

    def insert(self, blocks: tuple[int, ...], num_tokens: int, with_states: bool) -> None:
        whole = blocks[: num_tokens // self.block_tokens]
        for number in range(len(whole), 0, -1):
            self.clock += 1
            block = whole[number - 1]
            has_state = self.entries.get(block, (0, False))[1]
            if self.checkpoint_blocks is not None and with_states:
                has_state |= number == len(whole) or number % self.checkpoint_blocks == 0
            self.entries[block] = (self.clock, has_state)
        while self.used_tokens() > self.capacity_tokens:
            del self.entries[min(self.entries, key=lambda block: self.entries[block][0])]

    def used_tokens(self) -> int:
        return sum(self.block_tokens + self.state_tokens * has for _, has in self.entries.values())


def chain(path: tuple[int, ...]) -> tuple[int, ...]:
    """Block ids of a prompt whose blocks have these texts: each stands for all before it too."""
    return tuple(hash(path[: end + 1]) for end in range(len(path)))


prompts = st.tuples(
    st.lists(st.integers(0, 2), min_size=0, max_size=9).map(lambda path: chain(tuple(path))),
    st.integers(0, 7),
)
uses = st.lists(st.tuples(st.sampled_from(NAMES), prompts, st.integers(0, 19)), max_size=40)


@pytest.mark.slow("simulates hours of traffic")
@settings(max_examples=300)
@given(
    uses,
    st.integers(0, 150),
    st.sampled_from([None, 3, 8, 16, 20]),
    st.sampled_from([0, 5, 11]),
)
def test_all_is_as_in_one_cache_per_instance(
    steps: list[tuple[str, tuple[tuple[int, ...], int], int]],
    capacity_tokens: int,
    checkpoint_tokens: int | None,
    state_tokens: int,
) -> None:
    block_tokens = 8
    options = CacheOptions(capacity_tokens, checkpoint_tokens, state_tokens)
    caches = PrefixCaches(NAMES, options, block_tokens)
    every = None if checkpoint_tokens is None else max(1, round(checkpoint_tokens / block_tokens))
    naive = {name: NaiveCache(capacity_tokens, block_tokens, every, state_tokens) for name in NAMES}
    for name, (blocks, missing), dice in steps:
        # The last block may be cut short.
        num_tokens = max(0, len(blocks) * block_tokens - missing)
        expected = {each: cache.held(blocks, num_tokens) for each, cache in naive.items()}
        assert caches.held(list(blocks), num_tokens) == {
            each: held for each, held in expected.items() if held.attention_tokens
        }
        if dice == 0:
            caches.clear(name)
            naive[name].entries.clear()
        else:
            with_states = dice % 3 > 0
            caches.insert(name, list(blocks), num_tokens, with_states=with_states)
            naive[name].insert(blocks, num_tokens, with_states)
        for each in NAMES:
            assert caches.used_tokens(each) == naive[each].used_tokens() <= capacity_tokens
    for each in NAMES:
        caches.clear(each)
        assert caches.used_tokens(each) == 0


@given(st.lists(prompts, max_size=30), st.integers(1, 12))
def test_a_block_never_outlives_the_one_before_it(
    inserted: list[tuple[tuple[int, ...], int]], capacity_blocks: int
) -> None:
    """What is kept is whole prefixes: whoever holds a block can reach it."""
    caches = PrefixCaches(["one"], CacheOptions(8 * capacity_blocks), 8)
    every = [list(blocks) for blocks, _ in inserted]
    for blocks in every:
        caches.insert("one", blocks, 8 * len(blocks))
        reachable: set[int] = set()
        for prompt in every:
            for hit in caches.held(prompt, 8 * len(prompt)).values():
                reachable.update(prompt[: hit.attention_tokens // 8])
        assert 8 * len(reachable) == caches.used_tokens("one")


def test_the_tail_of_what_was_used_longest_ago_goes_first() -> None:
    caches = PrefixCaches(["one"], CacheOptions(50), 10)
    caches.insert("one", [1, 2, 3], 30)
    caches.insert("one", [1, 2, 4], 30)
    caches.insert("one", [7, 8], 25)
    assert caches.held([1, 2, 3], 30) == {"one": PrefixHit(20, 20)}
    assert caches.held([1, 2, 4], 30) == {"one": PrefixHit(30, 30)}
    assert caches.held([7, 8], 20) == {"one": PrefixHit(20, 20)}


def test_a_hybrid_model_goes_on_from_a_state_only() -> None:
    caches = PrefixCaches(["a", "b"], CacheOptions(1000, checkpoint_tokens=40), 10)
    caches.insert("a", [1, 2, 3, 4, 5, 6], 60)
    caches.insert("b", [1, 2, 3], 39)
    assert caches.held([1, 2, 3, 4, 5, 9], 60) == {"a": PrefixHit(40, 50), "b": PrefixHit(30, 30)}
    assert caches.held([1, 2, 8], 30) == {"a": PrefixHit(0, 20), "b": PrefixHit(0, 20)}
    assert caches.held([1, 2, 3, 4, 5, 6], 60)["a"] == PrefixHit(60, 60)
    assert caches.held([1], 9) == {}


def test_of_a_prompt_that_came_from_elsewhere_a_hybrid_model_has_no_state() -> None:
    """The state comes for the whole prompt but its last token, which is hardly ever where a block ends."""
    hybrid = PrefixCaches(["a"], CacheOptions(1000, checkpoint_tokens=20), 10)
    dense = PrefixCaches(["a"], CacheOptions(1000), 10)
    for caches in (hybrid, dense):
        caches.insert("a", [1, 2, 3, 4], 45, with_states=False)
    assert hybrid.held([1, 2, 3, 4], 45) == {"a": PrefixHit(0, 40)}
    assert dense.held([1, 2, 3, 4], 45) == {"a": PrefixHit(40, 40)}
    hybrid.insert("a", [1, 2], 25)
    assert hybrid.held([1, 2, 3, 4], 45) == {"a": PrefixHit(20, 40)}


@pytest.mark.parametrize(
    ("capacity_tokens", "checkpoint_tokens", "state_tokens", "block_tokens", "words"),
    [
        (1, None, 0, 0, "at least one token"),
        (1, 0, 0, 1, "every 1 token or more"),
        (1, None, -1, 1, "0 tokens or more"),
        (-1, None, 0, 1, "0 tokens or more"),
    ],
)
def test_impossible_caches(
    capacity_tokens: int, checkpoint_tokens: int | None, state_tokens: int, block_tokens: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        PrefixCaches(["a"], CacheOptions(capacity_tokens, checkpoint_tokens, state_tokens), block_tokens)
