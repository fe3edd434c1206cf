"""How the best plan moves with one number of the deployment, for example the bandwidth of its links."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prfaas.report.style import MUTED, PREFILL_AWAY, THROUGHPUT, plot, rate_axis


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
