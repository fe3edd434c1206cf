"""A plan for people: the verdict, then the tables that it rests on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import Baseline, OperatingPoint, Plan, TtftEstimate
from prfaas.core.planner.survival import Loss, SpareInstances
from prfaas.core.units import BITS_PER_BYTE, format_bits_per_s, format_bytes, format_s

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NONE = "–"
_TIMES = "{:.2f} ×"
# Routes of a smaller part of all requests, and gains below so small a part, are not worth a row.
_LEAST_FRACTION, _LEAST_GAIN = 5e-4, 5e-6
# The search may stop this far below the true optimum without a word about it.
_LEAST_GAP = 1e-4
_MORE_THAN_ONE = 1.001


def print_plan(console: "Console", deployment: PlannedDeployment, plan: Plan) -> None:
    """Write a plan to a rich console.

    Args:
        console: Where to.
        deployment: What was planned; its GPUs and instances are shown.
        plan: The planner's answer for it.
    """
    from rich.text import Text

    point = plan.optimum
    console.print(Text(plan.verdict, style="bold"))
    for table in (
        _setups(deployment, plan),
        _stages(deployment, plan),
        _routes(point),
        _links(deployment, point),
        _prices(plan),
    ):
        if not table.row_count:
            continue
        console.print()
        console.print(table)
    for note in _notes(deployment, plan):
        console.print()
        console.print(Text(note, style="dim"))


def print_survival(
    console: "Console", full_rate: float, losses: Sequence[Loss], reserve: SpareInstances | None
) -> None:
    """A row per loss, and the sentence on the reserve; `full_rate` (requests/s) is that without a loss."""
    table = new_table("gone", "left at once (req/s)", "with other roles", "of all")
    for each in losses:
        part = each.rate_after_roles / full_rate if full_rate > 0 else 0.0
        table.add_row(str(each), f"{each.rate_at_once:.4g}", f"{each.rate_after_roles:.4g}", f"{part:.0%}")
    if losses:
        console.print()
        console.print(table)
    if reserve is not None:
        console.print(f"\n{reserve}", soft_wrap=False)


def new_table(*columns: str) -> "Table":
    """A table of these columns, the first of words and the others of numbers."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        # Names of fields have brackets, which rich takes for styles.
        table.add_column(escape(column), justify="left" if number == 0 else "right", no_wrap=number == 0)
    return table


def _setups(deployment: PlannedDeployment, plan: Plan) -> "Table":
    """The optimum beside its baselines; a row that no column has anything to say about is left out."""
    from rich.markup import escape

    titles = ("fleet you have", "homogeneous", "at equal cost", "naive")
    given = zip(titles, (plan.fleet, plan.homogeneous, plan.homogeneous_equal_cost, plan.naive), strict=True)
    baselines = {title: baseline for title, baseline in given if baseline is not None}
    others = list(baselines.values())
    optimum, estimate, cost = plan.optimum, plan.ttft_estimate, plan.cost
    points = [optimum, *(each.point for each in others)]
    base = plan.homogeneous.comparable_rate
    rows: dict[str, list[str | None]] = {
        "throughput (req/s)": [f"{point.lambda_max:.4g}" for point in points],
        "  by the paper's T(E[L])": [
            _told("{:.4g}", plan.lambda_max_at_mean_length),
            *(
                _told("{:.4g}", plan.homogeneous_at_mean_length) if each is plan.homogeneous else None
                for each in others
            ),
        ],
        "against homogeneous": [
            _told(_TIMES, plan.ratio_to_homogeneous),
            *(_told(_TIMES, each.comparable_rate / base if base > 0 else None) for each in others),
        ],
        "GPUs": [
            _gpus(deployment),
            *(_gpus(deployment) if each is plan.naive else f"{each.gpus} {each.hardware}" for each in others),
        ],
        "cost against optimum": [
            None if cost is None else _told(_TIMES, 1.0),
            *(None if each.cost_ratio is None else _told(_TIMES, 1 / each.cost_ratio) for each in others),
        ],
        "throughput per cost": [_told(_TIMES, plan.equal_cost_ratio), *_per_cost(plan, others)],
        "threshold (tokens)": [_told("{:,.0f}", optimum.threshold_tokens)],
        "instances": [_instances(point) for point in points],
        "offloaded": [f"{optimum.offloaded_fraction:.1%}"],
        "TTFT mean / P90": [_pair(point.ttft_mean_s, point.ttft_p90_s) for point in points],
        f"  queued, {estimate.load:.0%} of each": [
            _waits(each) for each in (estimate, *(each.ttft_estimate for each in others))
        ],
        f"  queued, {estimate.requests_per_s:.3g} req/s": [
            _waits(each) for each in (estimate, *(each.ttft_same_traffic for each in others))
        ],
        "  rest can begin, queued": [_waits(plan.rest_estimate)],
        **_target(plan, others),
        "cost per million tokens": [
            None if each is None else f"{each.per_million_tokens:.4g}"
            for each in (cost, *(each.cost for each in others))
        ],
        "egress per hour": [_told("{:.4g}", cost.egress_per_hour or None if cost else None)],
        "egress break-even per GB": [_told("{:.3g}", plan.egress_break_even_per_gb)],
    }
    table = new_table("", "optimum", *baselines)
    # Not the head of a column: long names would make the others narrow.
    table.title = escape(f"{deployment.name}: {deployment.model_title}")
    table.title_justify, table.title_style = "left", "bold"
    for name, cells in rows.items():
        if any(text is not None for text in cells):
            unsaid = [None] * (len(points) - len(cells))
            table.add_row(name, *(text or NONE for text in (*cells, *unsaid)))
    return table


