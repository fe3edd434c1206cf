"""Data-parallel groups: what routing counts of a prefill that holds up others, and roles that change together."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.planner.fixed_roles import best_roles
from prfaas.core.scheduling.allocation import Allocator, PdInstance, PdLoad, StageLoad
from prfaas.core.scheduling.decision import Route, RoutingRequest
from prfaas.core.scheduling.live_problem import group_ranks
from prfaas.core.scheduling.policy import policy_named
from prfaas.core.scheduling.view import InstanceView, View

from .test_allocation import BUSY, IDLE, problem_of
from .views import NOW_S, board, decoder, prefiller

RANKS = ("d0", "d1", "d2", "d3")


def decoding(*, in_group: bool) -> View:
    """One that prefills far away, and decode instances that must prefill what is not offloaded."""
    group = RANKS if in_group else ()
    return board(
        prefiller("remote", "far"), *(decoder(name, group=group) for name in RANKS), threshold=4000.0
    )


@pytest.mark.parametrize("policy", ["paper", "tilted"])
def test_a_prompt_that_would_hold_up_three_others_is_offloaded_at_a_quarter_of_the_length(
    policy: str,
) -> None:
    chosen = policy_named(policy)
    for in_group, short, long in ((False, 3900, 4100), (True, 900, 1100)):
        routes = [
            chosen.decide(RoutingRequest(tokens), decoding(in_group=in_group)).route
            for tokens in (short, long)
        ]
        assert routes == [Route.LOCAL, Route.OFFLOAD]


def test_what_others_wait_counts_where_times_are_compared() -> None:
    # Alone the far prefill is a little later, for its link.
    request = RoutingRequest(2000)
    routes = [policy_named("least_ttft").decide(request, decoding(in_group=g)).route for g in (False, True)]
    assert routes == [Route.LOCAL, Route.OFFLOAD]


def test_of_two_pd_clusters_the_one_where_nobody_is_held_up() -> None:
    for group in ((), ("a0", "a1")):
        ranks = [decoder(name, group=group) for name in ("a0", "a1")]
        view = board(*ranks, decoder("b", "other", busy_until_s=NOW_S + 0.1), links=[])
        decision = policy_named("least_ttft").decide(RoutingRequest(2000), view)
        assert (decision.prefill, decision.decode) == (("b", "b") if group else ("a0", "a0"))


def test_who_only_prefills_holds_up_nobody() -> None:
    names = ("p0", "p1")
    view = board(*(prefiller(name, group=names) for name in names), decoder("d"))
    assert not any(each.held_up for each in view.clusters["pd"].instances)


def load(prefills: Sequence[bool], groups: Sequence[int], prefill: StageLoad, decode: StageLoad) -> PdLoad:
    """Groups of these sizes, each with its role."""
    instances = []
    for number, (does, size) in enumerate(zip(prefills, groups, strict=True)):
        names = tuple(f"g{number}r{rank}" for rank in range(size))
        group = names if size > 1 else ()
        instances += [PdInstance(name, does, not does, busy=number, group=group) for name in names]
    return PdLoad("home", tuple(instances), prefill, decode)


def test_a_group_changes_its_role_as_a_whole() -> None:
    # The paper's best split of eight is three and five: two and six or four and four with groups of two.
    problem = problem_of()
    problem = replace(problem, pd=(replace(problem.pd[0], group_ranks=2),))
    best = best_roles(problem)["home"]
    assert best in (2, 4)
    shown = (
        load([True] + [False] * 3, [2] * 4, BUSY, IDLE)
        if best == 4
        else load([True] * 2 + [False] * 2, [2] * 4, IDLE, BUSY)
    )
    allocator = Allocator(persist=1)
    conversion = allocator.decide([shown], problem, 0.0)
    assert conversion is not None and conversion.instance.endswith("r0")
    assert conversion.to_role == ("prefill" if best == 4 else "decode")


def test_a_group_of_more_than_are_wanted_stays() -> None:
    problem = problem_of()
    assert best_roles(problem)["home"] == 3
    # One or two more are wanted, and those that could give them are seven together.
    assert Allocator(persist=1).decide([load([True, False], [1, 7], BUSY, IDLE)], problem, 0.0) is None
    # Beside the group there are two that can.
    conversion = Allocator(persist=1).decide(
        [load([True, False, False, False], [1, 5, 1, 1], BUSY, IDLE)], problem, 0.0
    )
    assert conversion is not None and conversion.instance in ("g2r0", "g3r0")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_what_divides_all_groups(sizes: list[int]) -> None:
    views = [
        InstanceView(
            f"g{number}r{rank}",
            "pd",
            True,
            False,
            group=tuple(f"g{number}r{k}" for k in range(size)) if size > 1 else (),
        )
        for number, size in enumerate(sizes)
        for rank in range(size)
    ]
    found = group_ranks(views)
    assert all(size % found == 0 for size in sizes)
    assert group_ranks([]) == 1
