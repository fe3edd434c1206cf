"""A plan for people: the verdict, then what it rests on, in compact tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.units import format_bits_per_s, format_s

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NONE = "–"


@dataclass(frozen=True, slots=True)
class SetupColumn:
    """One way to use the hardware. None where a row says nothing about it. Rates in requests per second."""

    title: str
    lambda_max: float
    ratio: float | None = None
    threshold_tokens: float | None = None
    instances: str | None = None
    gpus: str | None = None
    cost_ratio: float | None = None
    offloaded_fraction: float | None = None
    ttft_mean_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_queued_mean_s: float | None = None
    ttft_queued_p90_s: float | None = None
    cost_per_million_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of the optimum: the requests per second of all requests at which it would be full.

    No limit: it has nothing to do.
    """

    name: str
    instances: str
    limit: float | None
    is_binding: bool


@dataclass(frozen=True, slots=True)
class PriceRow:
    """What one more unit of a resource adds to the highest throughput: requests per second, and in proportion."""

    resource: str
    gain: float
    gain_ratio: float


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One link at the optimum."""

    name: str
    egress_bits_per_s: float
    bandwidth_bits_per_s: float
    needed_bits_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class RouteRow:
    """Requests that one cluster prefills for another: their share of all, and their uncached tokens."""

    prefill: str
    decode: str
    fraction: float
    from_tokens: float
    to_tokens: float
    mean_tokens: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All that is shown of a plan. `load` is the share of each setup's throughput that queueing is estimated at."""

    title: str
    verdict: str
    setups: Sequence[SetupColumn]
    stages: Sequence[StageRow]
    prices: Sequence[PriceRow]
    links: Sequence[LinkRow]
    load: float
    routes: Sequence[RouteRow] = ()
    notes: Sequence[str] = ()


def print_plan(console: "Console", report: PlanReport) -> None:
    """Write a plan to a rich console."""
    from rich.text import Text

    console.print(Text(report.verdict, style="bold"))
    console.print()
    console.print(_setups(report))
    console.print()
    console.print(_stages(report))
    for rows, table in ((report.routes, _routes), (report.links, _links), (report.prices, _prices)):
        if rows:
            console.print()
            console.print(table(report))
    for note in report.notes:
        console.print()
        console.print(Text(note, style="dim"))


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    return table


def _setups(report: PlanReport) -> "Table":
    rows: list[tuple[str, Callable[[SetupColumn], str | None]]] = [
        ("throughput (req/s)", lambda s: f"{s.lambda_max:.4g}"),
        ("against homogeneous", lambda s: None if s.ratio is None else f"{s.ratio:.2f} ×"),
        ("GPUs", lambda s: s.gpus),
        ("cost against optimum", lambda s: None if s.cost_ratio is None else f"{s.cost_ratio:.2f} ×"),
        ("threshold (tokens)", lambda s: _tokens(s.threshold_tokens)),
        ("instances", lambda s: s.instances),
        ("offloaded", lambda s: None if s.offloaded_fraction is None else f"{s.offloaded_fraction:.1%}"),
        ("TTFT mean / P90", lambda s: _pair(s.ttft_mean_s, s.ttft_p90_s)),
        (
            f"  with queues at {report.load:.0%} (estimate)",
            lambda s: _pair(s.ttft_queued_mean_s, s.ttft_queued_p90_s),
        ),
        ("cost per million tokens", lambda s: _number(s.cost_per_million_tokens)),
    ]
    table = _table(report.title, *(setup.title for setup in report.setups))
    for name, cell in rows:
        cells = [cell(setup) for setup in report.setups]
        if any(text is not None for text in cells):
            table.add_row(name, *(text or NONE for text in cells))
    return table


def _stages(report: PlanReport) -> "Table":
    lowest = min((stage.limit for stage in report.stages if stage.limit is not None), default=0.0)
    table = _table("stage", "instances", "full at (req/s)", "room")
    for stage in report.stages:
        if stage.limit is None:
            table.add_row(stage.name, stage.instances, "unused", NONE)
            continue
        room = f"{stage.limit / lowest - 1:+.1%}" if lowest > 0 else NONE
        table.add_row(
            stage.name,
            stage.instances,
            f"{stage.limit:.4g}",
            "binds" if stage.is_binding else room,
            style="bold" if stage.is_binding else None,
        )
    return table


def _routes(report: PlanReport) -> "Table":
    table = _table("prefill in, decode in", "requests", "uncached tokens", "on average")
    for route in report.routes:
        table.add_row(
            f"{route.prefill}, {route.decode}",
            f"{route.fraction:.1%}",
            f"{route.from_tokens:,.0f} to {route.to_tokens:,.0f}",
            f"{route.mean_tokens:,.0f}",
        )
    return table


def _links(report: PlanReport) -> "Table":
    table = _table("link", "egress", "bandwidth", "used", "if no link were a limit")
    for link in report.links:
        needed = link.needed_bits_per_s
        table.add_row(
            link.name,
            format_bits_per_s(link.egress_bits_per_s),
            format_bits_per_s(link.bandwidth_bits_per_s),
            f"{link.egress_bits_per_s / link.bandwidth_bits_per_s:.1%}",
            NONE if needed is None else format_bits_per_s(needed),
        )
    return table


def _prices(report: PlanReport) -> "Table":
    table = _table("one more", "adds (req/s)", "")
    for price in report.prices:
        if abs(price.gain_ratio) < 5e-6:
            table.add_row(price.resource, "nothing", "")
        else:
            table.add_row(price.resource, f"{price.gain:+.3g}", f"{price.gain_ratio:+.2%}")
    return table


def _tokens(tokens: float | None) -> str | None:
    return None if tokens is None else f"{tokens:,.0f}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _pair(one: float | None, other: float | None) -> str | None:
    if one is None or other is None:
        return None
    return f"{format_s(one)} / {format_s(other)}"
