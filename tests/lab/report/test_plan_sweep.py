"""Sweeps: what a field is called, and the price at which both sides do the same."""

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from tests.lab.report.test_plan_tables import PAPER, PLAN

from prfaas.core.deployment import PlannedDeployment, load_planned
from prfaas.core.planner import Plan
from prfaas.lab.report.plan_sweep import PlanSweep, field_words, is_planned_field, is_price_field


@pytest.fixture(scope="module")
def deployment() -> PlannedDeployment:
    return load_planned(PAPER)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    saved: list[Figure] = []
    original = Figure.savefig

    def savefig(self: Figure, *args: object, **kwargs: object) -> None:
        saved.append(self)
        original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", savefig)
    yield saved


def sweep(values: list[float], plans: list[Plan], words: str = "", field: str = "prices.h200") -> PlanSweep:
    return PlanSweep(field=field, words=words, values=values, plans=plans)


def plans(*ratios: float | None) -> list[Plan]:
    return [replace(PLAN, equal_cost_ratio=ratio) for ratio in ratios]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("links[0].bandwidth", "bandwidth of link east->home"),
        ("links[east->home].rtt_s", "round trip of link east->home (s)"),
        ("clusters[1].instance_count", "instances of home"),
        ("clusters[east].prefix_hit_ratio", "cached part of prompts in east"),
        ("prices.h200", "price of a GPU-hour of h200"),
        ("prices.egress_per_gb", "price of a GB over any link"),
        ("slo.ttft_s", "target for the TTFT (s)"),
    ],
)
def test_fields_in_words(deployment: PlannedDeployment, field: str, words: str) -> None:
    assert field_words(deployment, field) == words
    assert is_planned_field(field)
    assert is_price_field(field) is field.startswith("prices")


@pytest.mark.parametrize(
    "field", ["routing.threshold_tokens", "links[0].connections", "gateway.port", "load"]
)
def test_a_plan_does_not_depend_on_everything(field: str) -> None:
    assert not is_planned_field(field)


def test_the_break_even_is_where_the_ratio_passes_one() -> None:
    assert sweep([0.0, 1.0, 2.0, 3.0], plans(1.4, 1.2, 0.8, 0.7)).break_even() == pytest.approx(1.5)
    assert sweep([1.0, 2.0], plans(0.9, 1.1)).break_even() == pytest.approx(1.5)
    assert sweep([1.0, 2.0], plans(1.1, 1.05)).break_even() is None
    assert sweep([1.0, 2.0, 3.0], plans(None, 1.5, 0.5)).break_even() == pytest.approx(2.5)


def test_the_sentence_says_on_which_side_all_values_are() -> None:
    values = [1.0, 2.0]
    assert (
        sweep(values, plans(1.4, 0.6), "price of x").break_even_sentence()
        == "Break-even: a price of x of 1.5."
    )
    assert (
        "everywhere this deployment does more for its money"
        in sweep(values, plans(1.2, 1.1)).break_even_sentence()
    )
    assert "does less for its money" in sweep(values, plans(0.9, 0.8)).break_even_sentence()
    assert "target for the TTFT is never kept" in sweep(values, plans(None, None)).break_even_sentence()
    unpriced = [replace(plan, cost=None) for plan in plans(None, None)]
    assert "without prices" in sweep(values, unpriced).break_even_sentence()


def test_the_table() -> None:
    out = StringIO()
    console = Console(file=out, width=120, highlight=False)
    sweep([1.0, 3.0], plans(1.5, 0.9), "price of a GPU-hour of h200").print(console)
    lines = out.getvalue().splitlines()
    assert lines[0].split()[:2] == ["prices.h200", "req/s"]
    assert lines[2].split() == ["1", "3.259", "1.50", "×", "0.38", "–", "–", "0"]
    assert any(line.startswith("Break-even: a price of a GPU-hour of h200 of 2.67.") for line in lines)


def test_a_missed_target_is_said_and_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    kept, missed = plans(1.5, 0.9)
    out = StringIO()
    field = "links[east->home].egress_per_gb"
    found = [kept, replace(missed, keeps_target=False)]
    swept = sweep([1.0, 3.0], found, "price of a GB", field)
    swept.print(Console(file=out, width=160))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(field)
    assert "3.259, missed" not in lines[2] and "3.259, missed" in lines[3]
    assert any(line.startswith("Missed: the target for the TTFT") for line in lines)
    swept.plot(tmp_path / "p.svg", "t")
    lines_by_label = {line.get_label(): line for line in figures[0].axes[0].lines}
    crosses = lines_by_label["misses the target for the TTFT"]
    assert list(crosses.get_xdata()) == [3.0]


def test_the_plot_names_what_it_draws(tmp_path: Path, figures: list[Figure]) -> None:
    drawn = sweep([1.0, 3.0], plans(1.5, 0.9), "price of a GPU-hour of h200")
    drawn.plot(tmp_path / "p.svg", "paper: over the price")
    (figure,) = figures
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    # Only the deployment's own cost is known here.
    assert labels == ["this deployment, best plan", "throughput per money against PD only", "break-even"]
    assert figure.axes[-1].get_xlabel() == "price of a GPU-hour of h200"
    assert figure.axes[0].get_ylabel() == "cost of a million tokens"
    assert "2.67" in [text.get_text() for text in figure.axes[-1].texts]
