"""Data-parallel groups have a role as a whole: the planner divides a cluster between groups only."""

from dataclasses import replace

import pytest

from prfaas.core.planner import PlanProblem, best_operation
from prfaas.core.planner.fixed_roles import best_roles, rate_with_roles
from prfaas.core.planner.problem import TtftTarget
from prfaas.core.planner.ttft_target import best_within_target

from .problems import paper_problem


def grouped(problem: PlanProblem, ranks: int) -> PlanProblem:
    return replace(problem, pd=tuple(replace(pd, group_ranks=ranks) for pd in problem.pd))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_of_two_clusters_the_best_split_between_groups_is_found(ranks: int) -> None:
    problem = paper_problem(pd=12)
    rates = {n: rate_with_roles(problem, {"home": n}) for n in range(0, 13, ranks)}
    best = best_roles(grouped(problem, ranks))["home"]
    assert rates[best] == pytest.approx(max(rates.values()), rel=1e-3)
    assert best_operation(grouped(problem, ranks)).n_prefill % ranks == 0


def two_clusters() -> PlanProblem:
    """Groups of four, and groups of three."""
    problem = paper_problem(pd=8)
    return replace(
        problem,
        pd=(
            replace(problem.pd[0], group_ranks=4),
            replace(problem.pd[0], name="other", instances=6, group_ranks=3),
        ),
        links=(*problem.links, replace(problem.links[0], target="other")),
    )


def test_of_several_clusters_too() -> None:
    two = two_clusters()
    best = best_roles(two)
    assert best["home"] % 4 == 0 and best["other"] % 3 == 0
    options = [rate_with_roles(two, {"home": h, "other": o}) for h in (0, 4, 8) for o in (0, 3, 6)]
    assert rate_with_roles(two, best) >= 0.99 * max(options)


def test_with_a_target_for_the_first_token() -> None:
    problem = grouped(paper_problem(pd=8), 2)
    found = best_operation(replace(problem, ttft_target=TtftTarget(4.0, "p90")))
    assert found.n_prefill % 2 == 0 and 0 < found.lambda_max < best_operation(problem).lambda_max


def test_of_several_clusters_with_a_target() -> None:
    two = two_clusters()
    free = best_operation(two)
    found = best_within_target(replace(two, ttft_target=TtftTarget(2.0, "mean")))
    # Another division than the best without a target.
    assert found.keeps_target and found.point.roles != free.roles
    prefill = {roles.cluster: roles.prefill for roles in found.point.roles}
    assert prefill["home"] % 4 == 0 and prefill["other"] % 3 == 0
