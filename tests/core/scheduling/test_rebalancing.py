"""Copies of hot prefixes: only when they are wanted often, somebody has them, and bandwidth is to spare."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.prefix.index import PoolHit, PrefixHit
from prfaas.core.scheduling.rebalancing import Rebalancer, missed_prefix
from prfaas.core.scheduling.view import LinkView, PoolView

from .views import board, prefiller

GIB = 2**30


def link(source: str, target: str, spare_bytes: float = 10 * GIB, up: bool = True) -> LinkView:
    """A link that has `spare_bytes` to spare in a minute."""
    return LinkView(source, target, spare_bytes * 8 / 60 / 0.7, up=up)


TO_HOME = link("east", "home")


def missed(rebalancer: Rebalancer, key: str, times: int, *, tokens: int = 1000, size: int = GIB,
           target: str = "home", held: tuple[str, ...] = ("east",), start_s: float = 0.0) -> None:  # fmt: skip
    for i in range(times):
        rebalancer.observe(key, tokens, size, target, held, start_s + i)


def test_copies_what_was_missing_often() -> None:
    rebalancer = Rebalancer(min_misses=4)
    missed(rebalancer, "hot", 3)
    assert rebalancer.decide([TO_HOME], 10) == ()
    rebalancer.observe("hot", 1000, GIB, "home", ("east",), 60)
    (copy,) = rebalancer.decide([TO_HOME], 70)
    assert (copy.key, copy.source, copy.target, copy.tokens, copy.num_bytes) == (
        "hot",
        "east",
        "home",
        1000,
        GIB,
    )
    assert 3 < copy.misses < 4


def test_misses_count_within_the_window_and_per_cluster() -> None:
    rebalancer = Rebalancer(min_misses=4, window_s=100)
    for i in range(8):
        rebalancer.observe("slow", 1000, GIB, "home", ("east",), 40.0 * i)
        rebalancer.observe("spread", 1000, GIB, f"home{i % 4}", ("east",), 40.0 * i)
    links = [TO_HOME, *(link("east", f"home{i}") for i in range(4))]
    assert rebalancer.decide(links, 281) == ()
    # Four in time, but long ago.
    missed(rebalancer, "old", 4, start_s=300)
    assert rebalancer.decide(links, 450) == ()


def test_each_copy_is_decided_once_per_cool_down() -> None:
    rebalancer = Rebalancer(cool_down_s=1000)
    missed(rebalancer, "hot", 9)
    assert len(rebalancer.decide([TO_HOME], 10)) == 1
    missed(rebalancer, "hot", 9, start_s=20)
    assert rebalancer.decide([TO_HOME], 80) == ()
    missed(rebalancer, "hot", 9, start_s=1000)
    assert len(rebalancer.decide([TO_HOME], 1011)) == 1


@pytest.mark.parametrize(
    ("links", "held"),
    [
        ([], ("east",)),
        ([link("home", "east")], ("east",)),
        ([link("east", "away")], ("east",)),
        ([link("east", "home", up=False)], ("east",)),
        ([replace(TO_HOME, joins_pools=False)], ("east",)),
        ([TO_HOME], ()),
        ([TO_HOME], ("north",)),
        ([link("east", "home", spare_bytes=0.9 * GIB)], ("east",)),
    ],
    ids=[
        "no link",
        "the other way",
        "to another",
        "down",
        "another dtype",
        "nobody has it",
        "unlinked holder",
        "no room",
    ],
)
def test_no_copy_where_there_is_no_way(links: list[LinkView], held: tuple[str, ...]) -> None:
    rebalancer = Rebalancer()
    missed(rebalancer, "hot", 9, held=held)
    assert rebalancer.decide(links, 10) == ()
    # It stays due.
    rebalancer.observe("hot", 1000, GIB, "home", ("east",), 11)
    assert len(rebalancer.decide([TO_HOME], 80)) == 1


def test_what_the_link_carries_and_its_headroom_are_not_to_spare() -> None:
    bits_per_s = 8 * GIB / 60
    for egress, copies in ((0.0, 1), (0.65, 1), (0.75, 0)):
        rebalancer = Rebalancer(headroom=0.3)
        missed(rebalancer, "hot", 9)
        busy = LinkView("east", "home", 2.5 * bits_per_s, egress_bits_per_s=egress * bits_per_s)
        assert len(rebalancer.decide([busy], 10)) == copies


def test_the_most_computing_per_byte_comes_first() -> None:
    rebalancer = Rebalancer()
    missed(rebalancer, "big", 9, tokens=9000, size=4 * GIB)
    missed(rebalancer, "dense", 5, tokens=9000, size=GIB)
    missed(rebalancer, "hotter", 9, tokens=9000, size=GIB)
    missed(rebalancer, "short", 9, tokens=1000, size=GIB)
    wide = link("east", "home", spare_bytes=20 * GIB)
    assert [copy.key for copy in rebalancer.decide([wide], 20)] == ["hotter", "dense", "big", "short"]


def test_the_source_with_most_room_gives() -> None:
    rebalancer = Rebalancer()
    missed(rebalancer, "hot", 9, held=("east", "north"))
    links = [link("east", "home", 2 * GIB), link("north", "home", 3 * GIB)]
    assert [copy.source for copy in rebalancer.decide(links, 10)] == ["north"]


def test_prefixes_seen_once_push_out_nothing_that_came_twice() -> None:
    rebalancer = Rebalancer(capacity=50)
    missed(rebalancer, "hot", 2)
    for i in range(5000):
        rebalancer.observe(i, 1000, GIB, "home", ("east",), 10 + i * 0.001)
    missed(rebalancer, "hot", 2, start_s=20)
    assert [copy.key for copy in rebalancer.decide([TO_HOME], 30)] == ["hot"]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 30),
            st.integers(0, 12),
            st.sampled_from(["home", "away"]),
            st.sampled_from([(), ("east",), ("east", "north"), ("north",)]),
            st.booleans(),
        ),
        max_size=150,
    ),
    st.floats(0.5, 8),
)
def test_bandwidth_is_never_overcommitted_and_memory_is_bounded(
    events: list[tuple[float, int, str, tuple[str, ...], bool]], spare_gib: float
) -> None:
    rebalancer = Rebalancer(min_misses=2, cool_down_s=300, capacity=8)
    links = [link("east", "home", spare_gib * GIB), link("north", "away", spare_gib * GIB)]
    now_s, start_s = 0.0, None
    moved: dict[tuple[str, str], float] = {}
    decided: dict[tuple[object, str], float] = {}
    for gap_s, key, target, held, decide in events:
        now_s += gap_s
        rebalancer.observe(key, 1000, GIB * (1 + key % 3), target, held, now_s)
        assert len(rebalancer) <= 3 * 8
        if not decide:
            continue
        start_s = now_s if start_s is None else start_s
        for copy in rebalancer.decide(links, now_s):
            way = (copy.source, copy.target)
            assert way in {("east", "home"), ("north", "away")}
            moved[way] = moved.get(way, 0.0) + copy.num_bytes
            # A full list forgets when it decided; with 13 prefixes and room for 8 that can happen.
            if len(rebalancer._decided_s) < 8:
                before = decided.get((copy.key, copy.target), -1e9)
                assert now_s - before >= 300
            decided[copy.key, copy.target] = now_s
        for total in moved.values():
            assert total <= spare_gib * GIB * (now_s - start_s + 60) / 60 * (1 + 1e-9)


def test_memory_is_bounded_however_much_is_hot() -> None:
    rebalancer = Rebalancer(capacity=8)
    for i in range(100):
        missed(rebalancer, f"hot{i}", 4, start_s=i)
        assert len(rebalancer) <= 16
    decided = 0
    for i in range(100):
        missed(rebalancer, f"hotter{i}", 4, start_s=200 + 60 * i)
        decided += len(rebalancer.decide([TO_HOME], 250 + 60 * i))
        assert len(rebalancer) <= 24
    assert decided >= 100


def test_unused_bandwidth_is_not_saved_up() -> None:
    rebalancer = Rebalancer(period_s=60)
    narrow = link("east", "home", spare_bytes=GIB)
    rebalancer.decide([narrow], 0)
    for key in ("a", "b", "c"):
        missed(rebalancer, key, 9, start_s=400)
    assert len(rebalancer.decide([narrow], 600)) == 1
    assert len(rebalancer.decide([narrow], 630)) == 0
    assert len(rebalancer.decide([narrow], 690)) == 1


@given(
    gaps_s=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    min_misses=st.integers(2, 5),
    wait_s=st.integers(0, 120),
)
@settings(deadline=None, max_examples=200)
def test_due_are_just_those_with_so_many_misses_in_the_window(
    gaps_s: list[int], min_misses: int, wait_s: int
) -> None:
    rebalancer = Rebalancer(min_misses=min_misses, window_s=100)
    times_s = list(accumulate(gaps_s))
    for time_s in times_s:
        missed(rebalancer, "hot", 1, start_s=time_s)
    now_s = times_s[-1] + wait_s
    within = sum(now_s - time_s <= 100 for time_s in times_s)
    assert len(rebalancer.decide([TO_HOME], now_s)) == (within >= min_misses)


@given(
    st.dictionaries(
        st.sampled_from(["home-0", "home-1", "east-0", "east-1", "north-0"]),
        st.integers(0, 4).map(lambda tens: 10 * tens),
    )
)
def test_what_is_missed_is_what_another_cluster_holds_beyond_all_pools_here(held: dict[str, int]) -> None:
    view = board(prefiller("home-p", "home"), prefiller("east-p", "east"), prefiller("north-p", "north"))
    for name in ("home-0", "home-1", "east-0", "east-1", "north-0"):
        cluster = name.partition("-")[0]
        view.pools[name] = PoolView(name, cluster, ("home-p",) if name == "home-1" else ())
    pools = {name: PoolHit(PrefixHit(n, n), PrefixHit(0, 0)) for name, n in held.items()}
    missed = missed_prefix(pools, "home-p", view)
    here = max((tokens for name, tokens in held.items() if name.startswith("home")), default=0)
    there = max((tokens for name, tokens in held.items() if not name.startswith("home")), default=0)
    if there <= here:
        assert missed is None
        return
    assert missed is not None
    assert (missed.tokens, missed.held_tokens, missed.target.name) == (there, here, "home-1")
    assert missed.num_bytes == view.kv.prefix_bytes_to_move(there, here)
    assert set(missed.sources) == {name.partition("-")[0] for name, n in held.items() if n == there} - {
        "home"
    }
    assert all(held[name] == there and name.startswith(place) for place, name in missed.sources.items())
    # Who has no pool misses nothing that a pool could get.
    assert missed_prefix(pools, "east-p", view) is None
