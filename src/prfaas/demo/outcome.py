"""What the demo found: one row per prompt, and what all of them together say."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from prfaas.demo.client import Answer
from prfaas.demo.compare import Comparison, Equality, compare
from prfaas.demo.pages import Moved, Pages, find_pages
from prfaas.demo.prompts import DemoPrompt
from prfaas.demo.reference import ReferenceAnswer
from prfaas.deployment import Deployment
from prfaas.kvmodel import KvModel
from prfaas.units import transfer_s

# At most one answer in six may end in a tie, and none may differ for another reason.
_EXACT_OF = (5, 6)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: the answer through the gateway, and how it compares with the plain engine's.

    `exact_bytes`: what `kvmodel` says must move, to the token. `paged_bytes`: the same in whole pages of the engine,
    None if no page size explains the run. `link_s`: what the moved bytes alone take on the link between the two
    clusters, None within a cluster.
    """

    label: str
    answer: Answer
    comparison: Comparison
    exact_bytes: int
    paged_bytes: int | None
    link_s: float | None

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
class Outcome:
    """The whole run."""

    deployment: Deployment
    kv_model: KvModel
    pages: Pages | None
    rows: tuple[Row, ...]

    def count(self, equality: Equality) -> int:
        """How many answers compare like this."""
        return Counter(row.comparison.equality for row in self.rows)[equality]

    @property
    def all_equal(self) -> bool:
        """No answer differs by more than a tie, and at least five of six are exact."""
        exact, of = _EXACT_OF
        return self.count(Equality.NO) == 0 and self.count(Equality.EXACT) * of >= len(self.rows) * exact

    def to_json(self) -> dict[str, Any]:
        """The document that `prfaas demo --json` writes."""
        return {
            "deployment": self.deployment.name,
            "model": self.deployment.model.served_name,
            "threshold_tokens": self.deployment.routing.threshold_tokens,
            "kv_bytes_per_token": self.kv_model.token_bytes,
            "requests": [row.to_json() for row in self.rows],
            "all_bytes_explained": all(row.is_explained for row in self.rows),
            "all_equal": self.all_equal,
        }


def outcome_of(
    deployment: Deployment,
    kv_model: KvModel,
    prompts: tuple[DemoPrompt, ...],
    answers: tuple[Answer, ...],
    references: tuple[ReferenceAnswer, ...],
) -> Outcome:
    """Puts together what was measured; the three sequences are in the same order."""
    # The decode engine computes the last prompt token itself, so the KV of all but that one moves.
    transfers = [
        Moved(answer.prompt_tokens - 1, answer.route.cached_tokens, answer.route.kv_bytes)
        for answer in answers
        if answer.route.kv_bytes > 0
    ]
    pages = find_pages(kv_model, transfers) if transfers else None
    rows = []
    for prompt, answer, reference in zip(prompts, answers, references, strict=True):
        num_tokens, skip_tokens = answer.prompt_tokens - 1, answer.route.cached_tokens
        paged_bytes = pages.bytes_to_move(kv_model, num_tokens, skip_tokens) if pages else None
        rows.append(
            Row(
                label=prompt.label,
                answer=answer,
                comparison=compare(answer.token_ids, reference.token_ids, reference.top_logits),
                exact_bytes=kv_model.bytes_to_move(num_tokens, skip_tokens),
                paged_bytes=paged_bytes,
                link_s=_link_s(deployment, answer),
            )
        )
    return Outcome(deployment, kv_model, pages, tuple(rows))


def _link_s(deployment: Deployment, answer: Answer) -> float | None:
    route = answer.route
    if route.route != "offload":
        return None
    source = deployment.instance(route.prefill).cluster
    target = deployment.instance(route.decode).cluster
    link = deployment.link(source, target)
    return transfer_s(route.kv_bytes, link.bandwidth_bits_per_s) if link else None
