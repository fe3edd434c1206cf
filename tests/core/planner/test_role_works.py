"""What stages do with some roles, worked out for several roles at once."""

import math
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings

from prfaas.core.planner import PlanProblem
from prfaas.core.planner.loads import work_of
from prfaas.core.planner.role_works import work_with_prefill, works_with_prefill
from prfaas.core.planner.ttft import StageWork
from prfaas.core.planner.two_clusters import best_of, own_split, settled

from .oracle import TwoClusters
from .problems import continuous, two_clusters

Case = tuple[PlanProblem, Callable[[list[tuple[float, float]]], TwoClusters]]


def alone(problem: PlanProblem, count: int) -> StageWork:
    """Without anything in common: the best length, and what the stages do there."""
    split = own_split(problem, "mean length")
    length = best_of(split, [count])[1] if split.remote is not None else math.inf
    return work_of(split, settled(problem, length), count)


def same(one: StageWork, other: StageWork) -> bool:
    """To the last bit."""
    return (
        (one.link_rates, one.decode_parts) == (other.link_rates, other.decode_parts)
        and [(pool.name, pool.instances, pool.smooth) for pool in one.pools]
        == [(pool.name, pool.instances, pool.smooth) for pool in other.pools]
        and all(
            np.array_equal(mine.seconds, yours.seconds) and np.array_equal(mine.weights, yours.weights)
            for mine, yours in zip(one.pools, other.pools, strict=True)
        )
    )


@settings(deadline=None, max_examples=150)
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
