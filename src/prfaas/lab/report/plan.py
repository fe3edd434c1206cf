"""A plan for people: the verdict, then what it rests on, in compact tables.

A plan as `report` shows it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import Baseline, OperatingPoint, Plan
from prfaas.core.units import format_bits_per_s, format_s

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


def plan_report(deployment: PlannedDeployment, plan: Plan) -> PlanReport:
    """What `prfaas plan` prints."""
    return PlanReport(
        title=f"{deployment.name}: {deployment.kv_model.name}",
        verdict=plan.verdict,
        setups=_setups_of(deployment, plan),
        stages=_stages_of(deployment, plan.optimum),
        prices=[
            PriceRow(_resource(price.resource, price.unit), price.gain_req_per_s, price.gain_ratio)
            for price in plan.shadow_prices
        ],
        links=[
            LinkRow(link.name, link.egress_bits_per_s, link.bandwidth_bits_per_s, link.needed_bits_per_s)
            for link in plan.optimum.links
        ],
        load=plan.ttft_estimate.load,
        routes=_routes_of(plan.optimum),
        notes=_notes(plan),
    )


def _setups_of(deployment: PlannedDeployment, plan: Plan) -> list[SetupColumn]:
    point, estimate = plan.optimum, plan.ttft_estimate
    columns = [
        SetupColumn(
            title="optimum",
            lambda_max=point.lambda_max,
            ratio=plan.ratio_to_homogeneous,
            threshold_tokens=point.threshold_tokens,
            instances=_instances(point),
            gpus=_gpus(deployment),
            cost_ratio=None if plan.cost is None else 1.0,
            offloaded_fraction=point.offloaded_fraction,
            ttft_mean_s=point.ttft_mean_s,
            ttft_p90_s=point.ttft_p90_s,
            ttft_queued_mean_s=estimate.mean_s,
            ttft_queued_p90_s=estimate.p90_s,
            cost_per_million_tokens=None if plan.cost is None else plan.cost.per_million_tokens,
        )
    ]
    base = plan.homogeneous.point.lambda_max
    titles = {
        "homogeneous": plan.homogeneous,
        "at equal cost": plan.homogeneous_equal_cost,
        "naive": plan.naive,
    }
    for title, baseline in titles.items():
        if baseline is not None:
            gpus = _gpus(deployment) if baseline is plan.naive else f"{baseline.gpus} {baseline.hardware}"
            columns.append(_baseline(title, baseline, base, gpus))
    return columns


def _baseline(title: str, baseline: Baseline, base: float, gpus: str) -> SetupColumn:
    point = baseline.point
    return SetupColumn(
        title=title,
        lambda_max=point.lambda_max,
        ratio=point.lambda_max / base if base > 0 else None,
        instances=_instances(point),
        gpus=gpus,
        cost_ratio=None if baseline.cost_ratio is None else 1 / baseline.cost_ratio,
        ttft_mean_s=point.ttft_mean_s,
        ttft_p90_s=point.ttft_p90_s,
    )


def _instances(point: OperatingPoint) -> str:
    home = f"{point.n_prefill} + {point.n_decode}"
    return f"{point.n_prfaas} + {home}" if point.n_prfaas else home


def _gpus(deployment: PlannedDeployment) -> str:
    by_hardware: dict[str, int] = {}
    for cluster in deployment.clusters:
        by_hardware[cluster.hardware] = by_hardware.get(cluster.hardware, 0) + cluster.gpus
    return " + ".join(f"{count} {hardware}" for hardware, count in by_hardware.items())


def _stages_of(deployment: PlannedDeployment, point: OperatingPoint) -> list[StageRow]:
    counts = {f"{cluster.name} prefill": cluster.instance_count for cluster in deployment.prfaas_clusters}
    for roles in point.roles:
        counts[f"{roles.cluster} prefill"] = roles.prefill
        counts[f"{roles.cluster} decode"] = roles.decode
    return [
        StageRow(stage.name, str(counts.get(stage.name, "")), stage.capacity, stage.name in point.binding)
        for stage in point.stages
    ]


def _routes_of(point: OperatingPoint) -> list[RouteRow]:
    return [
        RouteRow(
            route.prefill, route.decode, route.fraction, route.from_tokens, route.to_tokens, route.mean_tokens
        )
        for route in point.routes
        if route.fraction > 5e-4
    ]


def _resource(name: str, unit: str) -> str:
    return f"{unit} on {name}" if unit == "Gbit/s" else f"{unit} in {name}"


def _notes(plan: Plan) -> list[str]:
    notes = [
        "Throughput takes each stage's time at the mean length, as the paper does; by the lengths one by one it "
        f"is {plan.lambda_max_by_length:.4g} req/s. TTFT is the time of prefill without waiting.",
        "Instances are PrfaaS + PD prefill + PD decode, in a column without PrfaaS the latter two.",
    ]
    if plan.bound_gap > 1e-4:
        notes.append(f"The search stopped early: the true optimum may be up to {plan.bound_gap:.1%} higher.")
    return notes
