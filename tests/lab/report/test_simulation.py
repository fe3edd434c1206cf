"""Tables, drawings and the page of a simulation, from made numbers."""

from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from prfaas.lab.report.simulation import (
    PolicyRun,
    SimulationReport,
    StageUse,
    decision_rows,
    headline,
    print_simulation,
    stage_rows,
)
from prfaas.lab.report.simulation_figures import figures, simulation_page, thinned

if TYPE_CHECKING:
    from numpy.typing import NDArray


def run(name: str, mean_s: float = 4.0, samples: int = 50, requests: int = 500) -> PolicyRun:
    rng = np.random.default_rng(len(name))
    time_s = np.linspace(10.0, 10.0 * samples, samples)
    series: dict[str, NDArray[np.float64]] = {
        "time_s": time_s,
        "queue_east": rng.random(samples) * 3,
        "queue_home": rng.random(samples),
        "decode_queue_home": np.zeros(samples),
        "prefill_utilisation_east": rng.random(samples),
        "decode_utilisation_home": rng.random(samples),
        "egress_bits_per_s_east->home": rng.random(samples) * 1e10,
        "capacity_bits_per_s_east->home": np.full(samples, 2e10),
        "threshold_tokens_home": np.full(samples, 19_371.0),
        "prefill_instances_home": np.full(samples, 3.0),
    }
    return PolicyRun(
        name=name,
        numbers={
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
        },
        decisions={"long": 300, "short": 199, "rare": 1},
        stages=[
            StageUse("east", "prefill", 0.81, 2.5),
            StageUse("home", "decode", 0.72, 0.0),
            StageUse("east->home", "link", 0.124, note="12.4 Gbit/s"),
        ],
        arrival_s=np.sort(rng.random(requests) * samples * 10),
        ttft_s=mean_s * rng.random(requests) * 2,
        series=series,
    )


REPORT = SimulationReport(
    title="paper at 90% of its highest throughput: 2.933 requests/s",
    lead="internal-1t; seed 0",
    facts=[("clusters", "east: 4 × 8 h200"), ("arrivals", "Poisson arrivals")],
    runs=[run("paper"), run("tilted", 3.0)],
    links={"east->home": 1e11},
    command="prfaas simulate examples/paper.yaml",
    notes=["A note."],
)


def cells(rows: list[list[str]], label: str) -> list[str]:
    (found,) = (row[1:] for row in rows if row[0] == label)
    return found


def test_policies_are_compared_with_the_first() -> None:
    rows = headline(REPORT)
    assert cells(rows, "TTFT mean") == ["4 s", "3 s\n−25.0%"]
    assert cells(rows, "TTFT P90") == ["8 s", "6 s\n−25.0%"]
    assert cells(rows, "TTFT P50") == ["2 s", "2 s"]
    assert cells(rows, "egress") == ["12.4 Gbit/s"] * 2
    assert cells(rows, "stable") == ["yes"] * 2


def test_what_nobody_knows_is_left_out_and_what_one_does_not_know_is_a_dash() -> None:
    labels = [row[0] for row in headline(REPORT)]
    assert "prompt tokens from caches" not in labels
    assert "whole answer, mean" not in labels
    unknown = replace(REPORT.runs[1], numbers={**REPORT.runs[1].numbers, "ttft_mean_s": None})
    assert cells(headline(replace(REPORT, runs=[REPORT.runs[0], unknown])), "TTFT mean") == ["4 s", "–"]
    assert cells(headline(replace(REPORT, runs=[unknown, REPORT.runs[0]])), "TTFT mean") == ["–", "4 s"]


def test_instability_is_loud() -> None:
    assert cells(headline(replace(REPORT, runs=[run("shaky")])), "stable") == ["NO: queues grow"]


def test_decisions_come_by_frequency() -> None:
    rows = decision_rows(REPORT)
    assert [row[0] for row in rows] == ["long", "short", "rare"]
    assert cells(rows, "long") == ["60.0%\n300"] * 2
    other = replace(REPORT.runs[1], decisions={"always": 500})
    rows = decision_rows(replace(REPORT, runs=[REPORT.runs[0], other]))
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


@pytest.mark.slow
def test_the_page_has_every_drawing_and_is_the_same_every_time() -> None:
    page = simulation_page(REPORT)
    assert page == simulation_page(REPORT)
    headings = [heading for heading, _, _ in figures(REPORT)]
    assert headings == [
        "Time to first token",
        "Time to first token over time",
        "Queues",
        "Utilisation",
        "Egress",
        "Threshold and roles",
        "Decisions",
    ]
    assert page.count("<svg") == len(headings)
    for heading in headings:
        assert f"<h2>{heading}</h2>" in page
    assert "prfaas simulate examples/paper.yaml" in page
    assert len(page) < 1_000_000


@pytest.mark.slow
def test_a_queue_that_is_always_empty_has_no_panel() -> None:
    drawn = {heading: svg for heading, svg, _ in figures(REPORT)}
    assert "east: waiting for prefill" in drawn["Queues"]
    assert "waiting for decode" not in drawn["Queues"]


def test_links_and_series_that_are_not_there_are_left_out() -> None:
    bare = replace(run("local_only"), series={"time_s": np.arange(1.0, 9)}, decisions={})
    headings = [heading for heading, _, _ in figures(replace(REPORT, runs=[bare], links={}))]
    assert headings == ["Time to first token", "Time to first token over time"]


@pytest.mark.parametrize("requests", [0, 1, 3])
def test_hardly_any_requests(requests: int) -> None:
    few = replace(REPORT, runs=[run("paper", requests=requests, samples=2)], ttft_slo_s=5.0)
    assert simulation_page(few).count("<svg") == 7


def test_a_threshold_that_never_offloads() -> None:
    never = run("paper")
    never = replace(never, series={**never.series, "threshold_tokens_home": np.full(50, np.inf)})
    headings = [heading for heading, _, _ in figures(replace(REPORT, runs=[never]))]
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
