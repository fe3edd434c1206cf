"""Sweeps for people: the field in words, and over prices the break-even at which both sides serve as much per money."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import Plan
from prfaas.lab.report.plan import NONE, new_table, print_missed, rate_cell
from prfaas.lab.report.style import MUTED, PREFILL_AWAY, PREFILL_HOME, THROUGHPUT, mark_missed, plot

if TYPE_CHECKING:
    from rich.console import Console

EVEN = 1.0
"""The `equal_cost_ratio` at which a deployment is worth as much as its money without PrfaaS."""

# The fields that a plan depends on, with entries of lists as [], and what they are called; {} is the entry's name.
_FIELDS = {
    "links[].bandwidth": "bandwidth of link {}",
    "links[].rtt_s": "round trip of link {} (s)",
    "links[].egress_per_gb": "price of a GB over link {}",
    "clusters[].instance_count": "instances of {}",
    "clusters[].prefix_hit_ratio": "cached part of prompts in {}",
    "clusters[].tensor_parallel": "tensor-parallel ranks of {}",
    "prices.egress_per_gb": "price of a GB over any link",
    "slo.ttft_s": "target for the TTFT (s)",
    "slo.tokens_per_s": "tokens per second of an answer",
    "slo.tpot_s": "seconds per token of an answer",
    "workload.load": "load, as a part of the throughput",
    "workload.output_tokens": "mean length of answers (tokens)",
    "workload.prefix_hit_ratio": "cached part of prompts",
    "workload.lengths.mu": "mean of the logarithm of prompt lengths",
    "workload.lengths.sigma": "standard deviation of the logarithm of prompt lengths",
    "workload.lengths.low": "shortest prompt (tokens)",
    "workload.lengths.high": "longest prompt (tokens)",
    "workload.lengths.tokens": "length of prompts (tokens)",
}
_PRICE = "prices."
_ENTRY = re.compile(r"\[([^\[\]]*)\]")


def is_planned_field(field: str) -> bool:
    """True if a plan depends on this field of the deployment file."""
    return _ENTRY.sub("[]", field) in _FIELDS or field.startswith(_PRICE)


def planned_fields() -> str:
    """All of them, for people."""
    return f"{', '.join(_FIELDS)} and the prices of hardware"


def is_price_field(field: str) -> bool:
    """True for a price: cost depends on it, throughput does not."""
    return field.startswith(_PRICE) or field.endswith("egress_per_gb")


def field_words(deployment: PlannedDeployment, field: str) -> str:
    """The field's name for people: `links[0].bandwidth` → "bandwidth of link east->home"."""
    words = _FIELDS.get(_ENTRY.sub("[]", field))
    if words is None:
        return f"price of a GPU-hour of {field.removeprefix(_PRICE)}" if field.startswith(_PRICE) else field
    entry = _ENTRY.search(field)
    if entry is None:
        return words
    name = entry[1]
    if name.isdecimal():
        names = [
            each.name for each in (deployment.links if field.startswith("links") else deployment.clusters)
        ]
        name = names[int(name)]
    return words.format(name)


def break_even_value(values: Sequence[float], plans: Sequence[Plan]) -> float | None:
    """Where `equal_cost_ratio` first passes 1, by a straight line between the values around it; None if nowhere."""
    points = [(value, plan.equal_cost_ratio) for value, plan in zip(values, plans, strict=True)]
    known = [(value, ratio) for value, ratio in points if ratio is not None]
    for (before, one), (after, other) in pairwise(known):
        if (one - EVEN) * (other - EVEN) <= 0 and one != other:
            return before + (after - before) * (one - EVEN) / (one - other)
    return None


