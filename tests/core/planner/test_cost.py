"""What egress costs, where the advantage is gone, and the operation that costs the least per request."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.deployment import load_planned
from prfaas.core.planner import Plan, PlanError, PlanLink, PlanProblem, make_plan, problem_of

from .problems import paper_problem

EXAMPLES = Path(__file__).parents[3] / "examples"


def priced(problem: PlanProblem, per_gb: float) -> PlanProblem:
    return replace(problem, links=tuple(replace(link, egress_per_gb=per_gb) for link in problem.links))


def plan_at(per_gb: float) -> Plan:
    return make_plan(
        problem_of(load_planned(EXAMPLES / "paper.yaml", changes={"prices.egress_per_gb": per_gb}))
    )


def test_where_the_advantage_of_the_case_study_is_gone() -> None:
    """0.004 per GB, if an H20-hour costs 1. By hand from the plan's printed numbers:

    - The deployment costs 32 · 2 + 64 · 1 = 128 per hour and carries 3.1995 requests/s.
    - 144 H20 alone are 18 instances, 14 + 4, and carry 3.125 requests/s for 144 per hour: decode is full. For the same
      throughput per money the deployment may cost 144 · 3.1995 / 3.125 = 147.4 per hour.
    - That is less than a 19th instance costs, and with 17 (13 + 4: 2.923 requests/s) it would be 148.8, more than the
      18th: 18 is the number that the money buys.
    - The link carries 12.14 Gbit/s: 12.14 / 8 · 3600 = 5,463 GB per hour.
    - (147.4 − 128) / 5,463 = 0.0036.
    """
    plan = plan_at(0.0)
    assert plan.optimum.egress_bits_per_s == pytest.approx(12.14e9, rel=1e-3)
    assert plan.equal_cost_ratio == pytest.approx(1.19, abs=0.005)
    by_hand = (144 * 3.1995 / 3.125 - 128) / (12.14 / 8 * 3600)
    assert plan.egress_break_even_per_gb == pytest.approx(by_hand, rel=0.01)
    assert plan.egress_break_even_per_gb == pytest.approx(0.00356, rel=2e-3)


def test_at_the_break_even_price_the_same_money_does_the_same_without_prfaas() -> None:
    free = plan_at(0.0)
    assert free.egress_break_even_per_gb is not None
    plan = plan_at(free.egress_break_even_per_gb)
    assert plan.equal_cost_ratio == pytest.approx(1.0)
    assert plan.egress_break_even_per_gb == pytest.approx(free.egress_break_even_per_gb)
    assert plan.optimum == free.optimum
    assert "Worth it" in free.verdict and "Not worth it" in plan.verdict


def test_cost_counts_egress() -> None:
    """At 0.002 per GB: 12.14 / 8 · 3600 · 0.002 = 10.9 per hour on top of 128."""
    plan = plan_at(0.002)
    assert plan.cost is not None
    assert plan.cost.egress_per_hour == pytest.approx(10.93, rel=1e-3)
    assert plan.cost.per_hour == pytest.approx(128 + 10.93, rel=1e-3)
    requests_per_hour = plan.optimum.lambda_max * 3600
    assert plan.cost.per_million_requests == pytest.approx(plan.cost.per_hour / requests_per_hour * 1e6)
    output_tokens = problem_of(load_planned(EXAMPLES / "paper.yaml")).workload.output_tokens
    assert plan.cost.per_million_output_tokens == pytest.approx(
        plan.cost.per_million_requests / output_tokens
    )
    assert plan.homogeneous.cost_ratio == pytest.approx(plan.cost.per_hour / 96)
    # 17 instances of 8 H20 for 139 per hour.
    assert plan.homogeneous_equal_cost is not None and plan.homogeneous_equal_cost.instances == 17
    # Whoever sends everything pays more for egress than the optimum.
    assert plan.naive is not None and plan.naive.cost_ratio is not None and plan.naive.cost_ratio < 1
    # 17 instances cost 136 per hour and carry 2.923 requests/s: (3.1995 / 138.9) / (2.923 / 136).
    assert plan.equal_cost_ratio == pytest.approx(3.1995 / 138.93 / (2.923 / 136), rel=1e-3)
    assert "1.07 times at equal cost with egress at 10.9 per hour" in plan.verdict
    assert plan.verdict.endswith("The advantage is gone where egress costs 0.00356 per GB.")


def test_each_link_has_its_price() -> None:
    problem = problem_of(load_planned(EXAMPLES / "multi.yaml", changes={"links[0].egress_per_gb": 0.01}))
    plan = make_plan(problem)
    carried = {link.name: link.egress_bits_per_s for link in plan.optimum.links}
    assert plan.cost is not None
    assert plan.cost.egress_per_hour == pytest.approx(carried["east->tokyo"] / 8e9 * 3600 * 0.01)


def test_nothing_is_said_about_egress_where_nothing_is_known() -> None:
    without_prices = make_plan(replace(paper_problem(), prices={}))
    assert without_prices.egress_break_even_per_gb is None
    assert make_plan(paper_problem(prfaas=0)).egress_break_even_per_gb is None


def test_a_deployment_that_is_too_dear_has_no_advantage_to_lose() -> None:
    plan = make_plan(replace(paper_problem(), prices={"h200": 9.0, "h20": 1.0}))
    assert plan.egress_break_even_per_gb == 0.0


def test_a_price_below_zero_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a price of egress is 0 or more, not -1\.0 on east->home"):
        replace(paper_problem(), links=(PlanLink("east", "home", 1e11, -1.0),))


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=15)
@given(st.integers(1, 4), st.integers(2, 7), st.floats(0.5, 4.0), st.floats(0.0, 0.02))
def test_headline_and_column_follow_one_rule(prfaas: int, pd: int, h200_price: float, per_gb: float) -> None:
    """The ratio of the verdict is the column's throughput per money, whatever whole instances leave unspent."""
    problem = replace(paper_problem(prfaas=prfaas, pd=pd), prices={"h200": h200_price, "h20": 1.0})
    plan = make_plan(priced(problem, per_gb))
    column = plan.homogeneous_equal_cost
    assert column is not None and plan.cost is not None
    if plan.equal_cost_ratio is None:
        assert column.point.lambda_max == 0 or plan.ratio_to_homogeneous is None
        return
    assert column.cost is not None
    per_money = plan.optimum.lambda_max / plan.cost.per_hour
    assert plan.equal_cost_ratio == pytest.approx(
        per_money / (column.point.lambda_max / column.cost.per_hour)
    )
    assert column.cost.per_hour <= plan.cost.per_hour * (1 + 1e-9) or column.instances == 1
    assert f"{plan.equal_cost_ratio:.2f} times at equal cost" in plan.verdict


@pytest.mark.slow("a property over many random systems")
@settings(deadline=None, max_examples=15)
@given(st.integers(1, 5), st.integers(2, 9), st.floats(1.0, 3.0))
def test_no_lower_price_of_egress_has_no_advantage(prfaas: int, pd: int, h200_price: float) -> None:
    problem = replace(paper_problem(prfaas=prfaas, pd=pd), prices={"h200": h200_price, "h20": 1.0})
    even = make_plan(problem).egress_break_even_per_gb
    assert even is not None
    at_even = make_plan(priced(problem, even)).equal_cost_ratio
    assert at_even is not None and at_even <= 1 + 1e-9
    for part in (0.3, 0.9) if even > 0 else ():
        below = make_plan(priced(problem, part * even)).equal_cost_ratio
        assert below is not None and below > 1
