"""What is left of a plan when something is gone, for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prfaas.core.planner.survival import Loss, Reserve
from prfaas.lab.report.plan import new_table

if TYPE_CHECKING:
    from rich.console import Console


def print_survival(
    console: "Console", full_rate: float, losses: Sequence[Loss], reserve: Reserve | None
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