def _per_cost(plan: Plan, others: Sequence[Baseline]) -> list[str | None]:
    """Throughput per money over that of the column at equal cost, as the verdict has it."""
    same = plan.homogeneous_equal_cost
    if same is None or same.cost_ratio is None or same.comparable_rate <= 0:
        return [None] * len(others)
    unit = same.comparable_rate * same.cost_ratio
    return [
        None if each.cost_ratio is None else _told(_TIMES, each.comparable_rate * each.cost_ratio / unit)
        for each in others
    ]


def _target(plan: Plan, others: Sequence[Baseline]) -> dict[str, list[str | None]]:
    """The row on the target of the TTFT; none without one."""
    target = plan.ttft_target
    if target is None:
        return {}
    name = "mean" if target.statistic == "mean" else "P90"
    kept = [(plan.rate_within_target, plan.keeps_target)]
    kept += [(each.rate_within_target, each.keeps_target) for each in others]
    cells = [None if rate is None else f"{rate:.3g}{'' if keeps else ', missed'}" for rate, keeps in kept]
    return {f"  req/s, {name} in {format_s(target.seconds)}": cells}


def _waits(estimate: TtftEstimate | None) -> str | None:
    if estimate is None:
        return None
    return _pair(estimate.mean_s, estimate.p90_s) or "overloaded"


def _stages(deployment: PlannedDeployment, plan: Plan) -> "Table":
    point = plan.optimum
    counts = {f"{cluster.name} prefill": cluster.instance_count for cluster in deployment.prfaas_clusters}
    for roles in point.roles:
        counts[f"{roles.cluster} prefill"] = roles.prefill
        counts[f"{roles.cluster} decode"] = roles.decode
    lowest = min((stage.capacity for stage in point.stages if stage.capacity is not None), default=0.0)
    table = new_table("stage", "instances", "full at (req/s)", "room")
    for stage in point.stages:
        count = str(counts.get(stage.name, ""))
        if stage.capacity is None:
            table.add_row(stage.name, count, "unused", NONE)
            continue
        room = f"{stage.capacity / lowest - 1:+.1%}" if lowest > 0 else NONE
        binds = stage.name in plan.binding
        table.add_row(
            stage.name,
            count,
            f"{stage.capacity:.4g}",
            "binds" if binds else room,
            style="bold" if binds else None,
        )
    return table


def _routes(point: OperatingPoint) -> "Table":
    table = new_table("prefill in, decode in", "requests", "uncached tokens", "on average")
    for route in point.routes:
        if route.fraction > _LEAST_FRACTION:
            table.add_row(
                f"{route.prefill}, {route.decode}",
                f"{route.fraction:.1%}",
                f"{route.from_tokens:,.0f} to {route.to_tokens:,.0f}",
                f"{route.mean_tokens:,.0f}",
            )
    return table


