"""What stages do with some roles, worked out for several roles at once."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from prfaas.core.planner import PlanProblem
from prfaas.core.planner.loads import work_of
from prfaas.core.planner.role_works import work_with_prefill, works_with_prefill
from prfaas.core.planner.ttft import StageWork
from prfaas.core.planner.two_clusters import (
    candidate_lengths,
    highest,
    merits,
    own_split,
    settled,
)

from .oracle import TwoClusters
from .problems import continuous, two_clusters

Case = tuple[PlanProblem, Callable[[list[tuple[float, float]]], TwoClusters]]


def alone(problem: PlanProblem, count: int) -> StageWork:
    """Without anything in common: the best of the candidates, and what the stages do there."""
    split = own_split(problem, "mean length")
    candidates = candidate_lengths(split)
    (place,) = highest(*merits(split, split.loads(candidates), [count]))
    return work_of(split, settled(problem, float(candidates[place])), count)


def names(work: StageWork) -> list[object]:
    pools = [(pool.name, pool.instances, pool.smooth) for pool in work.pools]
    return [*pools, *work.link_rates, *work.decode_parts.items()]


def sums(work: StageWork) -> list[float]:
    """What roles are compared by."""
    pools = [[pool.work_s, pool.part, float(pool.times.squares.sum())] for pool in work.pools]
    return [*work.link_rates.values(), *(each for pool in pools for each in pool)]


def same(one: StageWork, other: StageWork) -> bool:
    """But for how the same numbers were grouped when they were added."""
    return names(one) == names(other) and sums(one) == pytest.approx(sums(other), rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(two_clusters())
def test_what_is_shared_changes_nothing(case: Case) -> None:
    problem, _ = case
    counts = range(problem.pd[0].instances + 1)
    found = works_with_prefill(problem, counts)
    assert list(found) == list(counts)
    assert all(same(found[count], alone(problem, count)) for count in counts)


@settings(deadline=None, max_examples=3)
@given(two_clusters(continuous))
def test_nor_does_it_where_lengths_have_no_atoms(case: Case) -> None:
    problem, _ = case
    assert same(work_with_prefill(problem, 1), alone(problem, 1))
