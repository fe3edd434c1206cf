"""Tables, drawings and the page of a simulation, from made numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prfaas.core.deployment import PlannedDeployment, Slo, load_planned
from prfaas.lab.report.simulation import (
    SimulationReport,
    decision_rows,
    headline,
    print_simulation,
    stage_rows,
)
from prfaas.lab.report.simulation_figures import figures, simulation_page, thinned
from prfaas.lab.simulator.result import Result

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAPER = Path(__file__).parents[3] / "examples" / "paper.yaml"


VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is closed but not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@dataclass(frozen=True)
class Run:
    """A policy's result and its summary, both made up."""

    name: str
    result: Result
    summary: Mapping[str, Any]


def run(name: str, mean_s: float = 4.0, samples: int = 50, requests: int = 500) -> Run:
    rng = np.random.default_rng(len(name))
    time_s = np.linspace(10.0, 10.0 * samples, samples)
    series: dict[str, NDArray[np.float64]] = {
        "time_s": time_s,
        "queue_east": np.full(samples, 2.5),
        "queue_home": rng.random(samples),
        "decode_queue_home": np.zeros(samples),
        "prefill_utilisation_east": np.full(samples, 0.81),
        "decode_utilisation_home": np.full(samples, 0.72),
        "egress_bits_per_s_east->home": np.full(samples, 12.4e9),
        "capacity_bits_per_s_east->home": np.full(samples, 2e10),
        "threshold_tokens_home": np.full(samples, 19_371.0),
        "prefill_instances_home": np.full(samples, 3.0),
    }
    none = np.zeros(requests, dtype=np.int64)
    arrival_s = np.sort(rng.random(requests) * samples * 10)
    ttft_s = mean_s * rng.random(requests) * 2
    result = Result(
        arrival_s=arrival_s,
        ttft_s=ttft_s,
        e2e_s=ttft_s,
        tpot_s=ttft_s,
        input_tokens=none,
        output_tokens=none,
        uncached_tokens=none,
        hit_tokens=none,
        offloaded=none.astype(bool),
        reason=none,
        reasons=("long",),
        retries=none,
        link_bytes=none.astype(float),
        counted=np.ones(requests, dtype=bool),
        start_s=0.0,
        end_s=10.0 * samples,
        events=0,
        slo=Slo(None, None),
        series=series,
        changes={},
        tier_tokens={},
    )
    summary = {
        "ttft_mean_s": mean_s,
        "ttft_p50_s": 2.0,
        "ttft_p90_s": 2 * mean_s,
        "ttft_p99_s": 20.0,
        "throughput_rps": 2.933,
        "goodput_rps": 2.9,
        "egress_bits_per_s": 12.4e9,
        "offloaded_fraction": 0.496,
        "hit_ratio": None,
        "stable": name != "shaky",
        "threshold_changes": [{}, {}, {}],
        "conversions": [],
        "decisions": {"long": 300, "short": 199, "rare": 1},
    }
    return Run(name, result, summary)


def report_of(*runs: Run, deployment: PlannedDeployment | None = None) -> SimulationReport:
    return SimulationReport(
        deployment=deployment or load_planned(PAPER),
        results={each.name: each.result for each in runs},
        summaries={each.name: each.summary for each in runs},
        rate_rps=2.933,
        lambda_max_rps=3.2589,
        seed=0,
        requests=20_000,
        duration_s=None,
        arrivals={"process": "poisson"},
        arrivals_text="Poisson arrivals",
        notes=["A note."],
        command="prfaas simulate examples/paper.yaml",
    )


FIRST, SECOND = run("paper"), run("tilted", 3.0)
REPORT = report_of(FIRST, SECOND)


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    """The drawings of `REPORT` by their headings."""
    return {heading: svg for heading, svg, _ in figures(REPORT)}


def cells(rows: list[list[str]], label: str) -> list[str]:
    (found,) = (row[1:] for row in rows if row[0] == label)
    return found


def test_policies_are_compared_with_the_first() -> None:
    rows = headline(REPORT)
    assert cells(rows, "TTFT mean") == ["4 s", "3 s\n−25.0%"]
    assert cells(rows, "TTFT P90") == ["8 s", "6 s\n−25.0%"]
    assert cells(rows, "TTFT P50") == ["2 s", "2 s"]
    assert cells(rows, "egress") == ["12.4 Gbit/s"] * 2
    assert cells(rows, "changes of the threshold") == ["3"] * 2
    assert cells(rows, "stable") == ["yes"] * 2


def test_what_nobody_knows_is_left_out_and_what_one_does_not_know_is_a_dash() -> None:
    labels = [row[0] for row in headline(REPORT)]
    assert "prompt tokens from caches" not in labels
    assert "whole answer, mean" not in labels
    assert "changes of roles" not in labels
    unknown = replace(SECOND, summary={**SECOND.summary, "ttft_mean_s": None})
    assert cells(headline(report_of(FIRST, unknown)), "TTFT mean") == ["4 s", "–"]
    assert cells(headline(report_of(unknown, FIRST)), "TTFT mean") == ["–", "4 s"]


