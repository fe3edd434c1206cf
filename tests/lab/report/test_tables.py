"""Tables of a plan and of a sweep, as they look in a terminal."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from prfaas.lab.report.figures import SweepPoint, print_sweep
from prfaas.lab.report.plan import (
    LinkRow,
    PlanReport,
    PriceRow,
    RouteRow,
    SetupColumn,
    StageRow,
    print_plan,
)

REPORT = PlanReport(
    title="paper: m",
    verdict="Balanced: fine.",
    setups=[
        SetupColumn(
            "optimum",
            3.2589,
            1.5445,
            19_370.9,
            "4 + 3 + 5",
            "96 GPUs",
            1.0,
            0.496,
            2.18,
            3.43,
            2.8,
            4.9,
            0.38,
        ),
        SetupColumn("homogeneous", 2.11, 1.0, ttft_mean_s=4.45, ttft_p90_s=9.73),
    ],
    stages=[
        StageRow("east prefill", "4", 3.2589, True),
        StageRow("home decode", "5", 3.9063, False),
        StageRow("spare link", "", None, False),
    ],
    prices=[PriceRow("instance in east", 0.641, 0.1967), PriceRow("Gbit/s on a->b", 1e-9, 1e-9)],
    links=[LinkRow("a->b", 12.4e9, 100e9, 13e9)],
    load=0.7,
    routes=[RouteRow("east", "home", 0.496, 19_371, 131_072, 45_014)],
    notes=["A note."],
)


def printed(report: PlanReport) -> list[str]:
    out = StringIO()
    print_plan(Console(file=out, width=120, highlight=False), report)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def row(lines: list[str], start: str) -> list[str]:
    (found,) = (line for line in lines if line.startswith(start))
    return found.removeprefix(start).split()


def test_the_verdict_comes_first() -> None:
    assert printed(REPORT)[0] == "Balanced: fine."


def test_a_plan() -> None:
    lines = printed(REPORT)
    assert row(lines, "throughput (req/s)") == ["3.259", "2.11"]
    assert row(lines, "threshold (tokens)") == ["19,371", "–"]
    assert row(lines, "against homogeneous") == ["1.54", "×", "1.00", "×"]
    assert row(lines, "TTFT mean / P90") == ["2.18", "s", "/", "3.43", "s", "4.45", "s", "/", "9.73", "s"]
    assert row(lines, "  with queues at 70% (estimate)") == ["2.8", "s", "/", "4.9", "s", "–"]
    assert row(lines, "east prefill") == ["4", "3.259", "binds"]
    assert row(lines, "home decode") == ["5", "3.906", "+19.9%"]
    assert row(lines, "spare link") == ["unused", "–"]
    assert row(lines, "a->b ") == ["12.4", "Gbit/s", "100", "Gbit/s", "12.4%", "13", "Gbit/s"]
    assert row(lines, "instance in east") == ["+0.641", "+19.67%"]
    assert row(lines, "Gbit/s on a->b") == ["nothing"]
    assert row(lines, "east, home") == ["49.6%", "19,371", "to", "131,072", "45,014"]
    assert lines[-1] == "A note."


def test_rows_about_nothing_are_left_out() -> None:
    bare = replace(REPORT, setups=[SetupColumn("optimum", 1.0)], links=[], prices=[], routes=[], notes=[])
    text = "\n".join(printed(bare))
    assert "cost" not in text
    assert "threshold" not in text
    assert "egress" not in text


def test_a_plan_that_can_do_nothing() -> None:
    stuck = replace(
        REPORT, stages=[StageRow("home decode", "0", 0.0, True), StageRow("east prefill", "1", 2.0, False)]
    )
    assert row(printed(stuck), "east prefill") == ["1", "2", "–"]


def test_a_sweep() -> None:
    out = StringIO()
    points = [
        SweepPoint(1e9, 1.5, 2.0, 89_616.4, "6 + 2", 9.5e8, "home decode"),
        SweepPoint(1e10, 3.0, None, None, "4 + 4", 1e10, "link"),
    ]
    print_sweep(Console(file=out, width=120), "links[0].bandwidth", points, is_rate=True)
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
    assert lines[3].split() == ["10", "Gbit/s", "3", "–", "–", "4", "+", "4", "10", "Gbit/s", "link"]
