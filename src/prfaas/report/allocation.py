"""Figure 5(a): throughput over the split of a PD cluster into prefill and decode instances."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.report.style import DECODE, PREFILL_AWAY, PREFILL_HOME, THROUGHPUT, plot


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
