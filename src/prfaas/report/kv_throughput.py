"""Figure 2: how many bits of KVCache one instance makes per second of prefill, over prompt length."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.report.style import COLOURS, MUTED, length_axis, plot, rate_axis


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
