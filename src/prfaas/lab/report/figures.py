"""Figure 5(a): throughput over the split of a PD cluster into prefill and decode instances.

Figure 2: how many bits of KVCache one instance makes per second of prefill, over prompt length.

How the best plan moves with one number of the deployment, for example the bandwidth of its links.

A sweep as a table.

Figure 5(b): throughput over the routing threshold, for one split of the PD cluster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prfaas.core.units import format_bits_per_s
from prfaas.lab.report.style import (
    COLOURS,
    DECODE,
    MUTED,
    PREFILL_AWAY,
    PREFILL_HOME,
    THROUGHPUT,
    length_axis,
    plot,
    rate_axis,
)

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class KvThroughputCurve:
    """Φ_kv of one model over lengths in tokens; `measured` are single (tokens, bit/s) points to mark."""

    label: str
    tokens: Sequence[float]
    bits_per_s: Sequence[float]
    is_dense: bool
    measured: Sequence[tuple[float, float]] = ()


def plot_kv_throughput(
    curves: Sequence[KvThroughputCurve],
    path: Path,
    *,
    link_bits_per_s: float | None = None,
    title: str = "Hybrid models make ten times less KVCache per second of prefill",
) -> None:
    """Dense models dashed, hybrid ones solid; a link's bandwidth as a level to compare with."""
    low = min(min(curve.tokens) for curve in curves)
    high = max(max(curve.tokens) for curve in curves)
    with plot(path, height=4.8) as (axes,):
        for number, curve in enumerate(curves):
            colour = COLOURS[number % len(COLOURS)]
            style = "--" if curve.is_dense else "-"
            axes.plot(curve.tokens, curve.bits_per_s, style, color=colour, label=curve.label)
            if curve.measured:
                axes.plot(*zip(*curve.measured, strict=True), "o", color=colour, markersize=4.5)
        if link_bits_per_s is not None:
            axes.axhline(link_bits_per_s, color=MUTED, linewidth=1, linestyle=":")
            axes.annotate(
                "the link",
                (low, link_bits_per_s),
                xytext=(4, 3),
                textcoords="offset points",
                color=MUTED,
            )
        length_axis(axes, low, high, "prompt length")
        rate_axis(axes, "y", "KVCache per second of prefill, one instance")
        axes.set_title(title)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The best plan at one value. No threshold: nothing is offloaded, or it differs between clusters.

    `instances` are those of the PD clusters, prefill and decode; `binding` names the stages that are full.
    """

    value: float
    lambda_max: float
    homogeneous: float | None
    threshold_tokens: float | None
    instances: str
    egress_bits_per_s: float
    binding: str


def plot_sweep(
    points: Sequence[SweepPoint],
    path: Path,
    *,
    title: str,
    label: str,
    scale: Literal["plain", "logarithmic", "bits_per_s"] = "plain",
    has: float | None = None,
) -> None:
    """Throughput above, threshold below, over the value. `has` marks the deployment's own value.

    The threshold's panel is left out if not every point has one.
    """
    from matplotlib.ticker import StrMethodFormatter

    x = [point.value for point in points]
    with_threshold = all(point.threshold_tokens is not None for point in points)
    with plot(path, panels=2 if with_threshold else 1, height=5.6 if with_threshold else 4.4) as panels:
        upper, lower = panels[0], panels[-1]
        upper.plot(
            x, [point.lambda_max for point in points], color=THROUGHPUT, label="this deployment, best plan"
        )
        plain = [point.homogeneous for point in points]
        if all(value is not None for value in plain):
            upper.plot(
                x,
                [value or 0.0 for value in plain],
                color=MUTED,
                linestyle="--",
                linewidth=1.4,
                label="homogeneous PD with as many GPUs",
            )
        highest = max([point.lambda_max for point in points] + [value or 0.0 for value in plain])
        upper.set_ylim(0, 1.12 * highest if highest > 0 else 1)
        upper.set_ylabel("requests per second")
        upper.set_title(title)
        if with_threshold:
            thresholds = [point.threshold_tokens or 0.0 for point in points]
            lower.plot(x, thresholds, color=PREFILL_AWAY, label="best threshold")
            lower.set_ylim(0, 1.15 * max(thresholds) or 1)
            lower.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            lower.set_ylabel("tokens")
        for axes in panels:
            if has is not None:
                axes.axvline(has, color=MUTED, linestyle=":", linewidth=1.2)
        if has is not None:
            upper.annotate(
                "as in the file",
                (has, 0),
                xytext=(4, 5),
                textcoords="offset points",
                color=MUTED,
                fontsize=9,
            )
        if scale == "bits_per_s":
            rate_axis(lower, "x", label)
        else:
            lower.set_xscale("log" if scale == "logarithmic" else "linear")
            lower.set_xlabel(label)
        if len(x) > 1 and min(x) < max(x):
            lower.set_xlim(min(x), max(x))


def print_sweep(console: "Console", field: str, points: Sequence[SweepPoint], *, is_rate: bool) -> None:
    """One line per value."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(field, no_wrap=True)
    for title in ("req/s", "homogeneous", "threshold", "prefill + decode", "egress"):
        table.add_column(title, justify="right")
    table.add_column("binds")
    for point in points:
        table.add_row(
            format_bits_per_s(point.value) if is_rate else f"{point.value:g}",
            f"{point.lambda_max:.4g}",
            "–" if point.homogeneous is None else f"{point.homogeneous:.4g}",
            "–" if point.threshold_tokens is None else f"{point.threshold_tokens:,.0f}",
            point.instances,
            format_bits_per_s(point.egress_bits_per_s),
            point.binding,
        )
    console.print(table)