def print_price_sweep(
    console: "Console", field: str, words: str, values: Sequence[float], plans: Sequence[Plan]
) -> None:
    """Write a table with one line per price, and the price at which both sides do the same.

    Args:
        console: Where to.
        field: The field of the deployment file.
        words: What it is called.
        values: Prices.
        plans: The plan at each.
    """
    from rich.text import Text

    table = new_table(field)
    for title in (
        "req/s",
        "at equal cost",
        "cost/M tokens",
        "fleet you have",
        "homogeneous",
        "egress per hour",
    ):
        table.add_column(title, justify="right")
    for value, plan in zip(values, plans, strict=True):
        costs = [plan.cost, plan.fleet.cost if plan.fleet else None, plan.homogeneous.cost]
        per_million = [NONE if cost is None else f"{cost.per_million_tokens:.4g}" for cost in costs]
        table.add_row(
            f"{value:.4g}",
            rate_cell(plan.optimum.lambda_max, plan.keeps_target),
            NONE if plan.equal_cost_ratio is None else f"{plan.equal_cost_ratio:.2f} ×",
            *per_million,
            NONE if plan.cost is None else f"{plan.cost.egress_per_hour:.4g}",
        )
    console.print(table)
    print_missed(console, plans)
    console.print()
    console.print(Text(break_even_sentence(words, values, plans), style="bold"))
    console.print()
    console.print(
        Text(
            "At equal cost is the throughput per money over that of as many whole instances, PD only, as the same "
            "money buys. The three costs are of a million tokens: this deployment, the fleet you have, as many GPUs.",
            style="dim",
        )
    )


def break_even_sentence(words: str, values: Sequence[float], plans: Sequence[Plan]) -> str:
    """Where the break-even is, or on which side of it all values are."""
    even = break_even_value(values, plans)
    if even is not None:
        return f"Break-even: a {words} of {even:.3g}."
    ratios = [plan.equal_cost_ratio for plan in plans if plan.equal_cost_ratio is not None]
    if not ratios and any(plan.cost is not None for plan in plans):
        return "No break-even: the target for the TTFT is never kept, so there is nothing to compare."
    if not ratios:
        return "No break-even: without prices of all hardware nothing is said about cost."
    side = "more" if min(ratios) > EVEN else "less"
    span = f"from {values[0]:.4g} to {values[-1]:.4g}"
    return f"No break-even {span}: everywhere this deployment does {side} for its money."


def plot_price_sweep(
    values: Sequence[float],
    plans: Sequence[Plan],
    path: Path,
    *,
    title: str,
    words: str,
    is_logarithmic: bool,
) -> None:
    """Cost of a million tokens above, and throughput per money below, with the break-even line.

    Args:
        values: Prices.
        plans: The plan at each.
        path: The PNG to write.
        title: Of the whole picture.
        words: What the price is called.
        is_logarithmic: How the prices' axis is divided.
    """
    with plot(path, panels=2, height=5.8) as (upper, lower):
        nothing = float("nan")
        curves = {
            "this deployment, best plan": ([plan.cost for plan in plans], THROUGHPUT, "-"),
            "the fleet you have": (
                [plan.fleet.cost if plan.fleet else None for plan in plans],
                PREFILL_HOME,
                "-.",
            ),
            "homogeneous PD with as many GPUs": ([plan.homogeneous.cost for plan in plans], MUTED, "--"),
        }
        for label, (costs, colour, style) in curves.items():
            if any(cost is not None for cost in costs):
                per_million = [nothing if cost is None else cost.per_million_tokens for cost in costs]
                upper.plot(values, per_million, style, color=colour, label=label)
        missed = [plan.cost is not None and not plan.keeps_target for plan in plans]
        if any(missed):
            own = [plan.cost.per_million_tokens if plan.cost else nothing for plan in plans]
            mark_missed(upper, values, own, missed)
        upper.set_ylim(bottom=0)
        upper.set_ylabel("cost of a million tokens")
        upper.set_title(title)
        ratios = [nothing if plan.equal_cost_ratio is None else plan.equal_cost_ratio for plan in plans]
        lower.plot(values, ratios, color=PREFILL_AWAY, label="throughput per money against PD only")
        lower.axhline(EVEN, color=MUTED, linestyle=":", linewidth=1.4, label="break-even")
        even = break_even_value(values, plans)
        if even is not None:
            for axes in (upper, lower):
                axes.axvline(even, color=MUTED, linestyle=":", linewidth=1.2)
            lower.annotate(
                f"{even:.3g}", (even, EVEN), xytext=(5, 6), textcoords="offset points", color=THROUGHPUT
            )
        lower.set_ylim(bottom=0)
        lower.set_ylabel("times at equal cost")
        lower.set_xscale("log" if is_logarithmic else "linear")
        lower.set_xlabel(words)
        if min(values) < max(values):
            lower.set_xlim(min(values), max(values))
