"""The plots of `prfaas plan`: Figures 2 and 5 of the paper for a deployment."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.core.arrays import FloatArray, np
from prfaas.core.deployment import PlannedDeployment
from prfaas.core.kv.model import KvModel
from prfaas.core.kv.published import published_models
from prfaas.core.latency.files import load_profile, profile_names
from prfaas.core.latency.profile import LatencyProfile
from prfaas.core.planner import KvSize, OperatingPoint, Plan, PlanProblem
from prfaas.core.planner.equations import kv_throughput_bits_per_s
from prfaas.core.planner.two_clusters import best_threshold, evaluate
from prfaas.core.units import KIB, format_bits_per_s
from prfaas.lab.report.drawing import COLOURS, INK, MUTED, drawing, svg_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFILL_AWAY, PREFILL_HOME, DECODE = COLOURS[:3]
_THRESHOLD_POINTS = 200
_CURVE_POINTS = 120


def write_plots(
    deployment: PlannedDeployment, problem: PlanProblem, plan: Plan, directory: Path
) -> Iterator[Path]:
    """Write what applies to the deployment, one file after the other. Figure 5 is for two clusters.

    Existing files of the same names are replaced.
    """

    def path(what: str) -> Path:
        return directory / f"{deployment.name}-{what}.svg"

    plot_kv_throughput(kv_throughput_curves(deployment), path("kv-throughput"))
    yield path("kv-throughput")
    if not problem.is_two_cluster:
        return
    threshold_tokens, n_prefill = plan.optimum.threshold_tokens, plan.optimum.n_prefill
    points = evaluate_splits(problem, plan)
    plot_allocation(points, path("split"), threshold_tokens=threshold_tokens, best=n_prefill)
    yield path("split")
    if threshold_tokens is not None:
        has_target = problem.ttft_target is not None
        best = plan.optimum if has_target else best_threshold(problem, n_prefill, plan.service_model)
        plot_threshold(*evaluate_thresholds(problem, best), path("threshold"), best=best)
        yield path("threshold")


@contextmanager
def _picture(path: Path, height: float) -> "Iterator[Axes]":
    """One drawing; on leaving it is written to `path`."""
    with drawing(path.stem, height=height) as drawn:
        yield drawn.panels[0]
    path.write_text(svg_file(drawn.svg), encoding="utf-8")


def short_tokens(tokens: float) -> str:
    """`131072` → "128K" (K = 1024), for ticks."""
    return f"{tokens:g}" if tokens < KIB else f"{tokens / KIB:g}K"


def _length_axis(axes: "Axes", low: float, high: float, label: str) -> None:
    """A logarithmic axis of token counts with a tick at each power of two (or of four, if they would be many)."""
    from matplotlib.ticker import FixedLocator, NullLocator

    ticks = [2.0**n for n in range(4, 24) if low * 0.999 <= 2.0**n <= high * 1.001]
    while len(ticks) > 9:
        ticks = ticks[(len(ticks) - 1) % 2 :: 2]
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: short_tokens(value))
    axes.set_xlabel(f"{label} (tokens, K = 1024)")


def _rate_axis(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: format_bits_per_s(value))
    axes.set_ylabel("KVCache per second of prefill, one instance")


@dataclass(frozen=True, slots=True)
class KvThroughputCurve:
    """Φ_kv (Eq. 1) of one model on one hardware, over prompt lengths."""

    label: str
    tokens: Sequence[float]
    bits_per_s: Sequence[float]
    is_dense: bool
    measured: Sequence[tuple[float, float]] = ()
    """Points (tokens, bits per second) to mark: where prefill was measured."""


def kv_throughput_curves(deployment: PlannedDeployment) -> list[KvThroughputCurve]:
    """Φ_kv (Eq. 1) of the paper's models on 8 × H200, and of a deployment's own on all that it runs on."""
    curves = []
    names = profile_names()
    for model in published_models():
        if model.in_paper and f"{model.name}-h200" in names:
            profile = load_profile(f"{model.name}-h200")
            curves.append(_curve(f"{model.title.split(' (')[0]}, {_on(profile)}", model.kv_model, profile))
    shown = {f"{model.name}-h200" for model in published_models() if model.in_paper}
    own = {cluster.profile.name: cluster.profile for cluster in deployment.clusters}
    for name, profile in own.items():
        if name not in shown or deployment.dtypes.of_kv is not None:
            label = f"{deployment.model_title}, {_on(profile)}"
            curves.append(_curve(label, deployment.kv_model, profile))
    return curves


def _on(profile: LatencyProfile) -> str:
    return f"{profile.gpus_per_instance} {profile.hardware}"


def _curve(label: str, kv_model: KvModel, profile: LatencyProfile) -> KvThroughputCurve:
    low, high = max(profile.range_tokens[0], 1024.0), profile.range_tokens[1]
    tokens = np.geomspace(low, high, _CURVE_POINTS)
    measured = np.array([at for at, _ in profile.prefill.points if low <= at <= high], dtype=np.float64)

    def rates(lengths: FloatArray) -> list[float]:
        sizes, seconds = KvSize(kv_model)(lengths), profile.prefill_s(lengths)
        return [
            kv_throughput_bits_per_s(*each) for each in zip(sizes.tolist(), seconds.tolist(), strict=True)
        ]

    return KvThroughputCurve(
        label=label,
        tokens=tokens.tolist(),
        bits_per_s=rates(tokens),
        is_dense=not kv_model.is_hybrid,
        measured=list(zip(measured.tolist(), rates(measured), strict=True)) if len(measured) else (),
    )


def plot_kv_throughput(curves: Sequence[KvThroughputCurve], path: Path) -> None:
    """Figure 2: bits of KVCache that one instance makes per second of prefill; dense models dashed."""
    low = min(min(curve.tokens) for curve in curves)
    high = max(max(curve.tokens) for curve in curves)
    with _picture(path, 4.0) as axes:
        for number, curve in enumerate(curves):
            colour = COLOURS[number % len(COLOURS)]
            # Where colours come again, another style tells the curves apart.
            comes_again = number >= len(COLOURS)
            style = (":" if curve.is_dense else "-.") if comes_again else "--" if curve.is_dense else "-"
            axes.plot(curve.tokens, curve.bits_per_s, style, color=colour, label=curve.label)
            if curve.measured:
                axes.plot(*zip(*curve.measured, strict=True), "o", color=colour, markersize=4.5)
        _length_axis(axes, low, high, "prompt length")
        _rate_axis(axes)
        axes.set_title("KVCache made per second of prefill")


def evaluate_splits(problem: PlanProblem, plan: Plan) -> list[OperatingPoint]:
    """Every split of the PD cluster into prefill and decode instances, at the plan's threshold."""
    total, threshold = problem.pd[0].instances, plan.optimum.threshold_tokens
    at = problem.workload.uncached.highest_threshold if threshold is None else threshold
    counts = range(1, total) or [plan.optimum.n_prefill]
    return [evaluate(problem, at, n_prefill, plan.service_model) for n_prefill in counts]


