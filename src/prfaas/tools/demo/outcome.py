"""Findings of the demo: one row per prompt, and a conclusion.

The demo's findings for people.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from prfaas.core.deployment import Deployment
from prfaas.core.kv.hf_config import model_from_config
from prfaas.core.kv.model import KvModel
from prfaas.core.units import format_bits_per_s, format_bytes, format_s, transfer_s
from prfaas.serving.engines.tiny import tiny_config
from prfaas.tools.demo.client import DemoAnswer
from prfaas.tools.demo.compare import (
    Comparison,
    Equality,
    MovedPages,
    Pages,
    are_equal,
    compare,
    expected_bytes,
    find_pages,
)
from prfaas.tools.demo.display import demo_table
from prfaas.tools.demo.line import USED_SHARE, DemoLine
from prfaas.tools.demo.prompts import LONGEST_TOKENS, DemoPrompt
from prfaas.tools.demo.reference import ReferenceAnswer
from prfaas.tools.demo.second_act import PooledAnswer, SecondAct, second_act

_PROMPT_END_CHARS = 80


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: the answer through the gateway, and how it compares with the plain engine's.

    `plain_ttft_s`: the plain engine's time to the first token, None if not reported. `exact_bytes`: what `kvmodel`
    says must move, to the token. `paged_bytes`: the same in whole pages of the engine, None if no page size explains
    the run. `link_s`: what the moved bytes alone take on the link between the two clusters, None within a cluster.
    """

    label: str
    answer: DemoAnswer
    comparison: Comparison
    plain_ttft_s: float | None
    exact_bytes: int
    paged_bytes: int | None
    link_s: float | None
    prompt_end: str = ""
    """The prompt's last words."""

    @property
    def is_explained(self) -> bool:
        """True if the moved bytes are exactly what `kvmodel` says, or that in whole pages."""
        return self.answer.route.kv_bytes in (self.exact_bytes, self.paged_bytes)

    def to_json(self) -> dict[str, Any]:
        """The row for `prfaas demo --json`; bytes, seconds, tokens per second, nats."""
        answer, route = self.answer, self.answer.route
        return {
            "prompt": self.label,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": route.cached_tokens,
            "route": route.route,
            "ttft_s": answer.ttft_s,
            "answer": answer.text,
            "plain_ttft_s": self.plain_ttft_s,
            "kv_bytes": route.kv_bytes,
            "hidden_fraction": route.hidden_fraction,
            "equal_to_local": str(self.comparison.equality),
            "first_difference": self.comparison.position,
            "margin_nats": self.comparison.margin_nats,
            "tie_bound_nats": self.comparison.bound_nats,
            "tokens_per_s": answer.tokens_per_s,
            "kvmodel_bytes": self.exact_bytes,
            "kvmodel_paged_bytes": self.paged_bytes,
            "prefill_s": route.prefill_s,
            "transfer_s": route.transfer_s,
            "link_s": self.link_s,
            "prefill": route.prefill,
            "decode": route.decode,
            "fallback": route.fallback,
        }


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The whole run."""

    deployment: Deployment
    kv_model: KvModel
    pages: Pages | None
    rows: tuple[Row, ...]
    second: SecondAct | None = None
    """None: there was no restart."""
    line: DemoLine | None = None
    """The line that was chosen between the clusters; None: none could be."""

    @property
    def writes_words(self) -> bool:
        """True if answers can be read: tiny models have random weights."""
        source = self.deployment.model.source
        return source is None or source.kind != "tiny"

    def count(self, equality: Equality) -> int:
        """How many answers compare like this."""
        return Counter(row.comparison.equality for row in self.rows)[equality]

    @property
    def all_equal(self) -> bool:
        """No answer differs by more than a tie, and at least five of six are exact; so in the second act."""
        first = are_equal([row.comparison for row in self.rows])
        return first and (self.second is None or self.second.all_equal)

    def to_json(self) -> dict[str, Any]:
        """The document that `prfaas demo --json` writes."""
        return {
            "deployment": self.deployment.name,
            "model": self.deployment.model.served_name,
            "threshold_tokens": self.deployment.routing.threshold_tokens,
            "kv_bytes_per_token": self.kv_model.token_bytes,
            "line": None if self.line is None else self.line.to_json(),
            "requests": [row.to_json() for row in self.rows],
            "all_bytes_explained": all(row.is_explained for row in self.rows),
            "all_equal": self.all_equal,
            "second_act": None if self.second is None else self.second.to_json(),
        }


def outcome_of(
    deployment: Deployment,
    kv_model: KvModel,
    prompts: tuple[DemoPrompt, ...],
    answers: tuple[DemoAnswer, ...],
    references: tuple[ReferenceAnswer, ...],
    seconds: tuple[PooledAnswer, ...] = (),
    repeated: tuple[ReferenceAnswer, ...] = (),
    line: DemoLine | None = None,
) -> DemoOutcome:
    """Puts together what was measured; the sequences are in the same order.

    Without `seconds` there was no second act; `repeated` are the plain engine's answers to compare these with.
    """
    # The decode engine computes the last prompt token itself, so the KV of all but that one moves.
    transfers = [
        MovedPages(answer.prompt_tokens - 1, answer.route.cached_tokens, answer.route.kv_bytes)
        for answer in answers
        if answer.route.kv_bytes > 0
    ]
    pages = find_pages(kv_model, transfers) if transfers else None
    rows = []
    for prompt, answer, reference in zip(prompts, answers, references, strict=True):
        num_tokens, skip_tokens = answer.prompt_tokens - 1, answer.route.cached_tokens
        exact_bytes, paged_bytes = expected_bytes(kv_model, pages, num_tokens, skip_tokens)
        rows.append(
            Row(
                label=prompt.label,
                answer=answer,
                comparison=compare(answer.token_ids, reference.token_ids, reference.top_logits),
                plain_ttft_s=reference.ttft_s,
                exact_bytes=exact_bytes,
                paged_bytes=paged_bytes,
                link_s=_link_s(deployment, answer),
                prompt_end=prompt.text[-_PROMPT_END_CHARS:],
            )
        )
    labels = [prompt.label for prompt in prompts]
    second = second_act(kv_model, pages, labels, answers, seconds, repeated) if seconds else None
    return DemoOutcome(deployment, kv_model, pages, tuple(rows), second, line=line)


def _link_s(deployment: Deployment, answer: DemoAnswer) -> float | None:
    route = answer.route
    if route.route != "offload":
        return None
    source = deployment.instance(route.prefill).cluster
    target = deployment.instance(route.decode).cluster
    link = deployment.link(source, target)
    return transfer_s(route.kv_bytes, link.bandwidth_bits_per_s) if link else None


_HYBRID = "qwen3-next"
# That a line must carry at least, or it is no use to build a cluster at its other end.
_FEWEST_INSTANCES = 4


def outcome_table(outcome: DemoOutcome) -> Table:
    """One line per prompt, in the order in which they were sent."""
    table = demo_table(outcome.kv_model.describe())
    table.add_column("prompt")
    for heading in ("tokens", "cached"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("route")
    for heading in ("TTFT", "plain\nvLLM's", "KV bytes\nmoved", "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("kvmodel\nsays", no_wrap=True)
    table.add_column("equal", no_wrap=True)
    for row in outcome.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    answer, route = row.answer, row.answer.route
    return (
        row.label,
        f"{answer.prompt_tokens:,}",
        f"{route.cached_tokens:,}",
        f"{route.route} ({route.fallback})" if route.fallback else route.route,
        format_s(answer.ttft_s),
        "-" if row.plain_ttft_s is None else format_s(row.plain_ttft_s),
        f"{route.kv_bytes:,}",
        "-" if route.hidden_fraction is None else f"{route.hidden_fraction:.0%}",
        _explanation(row),
        row.comparison.equality.styled(row.comparison.equality),
    )


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
    crossed_bytes = sum(row.answer.route.kv_bytes for row in offloaded)
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
