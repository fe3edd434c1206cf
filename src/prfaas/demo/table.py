"""The demo's findings for people."""

from rich import box
from rich.table import Table

from prfaas.demo.compare import Comparison, Equality
from prfaas.demo.outcome import Outcome, Row
from prfaas.engines.tiny import tiny_config
from prfaas.kvmodel import model_from_config
from prfaas.units import format_bits_per_s, format_bytes, format_s, transfer_s

_HYBRID = "qwen3-next"
_STYLES = {Equality.EXACT: "green", Equality.TIE: "yellow", Equality.NO: "bold red"}
_EXPLAINED_STYLE = {True: "", False: "bold red"}


def outcome_table(outcome: Outcome) -> Table:
    """One line per prompt, in the order in which they were sent."""
    table = Table(box=box.SIMPLE_HEAD, title=outcome.kv_model.describe())
    table.add_column("prompt")
    for heading in ("tokens", "cached"):
        table.add_column(heading, justify="right")
    table.add_column("route")
    for heading in (
        "TTFT",
        "KV bytes\nmoved",
        "kvmodel,\nto the token",
        "kvmodel,\nwhole pages",
        "hidden",
        "tokens/s",
    ):
        table.add_column(heading, justify="right")
    table.add_column("equal to plain vLLM", no_wrap=True)
    for row in outcome.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    answer, route = row.answer, row.answer.route
    style = _EXPLAINED_STYLE[row.is_explained]
    moved = f"{route.kv_bytes:,}"
    return (
        row.label,
        f"{answer.prompt_tokens:,}",
        f"{route.cached_tokens:,}",
        f"{route.route} ({route.fallback})" if route.fallback else route.route,
        format_s(answer.ttft_s),
        f"[{style}]{moved}[/]" if style else moved,
        f"{row.exact_bytes:,}",
        "-" if row.paged_bytes is None else f"{row.paged_bytes:,}",
        "-" if route.hidden_fraction is None else f"{route.hidden_fraction:.0%}",
        "-" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.0f}",
        f"[{_STYLES[row.comparison.equality]}]{_equality(row.comparison)}[/]",
    )


def _equality(comparison: Comparison) -> str:
    if comparison.equality is Equality.EXACT:
        return "exact"
    margin = "not among the likeliest"
    if comparison.margin_nats is not None and comparison.bound_nats is not None:
        margin = f"{comparison.margin_nats:.3f} nat, bound {comparison.bound_nats:.3f}"
    return f"{comparison.equality} at token {comparison.position} ({margin})"


def footnotes(outcome: Outcome) -> list[str]:
    """What the columns mean, in sentences."""
    notes = [
        "cached: tokens that the decode engine already held, so that their KV did not move again. hidden: share of "
        "the bytes that had arrived when the prefill ended.",
        "equal: the greedy answer against one plain vLLM engine with the same split of the prompt. A tie is a first "
        "difference between two tokens whose reference logits are at most two steps of bf16 apart, at their own "
        "magnitude (from 8 to 16 a step is 0.0625 nat, from 16 to 32 it is 0.125): each may be rounded one step off.",
    ]
    if outcome.pages is not None:
        pages = outcome.pages
        sizes = f"{pages.full_tokens} tokens"
        if pages.window_tokens != pages.full_tokens:
            sizes += f" (full attention) and {pages.window_tokens} tokens (sliding window)"
        notes.append(
            f"whole pages: engines move pages of {sizes}; with that, kvmodel gives every row's bytes exactly."
        )
    else:
        notes.append("whole pages: no page size of the engine explains the moved bytes of all rows.")
    return notes


def closing(outcome: Outcome) -> str:
    """What was shown, in one or two sentences."""
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
        f"being prefilled. {equal}."
    )
    return shown if outcome.kv_model.is_hybrid else f"{shown} {_dense(outcome, longest)}"


def _dense(outcome: Outcome, longest: Row) -> str:
    """Why a model whose layers all keep every token should prefill at home."""
    hybrid = model_from_config(tiny_config(_HYBRID), name=_HYBRID)
    ratio = outcome.kv_model.token_bytes / hybrid.token_bytes
    sentence = (
        f"This model is dense: {outcome.kv_model.token_bytes:,} B of KV per token, {ratio:.0f} times the "
        f"{hybrid.token_bytes:,} B of {_HYBRID}"
    )
    route = longest.answer.route
    deployment = outcome.deployment
    link = deployment.link(
        deployment.instance(route.prefill).cluster, deployment.instance(route.decode).cluster
    )
    if link is None or route.prefill_s is None:
        return f"{sentence}."
    needs_s = transfer_s(longest.exact_bytes, link.bandwidth_bits_per_s)
    hybrid_s = transfer_s(hybrid.bytes_to_move(longest.answer.prompt_tokens - 1), link.bandwidth_bits_per_s)
    judgement = "it should stay home" if needs_s > route.prefill_s else "this link can carry it"
    rate = format_bits_per_s(link.bandwidth_bits_per_s)
    return (
        f"{sentence}. The longest prompt needs {format_s(needs_s)} of the {rate} link "
        f"({_HYBRID}: {format_s(hybrid_s)}), its prefill {format_s(route.prefill_s)}: {judgement}."
    )
