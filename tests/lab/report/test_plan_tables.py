"""Tables of a plan and of a sweep, as they look in a terminal."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.planner import (
    Baseline,
    Cost,
    LinkUse,
    OperatingPoint,
    Plan,
    Roles,
    RouteUse,
    ShadowPrice,
    Stage,
    TtftEstimate,
    TtftTarget,
    make_plan,
    problem_of,
)
from prfaas.lab.report.plan import print_plan
from prfaas.lab.report.plan_sweep import PlanSweep

PAPER = Path(__file__).parents[3] / "examples" / "paper.yaml"

OPTIMUM = OperatingPoint(
    threshold_tokens=19_370.9,
    n_prefill=3,
    n_decode=5,
    theta_prfaas=1.6,
    theta_pd_p=1.6,
    theta_pd_d=3.9,
    lambda_max=3.2589,
    offloaded_fraction=0.496,
    mean_long_tokens=45_014.0,
    mean_short_tokens=10_224.0,
    egress_bits_per_s=12.4e9,
    ttft_mean_s=2.18,
    ttft_p90_s=3.43,
    n_prfaas=4,
    cache_policy="own",
    roles=(Roles("home", 3, 5),),
    stages=(
        Stage("east prefill", "prfaas prefill", 3.2589, 1.0),
        Stage("home decode", "pd decode", 3.9063, 0.834),
        Stage("spare link", "link", None, 0.0),
    ),
    routes=(
        RouteUse("home", "home", 1e-4, 100.0, 0.0, 200.0),
        RouteUse("east", "home", 0.496, 45_014.0, 19_371.0, 131_072.0),
    ),
    links=(LinkUse("a->b", 100e9, 12.4e9, 0.124, 13e9),),
)
HOMOGENEOUS = replace(OPTIMUM, lambda_max=2.11, ttft_mean_s=4.45, ttft_p90_s=9.73, n_prfaas=0, roles=())
PLAN = Plan(
    name="paper",
    method="exact search",
    service_model="mean length",
    optimum=OPTIMUM,
    fleet=None,
    homogeneous=Baseline("as many GPUs", HOMOGENEOUS, 12, 96, "h20", None),
    homogeneous_equal_cost=None,
    naive=None,
    ratio_to_homogeneous=1.5445,
    ratio_to_naive=None,
    equal_cost_ratio=None,
    egress_break_even_per_gb=None,
    lambda_max_at_mean_length=3.3,
    homogeneous_at_mean_length=2.2,
    lambda_max_unlimited_links=3.2589,
    bound_gap=0.02,
    shadow_prices=(
        ShadowPrice("east", "instance", 0.641, 0.1967, "dual"),
        ShadowPrice("a->b", "Gbit/s", 1e-9, 1e-9, "dual"),
    ),
    cost=Cost(96.0, 0.38, 1.2, 8_200.0, 0.0),
    ttft_estimate=TtftEstimate("estimate", 0.7, 2.28, 2.8, 4.9, 0.7),
)


@pytest.fixture(scope="module")
def deployment() -> PlannedDeployment:
    return load_planned(PAPER)


def printed(deployment: PlannedDeployment, plan: Plan) -> list[str]:
    out = StringIO()
    print_plan(Console(file=out, width=120, highlight=False), deployment, plan)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def row(lines: list[str], start: str) -> list[str]:
    (found,) = (line for line in lines if line.startswith(start))
    return found.removeprefix(start).split()


def test_the_verdict_comes_first(deployment: PlannedDeployment) -> None:
    first, second, *_ = printed(deployment, PLAN)
    assert first.startswith(
        "Prefill-bound: 3.26 requests/s, limited by east prefill; link a->b is 12% full. Worth it"
    )
    assert f"{first} {second}" == PLAN.verdict


def test_a_plan(deployment: PlannedDeployment) -> None:
    lines = printed(deployment, PLAN)
    assert row(lines, "throughput (req/s)") == ["3.259", "2.11"]
    assert row(lines, "threshold (tokens)") == ["19,371", "–"]
    assert row(lines, "against homogeneous") == ["1.54", "×", "1.00", "×"]
    assert row(lines, "instances") == ["4", "+", "3", "+", "5", "3", "+", "5"]
    assert row(lines, "GPUs") == ["32", "h200", "+", "64", "h20", "96", "h20"]
    assert row(lines, "cost against optimum") == ["1.00", "×", "–"]
    assert row(lines, "TTFT mean / P90") == ["2.18", "s", "/", "3.43", "s", "4.45", "s", "/", "9.73", "s"]
    assert row(lines, "  queued, 70% of each") == ["2.8", "s", "/", "4.9", "s", "–"]
    assert row(lines, "  queued, 2.28 req/s") == ["2.8", "s", "/", "4.9", "s", "–"]
    assert row(lines, "east prefill") == ["4", "3.259", "binds"]
    assert row(lines, "home decode") == ["5", "3.906", "+19.9%"]
    assert row(lines, "spare link") == ["unused", "–"]
    assert row(lines, "a->b ") == ["12.4", "Gbit/s", "–", "100", "Gbit/s", "12.4%", "13", "Gbit/s", "0", "ms"]
    assert row(lines, "instance in east") == ["+0.641", "+19.67%"]
    assert row(lines, "Gbit/s on a->b") == ["nothing"]
    assert row(lines, "east, home") == ["49.6%", "19,371", "to", "131,072", "45,014"]
    assert not any(line.startswith("home, home") for line in lines)  # next to no requests go there
    assert lines[-1] == "The search stopped early: the true optimum may be up to 2.0% higher."


def test_what_egress_costs_has_rows(deployment: PlannedDeployment) -> None:
    cost = Cost(184.0, 0.55, 1.4, 15_676.0, 55.91)
    priced = replace(PLAN, cost=cost, egress_break_even_per_gb=0.0036258)
    lines = printed(deployment, priced)
    assert row(lines, "egress per hour") == ["55.91", "–"]
    assert row(lines, "egress break-even per GB") == ["0.00363", "–"]


def test_rows_about_nothing_are_left_out(deployment: PlannedDeployment) -> None:
    bare_point = replace(OPTIMUM, threshold_tokens=None, links=(), routes=())
    bare = replace(PLAN, optimum=bare_point, cost=None, shadow_prices=(), bound_gap=0.0)
    text = "\n".join(printed(deployment, bare))
    assert "cost" not in text
    assert "threshold" not in text
    assert "egress" not in text
    assert "one more" not in text


def test_a_plan_that_can_do_nothing(deployment: PlannedDeployment) -> None:
    stages = (
        Stage("home decode", "pd decode", 0.0, 1.0),
        Stage("east prefill", "prfaas prefill", 2.0, 0.0),
    )
    stuck = replace(PLAN, optimum=replace(OPTIMUM, stages=stages))
    assert row(printed(deployment, stuck), "east prefill") == ["4", "2", "–"]


def test_a_sweep_says_where_the_target_is_missed() -> None:
    out = StringIO()
    baseline = replace(PLAN.homogeneous, keeps_target=False)
    swept = [PLAN, replace(PLAN, keeps_target=False, homogeneous=baseline)]
    PlanSweep(field="slo.ttft_s", values=[1.0, 0.1], plans=swept).print(Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert lines[2].count(", missed") == 0 and lines[3].count(", missed") == 2
    assert any(line.startswith("Missed: the target for the TTFT") for line in lines)


def test_a_sweep() -> None:
    out = StringIO()
    decode = (Stage("home decode", "pd decode", 1.5, 1.0),)
    link = (Stage("link", "link", 3.0, 1.0),)
    slow = replace(OPTIMUM, lambda_max=1.5, threshold_tokens=89_616.4, n_prefill=6, n_decode=2)
    fast = replace(OPTIMUM, lambda_max=3.0, threshold_tokens=None, n_prefill=4, n_decode=4)
    points = [
        replace(slow, egress_bits_per_s=9.5e8, stages=decode),
        replace(fast, egress_bits_per_s=1e10, stages=link),
    ]
    baseline = replace(PLAN.homogeneous, point=replace(HOMOGENEOUS, lambda_max=2.0))
    plans = [replace(PLAN, optimum=point, homogeneous=baseline) for point in points]
    sweep = PlanSweep(field="links[0].bandwidth", values=[1e9, 1e10], plans=plans, is_rate=True)
    sweep.print(Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert lines[0].split()[0] == "links[0].bandwidth"
    assert lines[2].split() == [
        "1",
        "Gbit/s",
        "1.5",
        "2",
        "89,616",
        "6",
        "+",
        "2",
        "950",
        "Mbit/s",
        "home",
        "decode",
    ]
    assert lines[3].split() == ["10", "Gbit/s", "3", "2", "–", "4", "+", "4", "10", "Gbit/s", "link"]


def test_the_fleet_you_have_and_a_target_have_their_places(deployment: PlannedDeployment) -> None:
    late = TtftEstimate("estimate", 0.7, 1.0, None, None, 1.3)
    fleet = Baseline(
        "the PD clusters as they stand",
        replace(HOMOGENEOUS, lambda_max=1.4, n_prefill=6, n_decode=2),
        8,
        64,
        "h20",
        4 / 3,
        ttft_estimate=TtftEstimate("estimate", 0.7, 0.98, 5.5, 11.9, 0.7),
        ttft_same_traffic=late,
        rate_within_target=0.7,
        keeps_target=False,
        cost=Cost(64.0, 0.45, 1.4, 9_000.0, 0.0),
    )
    same_cost = replace(PLAN.homogeneous, cost_ratio=1.0)
    plan = replace(
        PLAN,
        fleet=fleet,
        homogeneous_equal_cost=same_cost,
        equal_cost_ratio=1.5445,
        ttft_target=TtftTarget(10.0),
        lambda_max_without_target=3.5,
        rate_within_target=2.9,
    )
    lines = printed(deployment, plan)
    _, title, head, *_ = [lines[place] for place in range(lines.index("") - 1, len(lines)) if lines[place]]
    assert "paper: internal-1t" in title and "fleet you have" in head
    assert row(lines, "  queued, 70% of each")[:10] == [
        "2.8",
        "s",
        "/",
        "4.9",
        "s",
        "5.5",
        "s",
        "/",
        "11.9",
        "s",
    ]
    assert row(lines, "  queued, 2.28 req/s")[5] == "overloaded"
    assert row(lines, "  req/s, P90 in 10 s")[:3] == ["2.9", "0.7,", "missed"]
    # What misses the target counts with the rate that keeps it: 0.7 / 0.7 = 1, at 3/4 of the cost.
    assert row(lines, "throughput per cost")[:4] == ["1.54", "×", "0.63", "×"]
    assert row(lines, "cost per million tokens") == ["0.38", "0.45", "–", "–"]


def test_the_table_marks_what_the_verdict_names(deployment: PlannedDeployment) -> None:
    """A link that the best plan would want wider binds, even where another stage is full first."""
    stages = (
        Stage("a->b link", "link", 3.30, 0.9875),
        Stage("home decode", "pd decode", 3.2589, 1.0),
    )
    links = (LinkUse("a->b", 10e9, 9.8e9, 0.98, 23e9),)
    narrow = replace(
        PLAN, optimum=replace(OPTIMUM, stages=stages, links=links), lambda_max_unlimited_links=4.7
    )
    assert narrow.binding == ("a->b link", "home decode")
    lines = printed(deployment, narrow)
    assert row(lines, "a->b link") == ["3.3", "binds"]
    assert row(lines, "home decode") == ["5", "3.259", "binds"]


def test_copies_and_ranks_that_differ_are_noted(deployment: PlannedDeployment) -> None:
    clusters = tuple(
        replace(cluster, tensor_parallel=ranks)
        for cluster, ranks in zip(deployment.clusters, (8, 4), strict=True)
    )
    text = " ".join(" ".join(printed(replace(deployment, clusters=clusters, kv_copies=2.0), PLAN)).split())
    assert "those of windows are all sent: 2 times the KVCache of one rank" in text
    assert "different tensor_parallel (east 8, home 4)" in text
    text = " ".join(" ".join(printed(deployment, PLAN)).split())
    assert "all sent" not in text and "different tensor_parallel" not in text


def test_first_tokens_from_the_prefill_have_a_row_and_a_note(deployment: PlannedDeployment) -> None:
    plan = replace(PLAN, rest_estimate=TtftEstimate("estimate", 0.7, 2.28, 3.3, 6.1, 0.7))
    lines = printed(deployment, plan)
    assert row(lines, "  rest can begin, queued")[:6] == ["3.3", "s", "/", "6.1", "s", "–"]
    assert "First tokens come from the prefill" in "".join(lines)
    assert "rest can begin" not in "".join(printed(deployment, PLAN))


def test_the_bytes_of_a_request_on_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What is carried over what is offloaded: the KVCache of a prompt of the mean offloaded length."""
    deployment = load_planned(PAPER)
    plan = make_plan(problem_of(deployment))
    print_plan(Console(width=200), deployment, plan)
    lines = capsys.readouterr().out.splitlines()
    line = next(each for each in lines if each.startswith("east->home  ") and "Gbit/s" in each)
    [route] = [each for each in plan.optimum.routes if each.prefill == "east"]
    sent = deployment.sent_over("east->home").kv_bytes(round(route.mean_tokens))
    shown = float(line.split("Gbit/s")[1].split("MiB")[0]) * 2**20
    assert shown == pytest.approx(sent, rel=0.01)
