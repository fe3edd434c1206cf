"""How the demo is shown: its width, the form of its tables, and what it proposes at its end."""

from collections.abc import Iterator

from rich import box
from rich.table import Table

from prfaas.core.shipped import page

DEMO_COLUMNS = 99
"""Tables and sentences are no wider; the same fits a page of documentation."""

_STEPS = (
    ("prfaas up examples/local.yaml", "keep it running, and send requests of your own"),
    ("prfaas status examples/local.yaml --watch", "beside it: queues, links, thresholds, routes"),
    ("prfaas demo --restart", "every engine killed in between: what pools keep"),
    ("prfaas demo --model gpt-oss", "another kind of KVCache"),
    ("prfaas plan examples/paper.yaml", "what two clusters can do, before you buy"),
)


def demo_table(title: str) -> Table:
    """A table in the demo's form."""
    # One cell between columns: ten of them fit the width.
    return Table(box=box.SIMPLE_HEAD, title=title, padding=0, pad_edge=False, show_edge=False)


def next_steps(*, is_on_path: bool) -> Iterator[str]:
    """Lines on what to try next.

    Args:
        is_on_path: Whether a shell finds `prfaas`.
    """
    yield "Next:"
    if not is_on_path:
        yield "  . .venv/bin/activate"
    width = max(len(command) for command, _ in _STEPS)
    for command, what in _STEPS:
        yield f"  {command:<{width}}  {what}"
    yield f"{page('tutorial/1-first-request')} takes you through it."
