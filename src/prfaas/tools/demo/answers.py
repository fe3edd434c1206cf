"""The answers themselves, for people: how each prompt ends, and how its answer begins."""

from rich.table import Table
from rich.text import Text

from prfaas.tools.demo.display import demo_table
from prfaas.tools.demo.outcome import DemoOutcome

_PROMPT_CHARS, _ANSWER_CHARS = 30, 60

NOISE = (
    "The answers are noise, since this model's weights are random. They show exactness all the same: every token "
    "depends on all KVCache before it, so one wrong byte would make another answer."
)
"""Of models that prfaas makes itself."""


def answers_table(outcome: DemoOutcome) -> Table:
    """One line per prompt."""
    table = demo_table("What it wrote")
    table.add_column("the prompt ends", justify="right", no_wrap=True)
    table.add_column("the answer begins", no_wrap=True)
    for row in outcome.rows:
        end = on_one_line(row.prompt_end)[-_PROMPT_CHARS:]
        table.add_row(Text(f"…{end} "), Text(on_one_line(row.answer.text)[:_ANSWER_CHARS].strip()))
    return table


def on_one_line(text: str) -> str:
    """`text` with single spaces, and without what a terminal would obey."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
