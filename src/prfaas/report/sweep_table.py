"""A sweep as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prfaas.report.sweep import SweepPoint
from prfaas.units import format_bits_per_s

if TYPE_CHECKING:
    from rich.console import Console


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
