"""Sweeps for people: the field in words, and over prices the break-even at which both sides serve as much per money."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.core.deployment import PlannedDeployment
from prfaas.core.planner import Plan
from prfaas.core.units import format_bits_per_s
from prfaas.lab.report.drawing import COLOURS, INK, MUTED, drawing, svg_file
from prfaas.lab.report.plan import NONE, new_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

EVEN = 1.0
"""The `equal_cost_ratio` at which a deployment is worth as much as its money without PrfaaS."""

# A logarithmic axis over less than this ratio gets more ticks than one per power of ten.
_FEW_DECADES = 100.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One number of a deployment, and the values to put there."""

    field: str
    """Of the deployment file."""
    values: Sequence[float]
    is_rate: bool = False
    """The values are bits per second."""
    is_geometric: bool = False
    """Their ratios are equal, not their differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSweep(Sweep):
    """Plans over the values of one number of a deployment."""

    words: str = ""
    """The field's name for people."""
    plans: Sequence[Plan]
    """At each value."""

    def break_even(self) -> float | None:
        """Where `equal_cost_ratio` first passes 1, by a straight line between values around it; None if nowhere."""
        points = zip(self.values, self.plans, strict=True)
        known = [
            (value, plan.equal_cost_ratio) for value, plan in points if plan.equal_cost_ratio is not None
        ]
        for (before, one), (after, other) in pairwise(known):
            if (one - EVEN) * (other - EVEN) <= 0 and one != other:
                return before + (after - before) * (one - EVEN) / (one - other)
        return None

    def break_even_sentence(self) -> str:
        """Where the break-even is, or on which side of it all values are."""
        even = self.break_even()
        if even is not None:
            return f"Break-even: a {self.words} of {even:.3g}."
        ratios = [plan.equal_cost_ratio for plan in self.plans if plan.equal_cost_ratio is not None]
        if not ratios and any(plan.cost is not None for plan in self.plans):
            return "No break-even: the target for the TTFT is never kept, so there is nothing to compare."
        if not ratios:
            return "No break-even: without prices of all hardware nothing is said about cost."
        side = "more" if min(ratios) > EVEN else "less"
        span = f"from {self.values[0]:.4g} to {self.values[-1]:.4g}"
        return f"No break-even {span}: everywhere this deployment does {side} for its money."

    def to_json(self, plots: Sequence[Path]) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; `plots` are the files that were drawn."""
        points = zip(self.values, self.plans, strict=True)
        rows = [{"value": value, **plan.to_json()} for value, plan in points]
        even = {"break_even": self.break_even()} if is_price_field(self.field) else {}
        return {"field": self.field, "points": rows, "plots": [str(each) for each in plots]} | even

    def print(self, console: "Console") -> None:
        """Write a table with one line per value; over prices also the price at which both sides do the same."""
        from rich.text import Text

        is_price = is_price_field(self.field)
        cells, titles = (_price_cells, _PRICE_TITLES) if is_price else (_cells, _TITLES)
        table = new_table(self.field, *titles)
        if not is_price:
            table.columns[-1].justify = "left"
        for value, plan in zip(self.values, self.plans, strict=True):
            told = format_bits_per_s(value) if self.is_rate else f"{value:.4g}" if is_price else f"{value:g}"
            table.add_row(told, *cells(plan))
        console.print(table)
        if not all(plan.keeps_target and plan.homogeneous.keeps_target for plan in self.plans):
            console.print()
            console.print(Text(_MISSED, style="dim"))
        if is_price:
            console.print()
            console.print(Text(self.break_even_sentence(), style="bold"))
            console.print()
            console.print(Text(_AT_EQUAL_COST, style="dim"))

    def plot(self, path: Path, title: str) -> None:
        """Draw an SVG: throughput and threshold over the values, over prices cost and throughput per money."""
        is_price = is_price_field(self.field)
        thresholds = [plan.optimum.threshold_tokens for plan in self.plans]
        has_lower = is_price or None not in thresholds
        with drawing(path.stem, 2 if has_lower else 1, height=2.5 if has_lower else 3.5) as drawn:
            upper, lower = drawn.panels[0], drawn.panels[-1]
            if is_price:
                self._plot_costs(upper)
                self._plot_ratios(upper, lower)
            else:
                self._plot_rates(upper)
            upper.set_title(title)
            if has_lower and not is_price:
                self._plot_thresholds(lower, [tokens or 0.0 for tokens in thresholds])
            low, high = min(self.values), max(self.values)
            if self.is_rate:
                _rate_axis(lower, is_short=high < _FEW_DECADES * low)
            else:
                lower.set_xscale("log" if self.is_geometric else "linear")
            lower.set_xlabel(self.words)
            if low < high:
                lower.set_xlim(low, high)
        path.write_text(svg_file(drawn.svg), encoding="utf-8")

    def _plot_rates(self, axes: "Axes") -> None:
        rates = [plan.optimum.lambda_max for plan in self.plans]
        missed = [not plan.keeps_target for plan in self.plans]
        bases = [plan.homogeneous for plan in self.plans]
        homogeneous = [base.point.lambda_max if base.keeps_target else nan for base in bases]
        # What misses the target is no answer for its value: the curve leaves it out, and one point alone is seen.
        kept = [nan if misses else rate for rate, misses in zip(rates, missed, strict=True)]
        mark = "o-" if any(missed) else "-"
        axes.plot(self.values, kept, mark, color=INK, markersize=4, label="this deployment, best plan")
        label = "homogeneous PD with as many GPUs"
        axes.plot(self.values, homogeneous, color=MUTED, linestyle="--", linewidth=1.4, label=label)
        _mark_missed(axes, self.values, rates, missed)
        highest = max(*rates, *(rate for rate in homogeneous if not isnan(rate)))
        axes.set_ylim(0, 1.12 * highest if highest > 0 else 1)
        axes.set_ylabel("requests per second")

    def _plot_thresholds(self, axes: "Axes", tokens: Sequence[float]) -> None:
        axes.plot(self.values, tokens, color=COLOURS[0], label="best threshold")
        axes.set_ylim(0, 1.15 * max(tokens) or 1)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylabel("tokens")

    def _plot_costs(self, axes: "Axes") -> None:
        values, plans = self.values, self.plans
        curves = {
            "this deployment, best plan": ([plan.cost for plan in plans], INK, "-"),
            "the fleet you have": (
                [plan.fleet.cost if plan.fleet else None for plan in plans],
                COLOURS[1],
                "-.",
            ),
            "homogeneous PD with as many GPUs": ([plan.homogeneous.cost for plan in plans], MUTED, "--"),
        }
        for label, (costs, colour, style) in curves.items():
            if any(cost is not None for cost in costs):
                per_million = [nan if cost is None else cost.per_million_tokens for cost in costs]
                axes.plot(values, per_million, style, color=colour, label=label)
        missed = [plan.cost is not None and not plan.keeps_target for plan in plans]
        own = [plan.cost.per_million_tokens if plan.cost else nan for plan in plans]
        _mark_missed(axes, values, own, missed)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("cost of a million tokens")

    def _plot_ratios(self, upper: "Axes", lower: "Axes") -> None:
        ratios = [nan if plan.equal_cost_ratio is None else plan.equal_cost_ratio for plan in self.plans]
        lower.plot(self.values, ratios, color=COLOURS[0], label="throughput per money against PD only")
        lower.axhline(EVEN, color=MUTED, linestyle=":", linewidth=1.4, label="break-even")
        even = self.break_even()
        if even is not None:
            for axes in (upper, lower):
                axes.axvline(even, color=MUTED, linestyle=":", linewidth=1.2)
            lower.annotate(f"{even:.3g}", (even, EVEN), xytext=(5, 6), textcoords="offset points", color=INK)
        lower.set_ylim(bottom=0)
        lower.set_ylabel("times at equal cost")


def _mark_missed(
    axes: "Axes", values: Sequence[float], heights: Sequence[float], missed: Sequence[bool]
) -> None:
    """Cross out the points of a curve that miss the target for the TTFT."""
    crossed = [
        (value, height) for value, height, misses in zip(values, heights, missed, strict=True) if misses
    ]
    label = "misses the target for the TTFT"
    if crossed:
        # Crosses at the end of an axis are whole.
        at, tops = zip(*crossed, strict=True)
        axes.plot(at, tops, "x", color=COLOURS[3], markersize=8, label=label, clip_on=False, zorder=5)


def _rate_axis(axes: "Axes", *, is_short: bool) -> None:
    """Values as bit rates, with ticks like "10 Gbit/s"; on a short axis at 2 and 5 times a power of ten too."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    subs = (1.0, 2.0, 5.0) if is_short else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: format_bits_per_s(value))


