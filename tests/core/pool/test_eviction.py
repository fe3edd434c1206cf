"""Eviction: what goes first, what never goes, and that sizes add up."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.groups import GroupKind, KvGroup
from prfaas.core.pool.eviction import EVICTION_POLICIES, CostAwareEviction, EvictionPolicy, eviction_policy

GROUPS = (KvGroup(0, GroupKind.FULL, 16, 0), KvGroup(1, GroupKind.STATE, 16, 0))
BLOCK, STATE = 100, 1000


def made(name: str) -> EvictionPolicy[bytes]:
    return eviction_policy(name, GROUPS)


def page(text: str) -> bytes:
    return text.encode()


def add_chain(policy: EvictionPolicy[bytes], name: str, blocks: int, states: Sequence[int] = ()) -> None:
    """Blocks "<name>0", "<name>1", … from head to tail, and "<name><n>s", the state at the end of block n."""
    for number in range(blocks):
        policy.added(page(f"{name}{number}"), BLOCK, 0, page(f"{name}{number - 1}") if number else None)
        if number in states:
            policy.added(page(f"{name}{number}s"), STATE, 1, page(f"{name}{number}"))


def goes(policy: EvictionPolicy[bytes], count: int) -> list[str]:
    """The next so many to go, each removed."""
    gone = []
    for _ in range(count):
        victim = policy.victim(lambda _page: True)
        if victim is None:
            break
        policy.removed(victim)
        gone.append(victim.decode())
    return gone


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_the_tail_of_a_prefix_goes_before_its_head(name: str) -> None:
    policy = made(name)
    add_chain(policy, "a", 3)

    assert goes(policy, 9) == ["a2", "a1", "a0"]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_state_goes_before_its_block(name: str) -> None:
    policy = made(name)
    add_chain(policy, "a", 2, states=[1])

    assert goes(policy, 9) == ["a1s", "a1", "a0"]


def test_lru_takes_the_chain_that_was_not_used() -> None:
    policy = made("lru")
    add_chain(policy, "a", 2)
    add_chain(policy, "b", 2)
    policy.touched(page("a0"))
    policy.touched(page("a1"))

    assert goes(policy, 3) == ["b1", "b0", "a1"]


def test_lru_keeps_a_head_that_was_used_without_its_tail() -> None:
    policy = made("lru")
    add_chain(policy, "a", 3)
    add_chain(policy, "b", 1)
    policy.touched(page("a0"))

    assert goes(policy, 4) == ["a2", "a1", "b0", "a0"]


def test_cost_keeps_the_state_that_saves_more() -> None:
    policy = made("cost")
    add_chain(policy, "long", 8, states=[7])
    add_chain(policy, "short", 2, states=[1])

    assert goes(policy, 1) == ["short1s"]


def test_cost_counts_the_whole_prefix_of_a_state() -> None:
    policy = made("cost")
    add_chain(policy, "a", 8, states=[4, 7])
    add_chain(policy, "b", 6, states=[5])

    assert [each for each in goes(policy, 99) if each.endswith("s")] == ["a4s", "b5s", "a7s"]


def test_cost_counts_a_state_that_came_before_its_block_once_it_is_used() -> None:
    policy = made("cost")
    policy.added(page("a1s"), STATE, 1, page("a1"))
    add_chain(policy, "a", 2)
    policy.touched(page("a1s"))
    add_chain(policy, "b", 3, states=[2])

    # Two uses of two blocks against one of three.
    assert [each for each in goes(policy, 99) if each.endswith("s")] == ["b2s", "a1s"]


def test_cost_ages_what_is_not_used() -> None:
    policy = made("cost")
    policy.added(page("worth ten"), BLOCK // 10, 0)
    policy.added(page("first"), BLOCK, 0)
    gone = []
    for number in range(30):
        policy.added(page(f"{number}"), BLOCK, 0)
        gone += goes(policy, 1)

    assert 8 <= gone.index("worth ten") <= 20


def test_cost_weighs_seconds_as_they_are_given() -> None:
    # Late tokens take longer: attention over more of them.
    policy: CostAwareEviction[str] = CostAwareEviction(GROUPS, lambda start, end: float(end**2 - start**2))
    policy.added("a0", BLOCK, 0)
    policy.added("a1", BLOCK, 0, "a0")
    policy.added("b0", BLOCK, 0)

    assert policy.victim(lambda _page: True) == "b0"


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match='no eviction policy "fifo"; there are lru, cost'):
        made("fifo")


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@given(seed=st.integers(0, 10_000))
def test_nothing_in_use_goes_no_parent_before_its_child_and_sizes_add_up(name: str, seed: int) -> None:
    rng = random.Random(seed)
    policy = made(name)
    sizes: dict[bytes, int] = {}
    parents: dict[bytes, bytes | None] = {}
    for step in range(200):
        here = list(sizes)
        match rng.randrange(5):
            case 0 | 1:
                # Sometimes a parent that is not here (any more).
                parent = rng.choice([*here, None, page(f"absent{rng.randrange(3)}")])
                new, size = page(f"p{step}"), rng.randrange(1, 1000)
                policy.added(new, size, rng.randrange(2), parent)
                sizes[new], parents[new] = size, parent
            case 2:
                policy.touched(rng.choice([*here, page("absent")]))
            case 3:
                gone = rng.choice([*here, page("absent")])
                policy.removed(gone)
                sizes.pop(gone, None)
            case _:
                in_use = set(rng.sample(here, rng.randrange(len(here) + 1)))
                victim = policy.victim(lambda each, in_use=in_use: each not in in_use)  # type: ignore[misc]
                may_go = [
                    each
                    for each in here
                    if each not in in_use and all(parents[other] != each for other in here)
                ]
                assert (victim is None) == (not may_go)
                if victim is not None:
                    assert victim in may_go
                    policy.removed(victim)
                    del sizes[victim]
        assert policy.used_bytes == sum(sizes.values())


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_many_uses_take_no_more_memory(name: str) -> None:
    policy = made(name)
    add_chain(policy, "a", 3)
    for _ in range(10_000):
        policy.touched(page("a2"))

    assert len(policy._queue) < 2_000
