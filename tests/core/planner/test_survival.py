"""What is left of a deployment when something is gone, and what would keep all of it."""

from dataclasses import replace

import pytest

from prfaas.core.planner import PlanLink, PlanProblem, best_operation
from prfaas.core.planner.fixed_roles import rate_with_roles
from prfaas.core.planner.survival import Loss, LossKind, losses, reserve_for

from .problems import paper_problem


def lost(problem: PlanProblem) -> dict[tuple[LossKind, str], Loss]:
    return {(each.kind, each.name): each for each in losses(problem, best_operation(problem))}


def test_without_its_line_the_papers_case_is_its_pd_cluster() -> None:
    found = lost(paper_problem())
    alone = paper_problem(prfaas=0)
    for gone in (found["link", "east->home"], found["cluster", "east"]):
        assert gone.rate_after_roles == pytest.approx(best_operation(alone).lambda_max)
        assert gone.rate_at_once == pytest.approx(rate_with_roles(alone, {"home": 3}))
        assert gone.rate_at_once < 0.6 * gone.rate_after_roles
    assert found["cluster", "home"].rate_after_roles == 0 == found["cluster", "home"].rate_at_once


def test_an_instance_is_one_less_in_the_role_that_costs_more() -> None:
    found = lost(paper_problem())
    fewer = best_operation(paper_problem(prfaas=3)).lambda_max
    assert found["instance", "east"].rate_after_roles == pytest.approx(fewer)
    gone = found["instance", "home"]
    without = [rate_with_roles(paper_problem(pd=7), {"home": n}) for n in (2, 3)]
    assert gone.rate_at_once == pytest.approx(min(without))
    assert gone.rate_after_roles == pytest.approx(best_operation(paper_problem(pd=7)).lambda_max)


def test_the_only_instance_of_a_cluster_is_the_cluster() -> None:
    found = lost(paper_problem(prfaas=1))
    assert found["instance", "east"].rate_after_roles == found["cluster", "east"].rate_after_roles > 0


def test_a_group_is_gone_together() -> None:
    problem = paper_problem(pd=8)
    grouped = replace(problem, pd=(replace(problem.pd[0], group_ranks=4),))
    gone = lost(grouped)["instance", "home"]
    fewer = replace(problem, pd=(replace(problem.pd[0], instances=4, group_ranks=4),))
    assert gone.rate_after_roles == pytest.approx(best_operation(fewer).lambda_max)


def test_the_reserve_keeps_all_and_one_less_does_not() -> None:
    problem = paper_problem()
    wanted = best_operation(problem).lambda_max
    reserve = reserve_for(problem, wanted, (lost(problem)["link", "east->home"],))
    assert reserve.cluster == "home"

    def kept(more: int) -> float:
        return best_operation(paper_problem(prfaas=0, pd=8 + more)).lambda_max

    assert kept(reserve.instances) >= wanted > kept(reserve.instances - 1)
    assert reserve.cost_ratio == pytest.approx((128 + 8 * reserve.instances) / 128)
    assert "1.35 of 3.2 requests/s are left" in str(reserve)


def test_nothing_is_needed_where_nothing_is_lost_and_nothing_helps_without_a_decode_cluster() -> None:
    problem = paper_problem()
    found = lost(problem)
    little = reserve_for(problem, 1.0, (found["link", "east->home"],))
    assert little.instances == 0 and "nothing more is needed" in str(little)
    none = reserve_for(problem, 1.0, (found["cluster", "home"],))
    assert none.cluster is None and "don't keep all" in str(none)


def test_a_second_line_keeps_what_the_first_one_lost() -> None:
    problem = paper_problem()
    east, line = problem.prfaas[0], problem.links[0]
    west = replace(east, name="west")
    two = replace(
        problem, prfaas=(east, west), links=(line, PlanLink("west", "home", line.bandwidth_bits_per_s))
    )
    gone = lost(two)["link", "west->home"]
    assert gone.rate_after_roles == pytest.approx(best_operation(problem).lambda_max, rel=1e-2)