@dataclass(frozen=True, slots=True)
class ThresholdCurves:
    """Limits of the stages over thresholds in tokens, in requests per second of all requests."""

    tokens: Sequence[float]
    prefill_away: Sequence[float]
    prefill_home: Sequence[float]
    decode: float
    lambda_max: Sequence[float]


def plot_threshold(
    curves: ThresholdCurves,
    path: Path,
    *,
    best_tokens: float,
    best_lambda: float,
    split: tuple[int, int],
) -> None:
    """The two limits of prefill cross where the threshold is best, unless decode or the link binds first."""
    with plot(path) as (axes,):
        axes.fill_between(curves.tokens, curves.lambda_max, color="#E4E4E4", linewidth=0)
        axes.plot(curves.tokens, curves.lambda_max, color=THROUGHPUT, linewidth=3, label="throughput")
        axes.plot(
            curves.tokens,
            curves.prefill_away,
            color=PREFILL_AWAY,
            linestyle="--",
            label="limit of the PrfaaS cluster: Θ(PrfaaS) / p",
        )
        axes.plot(
            curves.tokens,
            curves.prefill_home,
            color=PREFILL_HOME,
            linestyle="--",
            label="limit of prefill at home: Θ(PD-P) / (1 − p)",
        )
        axes.axhline(curves.decode, color=DECODE, linestyle="--", label="limit of decode: Θ(PD-D)")
        axes.plot([best_tokens], [best_lambda], "o", color=THROUGHPUT, markersize=8, zorder=5)
        axes.annotate(
            f"{best_tokens:,.0f} tokens\n{best_lambda:.2f} req/s",
            (best_tokens, 0.1 * best_lambda),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            color=THROUGHPUT,
        )
        axes.axvline(best_tokens, color=MUTED, linewidth=0.8, linestyle=":")
        length_axis(axes, min(curves.tokens), max(curves.tokens), "threshold: longer prompts are offloaded")
        axes.set_ylabel("requests per second")
        axes.set_ylim(0, 1.9 * best_lambda)
        axes.set_title(f"Best threshold with {split[0]} prefill and {split[1]} decode instances")


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """What each stage can do at one split, in requests per second of all requests."""

    n_prefill: int
    n_decode: int
    prefill_away: float | None
    prefill_home: float
    decode: float
    lambda_max: float


def plot_allocation(
    points: Sequence[SplitPoint], path: Path, *, threshold_tokens: float | None, best: int
) -> None:
    """Bars of the highest throughput, with the limits of each stage as lines. `best` is the chosen N_p."""
    x = [point.n_prefill for point in points]
    finite = [point.lambda_max for point in points]
    with plot(path) as (axes,):
        axes.bar(
            x,
            finite,
            width=0.62,
            color=["#B8B8B8" if point.n_prefill != best else "#5F5F5F" for point in points],
            label="throughput",
        )
        for point in points:
            axes.annotate(
                f"{point.lambda_max:.2f}",
                (point.n_prefill, point.lambda_max),
                xytext=(0, -13),
                textcoords="offset points",
                ha="center",
                color="white" if point.n_prefill == best else THROUGHPUT,
                fontsize=9,
            )
        axes.plot(
            x, [p.prefill_home for p in points], "o-", color=PREFILL_HOME, label="limit of prefill at home"
        )
        if all(point.prefill_away is not None for point in points):
            away = [point.prefill_away or 0.0 for point in points]
            axes.plot(x, away, "s-", color=PREFILL_AWAY, label="limit of prefill in the PrfaaS cluster")
        axes.plot(x, [p.decode for p in points], "^-", color=DECODE, label="limit of decode")
        axes.set_xticks(x, [f"{point.n_prefill} / {point.n_decode}" for point in points])
        axes.set_xlabel("prefill / decode instances of the PD cluster")
        axes.set_ylabel("requests per second")
        # Lines that leave the picture say enough: that stage does not bind there.
        axes.set_ylim(0, 1.9 * max(finite))
        at = "" if threshold_tokens is None else f", threshold {threshold_tokens:,.0f} tokens"
        axes.set_title(f"Best split of the PD cluster{at}")
