"""Findings of the demo: a row per prompt and act, and what they say together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.core.deployment import Deployment
from prfaas.core.kv.model import KvModel
from prfaas.core.units import transfer_s
from prfaas.tools.demo.client import DemoAnswer
from prfaas.tools.demo.compare import Comparison, Equality, Pages, are_equal, compare, find_pages
from prfaas.tools.demo.line import DemoLine
from prfaas.tools.demo.prompts import DemoPrompt
from prfaas.tools.demo.reference import ReferenceAnswer

_PROMPT_END_CHARS = 80


@dataclass(frozen=True, slots=True)
class ActAnswers:
    """All prompts once: the answers through the gateway, and the plain engine's that each is compared with."""

    answers: Sequence[DemoAnswer]
    references: Sequence[ReferenceAnswer]


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

    @property
    def crossed_bytes(self) -> int:
        """KVCache that crossed the link between the clusters."""
        route = self.answer.route
        return route.kv_bytes if route.route == "offload" else 0

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
class Repetition:
    """One prompt of the second act: asked before all engines were killed and started again, and after."""

    first: Row
    second: Row

    @property
    def first_difference(self) -> int | None:
        """From which token on the two answers differ; None: they are the same."""
        pairs = enumerate(zip(self.first.answer.token_ids, self.second.answer.token_ids, strict=True))
        return next((position for position, (a, b) in pairs if a != b), None)

    @property
    def comparison(self) -> Comparison:
        """With the plain engine's answer from its own cache, split alike; exact where the first act's is the same."""
        return Comparison(Equality.EXACT) if self.first_difference is None else self.second.comparison

    @property
    def is_explained(self) -> bool:
        """The bytes that moved the second time are what `kvmodel` says, to the token or in whole pages, or none."""
        return self.second.answer.route.kv_bytes == 0 or self.second.is_explained

    def to_json(self) -> dict[str, Any]:
        """The row for `prfaas demo --json`; bytes, seconds, tokens."""
        row = self.second.to_json()
        same = ("prompt", "prompt_tokens", "cached_tokens", "route", "fallback", "ttft_s", "kv_bytes")
        return {key: row[key] for key in same} | {
            "pool_tokens": self.second.answer.pool_tokens,
            "first_ttft_s": self.first.answer.ttft_s,
            "first_kv_bytes": self.first.answer.route.kv_bytes,
            "bytes_explained": self.is_explained,
            "equal_to_first": self.first_difference is None,
            "first_difference": self.first_difference,
            "equal_to_local": str(self.comparison.equality),
            "margin_nats": self.comparison.margin_nats,
        }


@dataclass(frozen=True, slots=True)
class SecondAct:
    """All prompts again; the pools, which were not killed, still have their prefixes."""

    rows: tuple[Repetition, ...]

    @property
    def all_equal(self) -> bool:
        """No answer differs by more than a tie from plain vLLM's after a hit, and at least five of six are exact."""
        return are_equal([row.comparison for row in self.rows])

    @property
    def crossed_bytes(self) -> tuple[int, int]:
        """KVCache that crossed the link between the clusters, in the first act and in this one."""
        return sum(row.first.crossed_bytes for row in self.rows), sum(
            row.second.crossed_bytes for row in self.rows
        )

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
    prompts: Sequence[DemoPrompt],
    first: ActAnswers,
    second: ActAnswers | None = None,
    *,
    line: DemoLine | None = None,
) -> DemoOutcome:
    """Puts together what was measured; the acts are in the order of the prompts. `second`: after a restart, if any."""
    transfers = [answer.moved for answer in first.answers if answer.route.kv_bytes > 0]
    pages = find_pages(kv_model, transfers) if transfers else None

    def row(prompt: DemoPrompt, answer: DemoAnswer, reference: ReferenceAnswer) -> Row:
        moved = answer.moved
        asked = moved.num_tokens, moved.skip_tokens
        return Row(
            label=prompt.label,
            answer=answer,
            comparison=compare(answer.token_ids, reference.token_ids, reference.top_logits),
            plain_ttft_s=reference.ttft_s,
            exact_bytes=kv_model.bytes_to_move(*asked),
            paged_bytes=None if pages is None else pages.bytes_to_move(kv_model, *asked),
            link_s=_link_s(deployment, answer),
            prompt_end=prompt.text[-_PROMPT_END_CHARS:],
        )

    rows, again = (
        tuple(row(*each) for each in zip(prompts, act.answers, act.references, strict=True)) if act else ()
        for act in (first, second)
    )
    repeated = None if second is None else SecondAct(tuple(map(Repetition, rows, again)))
    return DemoOutcome(deployment, kv_model, pages, rows, repeated, line=line)


def _link_s(deployment: Deployment, answer: DemoAnswer) -> float | None:
    route = answer.route
    if route.route != "offload":
        return None
    source = deployment.instance(route.prefill).cluster
    target = deployment.instance(route.decode).cluster
    link = deployment.link(source, target)
    return transfer_s(route.kv_bytes, link.bandwidth_bits_per_s) if link else None