_TITLES = ("req/s", "homogeneous", "threshold", "prefill + decode", "egress", "binds")
_PRICE_TITLES = (
    "req/s",
    "at equal cost",
    "cost/M tokens",
    "fleet you have",
    "homogeneous",
    "egress per hour",
)
_MISSED = "Missed: the target for the TTFT is not kept; the throughput is the highest without it."
_AT_EQUAL_COST = (
    "At equal cost is the throughput per money over that of as many whole instances, PD only, as the same money buys. "
    "The three costs are of a million tokens: this deployment, the fleet you have, as many GPUs."
)


def _cells(plan: Plan) -> Iterator[str]:
    point, base = plan.optimum, plan.homogeneous
    yield _rate(point.lambda_max, plan.keeps_target)
    yield _rate(base.point.lambda_max, base.keeps_target)
    yield NONE if point.threshold_tokens is None else f"{point.threshold_tokens:,.0f}"
    yield f"{point.n_prefill} + {point.n_decode}"
    yield format_bits_per_s(point.egress_bits_per_s)
    yield ", ".join(plan.binding)


def _price_cells(plan: Plan) -> Iterator[str]:
    yield _rate(plan.optimum.lambda_max, plan.keeps_target)
    yield NONE if plan.equal_cost_ratio is None else f"{plan.equal_cost_ratio:.2f} ×"
    for cost in (plan.cost, plan.fleet.cost if plan.fleet else None, plan.homogeneous.cost):
        yield NONE if cost is None else f"{cost.per_million_tokens:.4g}"
    yield NONE if plan.cost is None else f"{plan.cost.egress_per_hour:.4g}"


def _rate(requests_per_s: float, keeps_target: bool) -> str:
    return f"{requests_per_s:.4g}{'' if keeps_target else ', missed'}"