def plot_allocation(
    points: Sequence[OperatingPoint], path: Path, *, threshold_tokens: float | None, best: int
) -> None:
    """Figure 5(a): throughput over the split of a PD cluster into prefill and decode instances.

    Bars of the highest throughput, with the limits of each stage as lines.

    Args:
        points: One per split.
        path: The SVG to write.
        threshold_tokens: At which they were taken; None where nothing is offloaded.
        best: The chosen N_p.
    """
    x = [point.n_prefill for point in points]
    cluster = next((roles.cluster for point in points for roles in point.roles), "the PD cluster")
    rates = [point.lambda_max for point in points]
    (away_name, away), (home_name, home), (decode_name, decode) = _limits(points, inf)
    with _picture(path, 3.6) as axes:
        axes.bar(
            x,
            rates,
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
                color="white" if point.n_prefill == best else INK,
                fontsize=9,
            )
        axes.plot(x, home, "o-", color=PREFILL_HOME, label=f"limit of {home_name}")
        if inf not in away:
            axes.plot(x, away, "s-", color=PREFILL_AWAY, label=f"limit of {away_name}")
        axes.plot(x, decode, "^-", color=DECODE, label=f"limit of {decode_name}")
        axes.set_xticks(x, [f"{point.n_prefill} / {point.n_decode}" for point in points])
        axes.set_xlabel(f"prefill / decode instances of {cluster}")
        axes.set_ylabel("requests per second")
        # A line that leaves the picture belongs to a stage that is no limit there.
        axes.set_ylim(0, 1.9 * max(rates))
        at = "" if threshold_tokens is None else f", threshold {threshold_tokens:,.0f} tokens"
        axes.set_title(f"Throughput over the split of {cluster}{at}")


