"""Figure 5(b): throughput over the routing threshold, for one split of the PD cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.report.style import DECODE, MUTED, PREFILL_AWAY, PREFILL_HOME, THROUGHPUT, length_axis, plot


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