def test_instability_is_loud() -> None:
    assert cells(headline(report_of(run("shaky"))), "stable") == ["NO: queues grow"]


def test_a_run_that_is_too_short_to_say_is_not_called_stable() -> None:
    unknown = replace(SECOND, summary={**SECOND.summary, "stable": None})
    assert cells(headline(report_of(FIRST, unknown)), "stable") == ["yes", "too short to say"]
    assert cells(headline(report_of(unknown)), "stable") == ["too short to say"]


def test_decisions_come_by_frequency() -> None:
    rows = decision_rows(REPORT)
    assert [row[0] for row in rows] == ["long", "short", "rare"]
    assert cells(rows, "long") == ["60.0%\n300"] * 2
    other = replace(SECOND, summary={**SECOND.summary, "decisions": {"always": 500}})
    rows = decision_rows(report_of(FIRST, other))
    assert rows[0] == ["always", "–", "100.0%\n500"]


def test_stages() -> None:
    assert stage_rows(REPORT) == [
        ["east prefill", "81.0%\n2.50 waiting", "81.0%\n2.50 waiting"],
        ["home decode", "72.0%\n0.00 waiting", "72.0%\n0.00 waiting"],
        ["east->home link", "12.4%\n12.4 Gbit/s", "12.4%\n12.4 Gbit/s"],
    ]


def test_the_terminal_shows_all_of_it() -> None:
    out = StringIO()
    print_simulation(Console(file=out, width=120, highlight=False), REPORT)
    text = out.getvalue()
    assert text.startswith(REPORT.title)
    for words in ("3 s −25.0%", "60.0% 300", "81.0% 2.50 waiting"):
        assert words in " ".join(text.split())
    assert "arrivals: Poisson arrivals" in text
    assert "A note." in text


@pytest.mark.slow("draws with matplotlib")
def test_the_page_has_every_drawing_and_is_the_same_every_time(drawn: dict[str, str]) -> None:
    page = simulation_page(REPORT)
    assert page == simulation_page(REPORT)
    headings = list(drawn)
    assert headings == [
        "Time to first token",
        "Time to first token over time",
        "Queues",
        "Utilisation",
        "Egress",
        "Threshold and roles",
    ]
    assert page.count("<svg") == len(headings)
    for heading in (*headings, "Decisions"):
        assert f"<h2>{heading}</h2>" in page
    assert "prfaas simulate examples/paper.yaml" in page
    assert len(page) < 1_000_000


def test_a_page_is_whole_and_escaped() -> None:
    deployment = replace(load_planned(PAPER), name="<b>")
    first, second = replace(FIRST, name="<i>"), replace(SECOND, name="x < y")
    page = replace(
        report_of(first, second, deployment=deployment),
        notes=["<script>alert(1)</script>"],
        command="prfaas simulate 'a b.yaml'",
        changes_text=['a "quote"'],
    )
    text = simulation_page(page)
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert "<script" not in text and "<i>" not in text and "<b>" not in text
    assert "<td>3 s <small>−25.0%</small></td>" in text
    for name, value in parser.attributes:
        assert name != "src"
        assert name not in ("href", "xlink:href") or value.startswith("#")
    assert "prefers-color-scheme: dark" in text
    assert "@import" not in text and "url(http" not in text


def test_a_queue_that_is_always_empty_has_no_panel(drawn: dict[str, str]) -> None:
    assert "east: waiting for prefill" in drawn["Queues"]
    assert "waiting for decode" not in drawn["Queues"]


def test_links_and_series_that_are_not_there_are_left_out() -> None:
    alone = run("local_only")
    result = replace(alone.result, series={"time_s": np.arange(1.0, 9)})
    bare = replace(alone, result=result, summary={**alone.summary, "decisions": {}})
    without_links = replace(load_planned(PAPER), links=())
    headings = [heading for heading, _, _ in figures(report_of(bare, deployment=without_links))]
    assert headings == ["Time to first token", "Time to first token over time"]


@pytest.mark.parametrize("requests", [0, 1, 3])
def test_hardly_any_requests(requests: int) -> None:
    limited = replace(load_planned(PAPER), slo=Slo(5.0, None))
    few = report_of(run("paper", requests=requests, samples=2), deployment=limited)
    assert simulation_page(few).count("<svg") == 6


def test_a_threshold_that_never_offloads() -> None:
    never = run("paper")
    series = {**never.result.series, "threshold_tokens_home": np.full(50, np.inf)}
    never = replace(never, result=replace(never.result, series=series))
    headings = [heading for heading, _, _ in figures(report_of(never))]
    assert "Threshold and roles" in headings


@given(st.integers(1, 3000))
def test_thinning_keeps_means_and_bounds_the_points(count: int) -> None:
    values = np.sin(np.arange(count) / 7.0)
    time_s, kept = thinned(np.arange(float(count)), values)
    assert len(time_s) == len(kept) <= 160
    step = -(-count // 160)
    assert kept.mean() == pytest.approx(values[: len(kept) * step].mean(), abs=1e-9)
    stepped_s, stepped = thinned(np.arange(float(count)), values, mean=False)
    assert len(stepped_s) <= 160
    assert stepped == pytest.approx(values[::step])