def evaluate_thresholds(
    problem: PlanProblem, best: OperatingPoint
) -> tuple[list[float], list[OperatingPoint]]:
    """Thresholds in tokens around the best one, and the operating point of each with the same split."""
    lengths, chosen = problem.workload.uncached, best.threshold_tokens
    assert chosen is not None
    # Where nearly no request is on one side of the threshold there is nothing to see.
    low, high = min(lengths.quantile(0.03), chosen / 2), max(lengths.quantile(0.97), chosen)
    tokens = np.unique(np.append(np.geomspace(low, high, _THRESHOLD_POINTS), chosen)).tolist()
    return tokens, [evaluate(problem, threshold, best.n_prefill, "by length") for threshold in tokens]


def plot_threshold(
    tokens: Sequence[float], points: Sequence[OperatingPoint], path: Path, *, best: OperatingPoint
) -> None:
    """Figure 5(b): throughput over the routing threshold, for one split of the PD cluster.

    The two limits of prefill cross where the threshold is best, unless decode or the link binds first.
    """
    (away_name, away), (home_name, home), (decode_name, _) = _limits(points, nan)
    rates = [point.lambda_max for point in points]
    chosen, rate = best.threshold_tokens, best.lambda_max
    assert chosen is not None
    with _picture(path, 3.6) as axes:
        axes.fill_between(tokens, rates, color="#E4E4E4", linewidth=0)
        axes.plot(tokens, rates, color=INK, linewidth=3, label="throughput")
        axes.plot(tokens, away, "--", color=PREFILL_AWAY, label=f"{away_name}: Θ(PrfaaS) / p")
        axes.plot(tokens, home, "--", color=PREFILL_HOME, label=f"{home_name}: Θ(PD-P) / (1 − p)")
        axes.axhline(best.theta_pd_d, color=DECODE, linestyle="--", label=f"{decode_name}: Θ(PD-D)")
        axes.plot([chosen], [rate], "o", color=INK, markersize=8, zorder=5)
        axes.annotate(
            f"{chosen:,.0f} tokens\n{rate:.2f} req/s",
            (chosen, 0.1 * rate),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            color=INK,
        )
        axes.axvline(chosen, color=MUTED, linewidth=0.8, linestyle=":")
        _length_axis(axes, min(tokens), max(tokens), "threshold: longer prompts are offloaded")
        axes.set_ylabel("requests per second")
        axes.set_ylim(0, 1.9 * rate)
        axes.set_title(
            f"Throughput over the threshold, {best.n_prefill} prefill and {best.n_decode} decode instances"
        )


_SIDES = (("prfaas prefill", "link"), ("pd prefill",), ("pd decode",))
"""Kinds of stages: a prefill away and its link are one limit, the lower of both."""


def _limits(points: Sequence[OperatingPoint], unused: float) -> Iterator[tuple[str, list[float]]]:
    """Of prefill away (with its links), of prefill at home and of decode: its name, and the limit at each point."""
    for kinds in _SIDES:
        names = dict.fromkeys(
            "its link" if stage.kind == "link" else stage.name
            for stage in points[0].stages
            if stage.kind in kinds
        )
        capacities = [[stage.capacity for stage in point.stages if stage.kind in kinds] for point in points]
        yield (
            " or ".join(names),
            [min((each for each in found if each is not None), default=unused) for found in capacities],
        )
