"""The demo for people: its tables with their notes, its conclusions, and what it proposes at its end."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.shipped import page
from prfaas.core.units import format_bits_per_s, format_bytes, format_s
from prfaas.serving.engines.tiny import tiny_config
from prfaas.tools.demo.compare import Equality
from prfaas.tools.demo.line import USED_SHARE, DemoLine
from prfaas.tools.demo.outcome import DemoOutcome, Row, SecondAct
from prfaas.tools.demo.prompts import LONGEST_TOKENS

DEMO_COLUMNS = 99
"""Tables and sentences are no wider; the same fits a page of documentation."""

_PROMPT_CHARS, _ANSWER_CHARS = 30, 60
_STEPS = (
    ("prfaas up examples/local.yaml", "keep it running, and send requests of your own"),
    ("prfaas status examples/local.yaml --watch", "beside it: queues, links, thresholds, routes"),
    ("prfaas demo --restart", "every engine killed in between: what pools keep"),
    ("prfaas demo --model gpt-oss", "another kind of KVCache"),
    ("prfaas plan examples/paper.yaml", "what two clusters can do, before you buy"),
)


def demo_table(title: str, *headings: str) -> Table:
    """A table in the demo's form: headings of numbers begin with ">", those of words that must stay whole with "|"."""
    # One cell between columns: ten of them fit the width.
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=0, pad_edge=False, show_edge=False)
    for heading in headings:
        is_number, is_whole = heading.startswith(">"), heading.startswith((">", "|"))
        table.add_column(heading[is_whole:], justify="right" if is_number else "left", no_wrap=is_whole)
    return table


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


_HYBRID = "qwen3-next"
# That a line must carry at least, or it is no use to build a cluster at its other end.
_FEWEST_INSTANCES = 4


def outcome_table(outcome: DemoOutcome) -> Table:
    """One line per prompt, in the order in which they were sent."""
    headings = (
        "prompt",
        ">tokens",
        ">cached",
        "route",
        ">TTFT",
        ">plain\nvLLM's",
        ">KV bytes\nmoved",
        ">hidden",
    )
    table = demo_table(outcome.kv_model.describe(), *headings, "|kvmodel\nsays", "|equal")
    for row in outcome.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    answer, route = row.answer, row.answer.route
    return (
        row.label,
        f"{answer.prompt_tokens:,}",
        f"{route.cached_tokens:,}",
        _route(row),
        format_s(answer.ttft_s),
        "-" if row.plain_ttft_s is None else format_s(row.plain_ttft_s),
        f"{route.kv_bytes:,}",
        "-" if route.hidden_fraction is None else f"{route.hidden_fraction:.0%}",
        _explanation(row),
        row.comparison.equality.styled(row.comparison.equality),
    )


def _route(row: Row) -> str:
    route = row.answer.route
    return f"{route.route} ({route.fallback})" if route.fallback else route.route


def _explanation(row: Row) -> str:
    """How the moved bytes follow from the model's configuration."""
    moved_bytes = row.answer.route.kv_bytes
    if moved_bytes == 0:
        return "-"
    if moved_bytes == row.exact_bytes:
        return "the same"
    if moved_bytes == row.paged_bytes:
        return "in pages"
    return f"[bold red]{row.exact_bytes:,}[/]"


def _difference(row: Row) -> str:
    comparison = row.comparison
    margin = "not among the likeliest"
    if comparison.margin_nats is not None and comparison.bound_nats is not None:
        margin = f"{comparison.margin_nats:.3f} nat, bound {comparison.bound_nats:.3f}"
    return f"{row.label}: {comparison.equality} at token {comparison.position} ({margin})."


def footnotes(outcome: DemoOutcome) -> list[str]:
    """Sentences that explain the columns."""
    notes = [] if outcome.line is None else [outcome.line.sentence()]
    notes += [
        "cached: tokens that the decode engine already held, so that their KV did not move again. hidden: share of "
        "the bytes that had arrived when the prefill ended.",
        "plain vLLM's TTFT: one engine that has this machine to itself, by its own metric.",
        "equal: the greedy answer against that engine with the same split of the prompt. A tie is a first difference "
        "between two tokens whose reference logits are at most two steps of bf16 apart, at their own magnitude (from 8 "
        "to 16 a step is 0.0625 nat, from 16 to 32 it is 0.125): each may be rounded one step off.",
    ]
    notes += [_difference(row) for row in outcome.rows if row.comparison.position is not None]
    if outcome.pages is not None:
        pages = outcome.pages
        sizes = f"{pages.full_tokens} tokens"
        if pages.window_tokens != pages.full_tokens:
            sizes += f" (full attention) and {pages.window_tokens} tokens (sliding window)"
        notes.append(
            f"kvmodel: the bytes that the model's configuration gives. In pages: engines move whole pages of {sizes}, "
            "and with that it gives every row's bytes exactly."
        )
    else:
        notes.append("kvmodel: no page size of the engine explains the moved bytes of all rows.")
    return notes


