"""The demo's second act: all engines were killed and started again, the pools were not; the same prompts again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from prfaas.core.kv.model import KvModel
from prfaas.core.units import format_bytes, format_s
from prfaas.tools.demo.client import DemoAnswer
from prfaas.tools.demo.compare import Comparison, Equality, Pages, are_equal, compare, expected_bytes
from prfaas.tools.demo.display import demo_table
from prfaas.tools.demo.reference import ReferenceAnswer


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """An answer of the second act, and what the pools gave for it."""

    answer: DemoAnswer
    pool_tokens: int
    """That engines loaded from pools, on the prefill and the decode side together."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """One prompt, asked before and after the engines were killed."""

    label: str
    first: DemoAnswer
    second: PooledAnswer
    first_difference: int | None
    """From which token on the two answers differ; None: they are the same."""
    comparison: Comparison
    """With the plain engine's answer from its own cache, which splits the prompt alike; exact without a difference."""
    is_explained: bool
    """The bytes that moved the second time are what `kvmodel` says, to the token or in whole pages."""

    def to_json(self) -> dict[str, Any]:
        """The row for `prfaas demo --json`; bytes, seconds, tokens."""
        answer, route = self.second.answer, self.second.answer.route
        return {
            "prompt": self.label,
            "prompt_tokens": answer.prompt_tokens,
            "pool_tokens": self.second.pool_tokens,
            "cached_tokens": route.cached_tokens,
            "route": route.route,
            "fallback": route.fallback,
            "ttft_s": answer.ttft_s,
            "first_ttft_s": self.first.ttft_s,
            "kv_bytes": route.kv_bytes,
            "first_kv_bytes": self.first.route.kv_bytes,
            "bytes_explained": self.is_explained,
            "equal_to_first": self.first_difference is None,
            "first_difference": self.first_difference,
            "equal_to_local": str(self.comparison.equality),
            "margin_nats": self.comparison.margin_nats,
        }


@dataclass(frozen=True, slots=True)
class SecondAct:
    """All prompts again."""

    rows: tuple[Repetition, ...]

    @property
    def all_equal(self) -> bool:
        """No answer differs by more than a tie from plain vLLM's after a hit, and at least five of six are exact."""
        return are_equal([row.comparison for row in self.rows])

    @property
    def crossed_bytes(self) -> tuple[int, int]:
        """KVCache that crossed the link between the clusters, in the first act and in this one."""
        firsts = (row.first.route for row in self.rows)
        seconds = (row.second.answer.route for row in self.rows)
        before, now = (
            sum(route.kv_bytes for route in routes if route.route == "offload")
            for routes in (firsts, seconds)
        )
        return before, now

    def to_json(self) -> dict[str, Any]:
        """Its part of the document that `prfaas demo --json` writes."""
        before, now = self.crossed_bytes
        return {
            "requests": [row.to_json() for row in self.rows],
            "first_crossed_bytes": before,
            "crossed_bytes": now,
            "all_bytes_explained": all(row.is_explained for row in self.rows),
            "all_equal": self.all_equal,
        }


def second_act(
    kv_model: KvModel,
    pages: Pages | None,
    labels: Sequence[str],
    firsts: Sequence[DemoAnswer],
    seconds: Sequence[PooledAnswer],
    references: Sequence[ReferenceAnswer],
) -> SecondAct:
    """Puts together what was measured; the sequences are in the same order."""
    rows = []
    for label, first, second, reference in zip(labels, firsts, seconds, references, strict=True):
        difference = _first_difference(first.token_ids, second.answer.token_ids)
        compared = compare(second.answer.token_ids, reference.token_ids, reference.top_logits)
        if difference is None:
            compared = Comparison(Equality.EXACT)
        answer, route = second.answer, second.answer.route
        expected = expected_bytes(kv_model, pages, answer.prompt_tokens - 1, route.cached_tokens)
        explained = route.kv_bytes in (0, *expected)
        rows.append(Repetition(label, first, second, difference, compared, is_explained=explained))
    return SecondAct(tuple(rows))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((position for position, (a, b) in pairs if a != b), None)


SECOND_NOTE = (
    "first answer: the same, or how many tokens are. equal: against a plain vLLM that has the prompt in its own cache; "
    "at: the first token that differs."
)
"""What the columns of `second_table` mean."""


def second_table(act: SecondAct) -> Table:
    """One line per prompt, each beside what it was in the first act."""
    table = demo_table("The same prompts, after all engines were killed and started again")
    table.add_column("prompt")
    for heading in ("from\npools", "cached"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("route")
    for heading in ("TTFT\nbefore", "now", "KV bytes\nbefore", "now", "first\nanswer"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("equal to\nvLLM's\ncache", no_wrap=True)
    for row in act.rows:
        answer, route = row.second.answer, row.second.answer.route
        equality = row.comparison.equality
        same = "same" if row.first_difference is None else f"{row.first_difference} tokens"
        where = "" if row.comparison.position is None else f" at {row.comparison.position}"
        table.add_row(
            row.label,
            f"{row.second.pool_tokens:,}",
            f"{route.cached_tokens:,}",
            f"{route.route} ({route.fallback})" if route.fallback else route.route,
            format_s(row.first.ttft_s),
            format_s(answer.ttft_s),
            f"{row.first.route.kv_bytes:,}",
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
    first_s, now_s = format_s(longest.first.ttft_s), format_s(longest.second.answer.ttft_s)
    return (
        f"After a restart of every engine the pools still had the prefixes: {format_bytes(now)} of KVCache crossed "
        f"the link in place of {format_bytes(before)}. {same} of {len(act.rows)} answers are those of the first act "
        f"token by token, {exact} those of plain vLLM after a hit in its own cache. The first token of the longest "
        f"prompt came after {now_s} in place of {first_s}."
    )
