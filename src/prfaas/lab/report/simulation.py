"""A simulation for people: policies beside each other, then what they decided and how busy everything was."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.core.units import format_bits_per_s, format_s

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table

    FloatArray = NDArray[np.float64]

NONE = "–"


@dataclass(frozen=True, slots=True)
class StageUse:
    """One stage over a run: the part of its time (or decode slots, or bandwidth) that was in use, and how many waited
    for it on average. `what` is "prefill", "decode" or "link". None: nothing is known.
    """

    name: str
    what: str
    utilisation: float | None
    waiting: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRun:
    """One policy's run.

    `numbers`: the simulator's summary by field name (`ttft_mean_s`, …); None where there is none. `arrival_s` and
    `ttft_s`: one entry per counted request, in the order of arrival. `series`: equally spaced values over `time_s` by
    name: `queue_<cluster>`, `prefill_utilisation_<cluster>`, `egress_bits_per_s_<link>` and so on.
    """

    name: str
    numbers: Mapping[str, float | bool | None]
    decisions: Mapping[str, int]
    stages: Sequence[StageUse]
    arrival_s: "FloatArray"
    ttft_s: "FloatArray"
    series: Mapping[str, "FloatArray"]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """All that is shown of a simulation. The first run is what the others are compared with.

    `facts`: what was simulated, in words. `notes`: what to know before believing it. `links`: capacity in bits per
    second by name. `ttft_slo_s`: the deployment's limit, if it has one.
    """

    title: str
    lead: str
    facts: Sequence[tuple[str, str]]
    runs: Sequence[PolicyRun]
    links: Mapping[str, float]
    command: str = ""
    notes: Sequence[str] = ()
    ttft_slo_s: float | None = None


def headline(report: SimulationReport) -> list[list[str]]:
    """The main table: a row per number, a cell per policy; behind a line break what is said of it in small print.

    Rows that no policy has anything to say about are left out.
    """
    first = report.runs[0]
    rows = []
    for label, key, shown, compared in _ROWS:
        cells = [label]
        for run in report.runs:
            value = run.numbers.get(key)
            text = NONE if value is None else shown(value)
            if compared and run is not first:
                text += _difference(first.numbers.get(key), value)
            cells.append(text)
        values = [run.numbers.get(key) for run in report.runs]
        if any(values if key in _ONLY_IF_ANY else (value is not None for value in values)):
            rows.append(cells)
    return rows


def decision_rows(report: SimulationReport) -> list[list[str]]:
    """Shares of all decisions by their reason, the most frequent first."""
    totals: dict[str, int] = {}
    for run in report.runs:
        for reason, count in run.decisions.items():
            totals[reason] = totals.get(reason, 0) + count
    rows = []
    for reason in sorted(totals, key=lambda each: (-totals[each], each)):
        cells = [reason]
        for run in report.runs:
            count = run.decisions.get(reason, 0)
            cells.append(f"{count / sum(run.decisions.values()):.1%}\n{count:,}" if count else NONE)
        rows.append(cells)
    return rows


def stage_rows(report: SimulationReport) -> list[list[str]]:
    """Every stage with its utilisation and, small, what waited."""
    names = dict.fromkeys((use.name, use.what) for run in report.runs for use in run.stages)
    rows = []
    for name, what in names:
        cells = [f"{name} {what}"]
        for run in report.runs:
            use = next((each for each in run.stages if (each.name, each.what) == (name, what)), None)
            cells.append(NONE if use is None else _use(use))
        rows.append(cells)
    return rows


def print_simulation(console: "Console", report: SimulationReport) -> None:
    """Write a simulation to a rich console."""
    from rich.text import Text

    console.print(Text(report.title, style="bold"))
    for name, text in report.facts:
        console.print(Text(f"{name}: {text}"))
    console.print()
    names = [run.name for run in report.runs]
    console.print(_table("", names, headline(report), bold=("TTFT mean", "TTFT P90")))
    console.print()
    console.print(_table("decisions by reason", names, decision_rows(report)))
    console.print()
    console.print(_table("busy, and waiting on average", names, stage_rows(report)))
    for note in report.notes:
        console.print()
        console.print(Text(note, style="dim"))


def _table(
    title: str, names: Sequence[str], rows: Sequence[Sequence[str]], bold: Sequence[str] = ()
) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(title, no_wrap=True)
    # Small print has a column of its own, so that the numbers stand below each other.
    has_small = [any("\n" in row[number] for row in rows) for number in range(1, len(names) + 1)]
    for name, small in zip(names, has_small, strict=True):
        table.add_column(name, justify="right", no_wrap=True)
        if small:
            table.add_column("", no_wrap=True, style="dim")
    for label, *cells in rows:
        shown = [label]
        for cell, small in zip(cells, has_small, strict=True):
            number, _, text = cell.partition("\n")
            shown += [number, text] if small else [number]
        table.add_row(*shown, style="bold" if label in bold else None)
    return table


def _difference(first: float | bool | None, value: float | bool | None) -> str:
    if first is None or value is None or not first:
        return ""
    return f"\n{value / first - 1:+.1%}".replace("-", "−")


def _use(use: StageUse) -> str:
    busy = NONE if use.utilisation is None else f"{use.utilisation:.1%}"
    small = use.note if use.waiting is None else f"{_few(use.waiting)} waiting"
    return f"{busy}\n{small}" if small else busy


def _few(count: float) -> str:
    return f"{count:.2f}" if count < 10 else f"{count:,.0f}"


def _seconds(value: float) -> str:
    return format_s(value) if math.isfinite(value) else NONE


def _rate(value: float) -> str:
    return f"{value:.4g} req/s"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _stable(value: float) -> str:
    return "yes" if value else "NO: queues grow"


_ROWS: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
    ("TTFT mean", "ttft_mean_s", _seconds, True),
    ("TTFT P50", "ttft_p50_s", _seconds, False),
    ("TTFT P90", "ttft_p90_s", _seconds, True),
    ("TTFT P99", "ttft_p99_s", _seconds, True),
    ("time per further token, mean", "tpot_mean_s", _seconds, False),
    ("time per further token, P90", "tpot_p90_s", _seconds, False),
    ("whole answer, mean", "e2e_mean_s", _seconds, False),
    ("whole answer, P90", "e2e_p90_s", _seconds, False),
    ("throughput", "throughput_rps", _rate, False),
    ("goodput under the SLO", "goodput_rps", _rate, False),
    ("egress", "egress_bits_per_s", format_bits_per_s, False),
    ("offloaded", "offloaded_fraction", _share, False),
    ("prompt tokens from caches", "hit_ratio", _share, False),
    ("changes of the threshold", "threshold_changes", _count, False),
    ("changes of roles", "conversions", _count, False),
    ("prefilled again after a failure", "retries", _count, False),
    ("stable", "stable", _stable, False),
)
# Zero is what everybody expects of these.
_ONLY_IF_ANY = {"conversions", "retries", "hit_ratio"}