def closing(outcome: DemoOutcome) -> str:
    """The conclusion in one or two sentences."""
    rows = outcome.rows
    offloaded = [row for row in rows if row.answer.route.route == "offload"]
    equal = f"{outcome.count(Equality.EXACT)} of {len(rows)} answers are equal to plain vLLM's token by token"
    if outcome.count(Equality.TIE):
        equal += f", {outcome.count(Equality.TIE)} up to a tie"
    if outcome.count(Equality.NO):
        equal += f", {outcome.count(Equality.NO)} not"
    if not offloaded:
        return f"No prompt was prefilled in another cluster; {equal}."
    longest = max(offloaded, key=lambda row: row.answer.prompt_tokens)
    crossed_bytes = sum(row.crossed_bytes for row in rows)
    shown = (
        f"{len(offloaded)} of {len(rows)} prompts, those over {outcome.deployment.routing.threshold_tokens:,} uncached "
        f"tokens, were prefilled in another cluster and decoded at home; {format_bytes(crossed_bytes)} of KVCache "
        f"crossed the link, {longest.answer.route.hidden_fraction or 0:.0%} of the longest prompt's while it was still "
        f"being prefilled. {_first_tokens(longest)}{equal}."
    )
    return (
        shown
        if outcome.kv_model.is_hybrid or outcome.line is None
        else f"{shown} {_dense(outcome, outcome.line)}"
    )


def _first_tokens(row: Row) -> str:
    """One prompt's time to the first token beside plain vLLM's."""
    if row.plain_ttft_s is None:
        return ""
    return (
        f"Its first token came after {format_s(row.answer.ttft_s)}; plain vLLM's, with this machine to itself, after "
        f"{format_s(row.plain_ttft_s)}: both clusters share the cores of this one, so nothing can be gained here. "
    )


def _dense(outcome: DemoOutcome, line: DemoLine) -> str:
    """Why a model whose layers all keep every token should prefill at home."""
    model, hybrid = outcome.kv_model, model_from_config(tiny_config(_HYBRID), name=_HYBRID)
    narrow = DemoLine.of(hybrid, line.speed)
    share = narrow.used_share(model, LONGEST_TOKENS)
    instances = 1 / share
    judgement = "it should stay home" if instances < _FEWEST_INSTANCES else "such a line can carry it"
    return (
        f"This model is dense: {model.token_bytes:,} B of KV per token, {model.token_bytes / hybrid.token_bytes:.0f} "
        f"times the {hybrid.token_bytes:,} B of {_HYBRID}, for which a line of "
        f"{format_bits_per_s(narrow.bandwidth_bits_per_s)} would do. On that its KVCache takes {share:.0%} of its "
        f"prefill's time in place of {USED_SHARE:.0%}, so {instances:.1f} prefill instances fill it: {judgement}."
    )


NOISE = (
    "The answers are noise, since this model's weights are random. They show exactness all the same: every token "
    "depends on all KVCache before it, so one wrong byte would make another answer."
)
"""Of models that prfaas makes itself."""


def answers_table(outcome: DemoOutcome) -> Table:
    """One line per prompt."""
    table = demo_table("What it wrote", ">the prompt ends", "|the answer begins")
    for row in outcome.rows:
        end = on_one_line(row.prompt_end)[-_PROMPT_CHARS:]
        table.add_row(Text(f"…{end} "), Text(on_one_line(row.answer.text)[:_ANSWER_CHARS].strip()))
    return table


def on_one_line(text: str) -> str:
    """`text` with single spaces, and without what a terminal would obey."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


SECOND_NOTE = (
    "first answer: the same, or how many tokens are. equal: against a plain vLLM that has the prompt in its own cache; "
    "at: the first token that differs."
)
"""What the columns of `second_table` mean."""


def second_table(act: SecondAct) -> Table:
    """One line per prompt, each beside what it was in the first act."""
    table = demo_table(
        "The same prompts, after all engines were killed and started again",
        *("prompt", ">from\npools", ">cached", "route", ">TTFT\nbefore", ">now", ">KV bytes\nbefore", ">now"),
        *(">first\nanswer", "|equal to\nvLLM's\ncache"),
    )
    for row in act.rows:
        answer, route = row.second.answer, row.second.answer.route
        equality = row.comparison.equality
        same = "same" if row.first_difference is None else f"{row.first_difference} tokens"
        where = "" if row.comparison.position is None else f" at {row.comparison.position}"
        table.add_row(
            row.second.label,
            f"{answer.pool_tokens:,}",
            f"{route.cached_tokens:,}",
            _route(row.second),
            format_s(row.first.answer.ttft_s),
            format_s(answer.ttft_s),
            f"{row.first.answer.route.kv_bytes:,}",
            f"{route.kv_bytes:,}",
            same,
            equality.styled(f"{equality}{where}"),
        )
    return table


def second_closing(act: SecondAct) -> str:
    """The conclusion of the second act in some sentences."""
    before, now = act.crossed_bytes
    same = sum(row.first_difference is None for row in act.rows)
    exact = sum(row.comparison.equality is Equality.EXACT for row in act.rows)
    longest = max(act.rows, key=lambda row: row.second.answer.prompt_tokens)
    first_s, now_s = (format_s(each.answer.ttft_s) for each in (longest.first, longest.second))
    return (
        f"After a restart of every engine the pools still had the prefixes: {format_bytes(now)} of KVCache crossed "
        f"the link in place of {format_bytes(before)}. {same} of {len(act.rows)} answers are those of the first act "
        f"token by token, {exact} those of plain vLLM after a hit in its own cache. The first token of the longest "
        f"prompt came after {now_s} in place of {first_s}."
    )


def print_outcome(out: Console, outcome: DemoOutcome) -> None:
    """Write whether answers stayed the same to a console."""
    out.print(outcome_table(outcome))
    for note in footnotes(outcome):
        out.print(note, style="dim")
    out.print()
    if outcome.writes_words:
        out.print(answers_table(outcome))
    else:
        out.print(NOISE, style="dim")
    out.print()
    out.print(closing(outcome), style="bold")
    out.print()
    if outcome.second is not None:
        out.print(second_table(outcome.second))
        out.print(SECOND_NOTE, style="dim")
        out.print()
        out.print(second_closing(outcome.second), style="bold")
        out.print()
