"""Findings of the demo: a row per prompt, and what they say together."""

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
class DemoOutcome:
    """The whole run."""

    deployment: Deployment
    kv_model: KvModel
    pages: Pages | None
    rows: tuple[Row, ...]
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
        """No answer differs by more than a tie, and at least five of six are exact."""
        return are_equal([row.comparison for row in self.rows])

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
        }


def outcome_of(
    deployment: Deployment,
    kv_model: KvModel,
    prompts: Sequence[DemoPrompt],
    answers: Sequence[DemoAnswer],
    references: Sequence[ReferenceAnswer],
    *,
    line: DemoLine | None = None,
) -> DemoOutcome:
    """Puts together what was measured, in the order of the prompts.

    Args:
        deployment: that was asked.
        kv_model: of its model.
        prompts: that were sent.
        answers: through the gateway.
        references: the plain engine's, that each is compared with.
        line: that was chosen between the clusters.
    """
    transfers = [answer.moved for answer in answers if answer.route.kv_bytes > 0]
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

    rows = tuple(row(*each) for each in zip(prompts, answers, references, strict=True))
    return DemoOutcome(deployment, kv_model, pages, rows, line)


def _link_s(deployment: Deployment, answer: DemoAnswer) -> float | None:
    route = answer.route
    if route.route != "offload":
        return None
    source = deployment.instance(route.prefill).cluster
    target = deployment.instance(route.decode).cluster
    link = deployment.link(source, target)
    return transfer_s(route.kv_bytes, link.bandwidth_bits_per_s) if link else None