def _links(deployment: PlannedDeployment, point: OperatingPoint) -> "Table":
    round_trips_s = {link.name: link.rtt_s for link in deployment.links}
    table = new_table(
        "link", "egress", "of a request", "bandwidth", "used", "if no link were a limit", "round trip"
    )
    for link in point.links:
        sent = [route.fraction for route in point.routes if f"{route.prefill}->{route.decode}" == link.name]
        per_s = point.lambda_max * sum(sent)
        needed = link.needed_bits_per_s
        table.add_row(
            link.name,
            format_bits_per_s(link.egress_bits_per_s),
            format_bytes(link.egress_bits_per_s / BITS_PER_BYTE / per_s) if per_s > 0 else NONE,
            format_bits_per_s(link.bandwidth_bits_per_s),
            f"{link.utilisation:.1%}",
            NONE if needed is None else format_bits_per_s(needed),
            format_s(round_trips_s.get(link.name, 0.0)),
        )
    return table


def _prices(plan: Plan) -> "Table":
    table = new_table("one more", "adds (req/s)", "")
    for price in plan.shadow_prices:
        resource = f"{price.unit} {'on' if price.unit == 'Gbit/s' else 'in'} {price.resource}"
        if abs(price.gain_ratio) < _LEAST_GAIN:
            table.add_row(resource, "nothing", "")
        else:
            table.add_row(resource, f"{price.gain_req_per_s:+.3g}", f"{price.gain_ratio:+.2%}")
    return table


def _notes(deployment: PlannedDeployment, plan: Plan) -> list[str]:
    notes = [
        "Throughput takes each stage's time by the lengths one by one, E[T(L)]; the paper takes it at the mean length, "
        "T(E[L]), which is less where long prompts take more than their part. TTFT is prefill and link alone; 'queued' "
        f"(an estimate) adds waiting, at {plan.ttft_estimate.load:.0%} of each column's own throughput, and of the "
        "optimum's. A column with less throughput than that traffic is overloaded by it.",
        "Instances are PrfaaS + PD prefill + PD decode, in a column without PrfaaS the latter two.",
    ]
    if plan.rest_estimate is not None:
        notes.append(
            "First tokens come from the prefill (gateway.first_token), as if every request allowed it: the TTFT waits "
            "for no KVCache and no decode slot. 'Rest can begin' is when both are there; the second token is a step "
            "later."
        )
    if deployment.kv_copies > _MORE_THAN_ONE:
        notes.append(
            "Ranks that decode keep copies of heads that they can't divide, and those of windows are all sent: "
            f"{deployment.kv_copies:.3g} times the KVCache of one rank. Set tensor_parallel of the clusters if your "
            "engines run otherwise."
        )
    ranks = {each.name: each.tensor_parallel for each in deployment.clusters}
    if deployment.links and len(set(ranks.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in ranks.items())
        notes.append(
            f"Clusters have different tensor_parallel ({listed}): their engines map each other's KVCache."
        )
    if plan.bound_gap > _LEAST_GAP:
        notes.append(f"The search stopped early: the true optimum may be up to {plan.bound_gap:.1%} higher.")
    return notes


def _instances(point: OperatingPoint) -> str:
    pd = f"{point.n_prefill} + {point.n_decode}"
    return f"{point.n_prfaas} + {pd}" if point.n_prfaas else pd


def _gpus(deployment: PlannedDeployment) -> str:
    by_hardware: dict[str, int] = {}
    for cluster in deployment.clusters:
        by_hardware[cluster.hardware] = by_hardware.get(cluster.hardware, 0) + cluster.gpus
    return " + ".join(f"{count} {hardware}" for hardware, count in by_hardware.items())


def _told(form: str, value: float | None) -> str | None:
    return None if value is None else form.format(value)


def _pair(one: float | None, other: float | None) -> str | None:
    return None if one is None or other is None else f"{format_s(one)} / {format_s(other)}"
