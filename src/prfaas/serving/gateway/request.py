"""One request as a client made it, understood.

What became of one request on its way to its decode engine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prfaas.core.prefix import PromptChains
from prfaas.core.scheduling import Decision, Route
from prfaas.serving.gateway.bodies import Json
from prfaas.serving.gateway.kv_transfers import TransferredBytes
from prfaas.serving.gateway.prompts import Endpoint, Prompt
from prfaas.serving.gateway.request_log import RequestRecord
from prfaas.serving.transport.ticket import Ticket


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """`body`: the client's, less what could steer an engine; `size_bytes`: as long as it came.

    `model`: the name that engines know, an adapter's or the base model's; `adapter`: "" for the base model.
    `samples`: how many answers are wanted. `salt`: the tenant's. `headers`: all that engines see of the client's.
    """

    endpoint: Endpoint
    body: Json
    size_bytes: int
    prompt: Prompt
    samples: int
    model: str
    adapter: str
    salt: str
    headers: Mapping[str, str]
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt in tokens. `exact`: these are the ids that the engine makes itself.

    `takes_ids`: the decode engine may be given them in place of what the client sent.
    """

    token_ids: Sequence[int]
    chains: PromptChains
    exact: bool
    takes_ids: bool


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request, ready for its decode engine.

    `ticket`/`sealed`: None when the decode engine prefills, then `own_prefill_tokens` tokens (0: not known).
    `look` and `decision`: None when the prompt was not looked at. `reason`: why this way, in one word; `fallback`:
    why an earlier prefill elsewhere failed. `prefix_bytes`: what a cache transfer before the prefill moved.
    """

    route: Route
    prefill: str
    decode: str
    reason: str
    look: TokenizedPrompt | None = None
    decision: Decision | None = None
    own_prefill_tokens: int = 0
    ticket: Ticket | None = None
    sealed: str | None = None
    moved: TransferredBytes | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    fallback: str | None = None
    prefix_source: str | None = None
    prefix_bytes: int = 0

    @property
    def uncached_tokens(self) -> int | None:
        """What the PD cluster would have to prefill; None when the prompt was not looked at."""
        return None if self.decision is None else self.decision.uncached_tokens

    def header(self) -> str:
        """The value of `x-prfaas-route`."""
        fields = [str(self.route), f"prefill={self.prefill}", f"decode={self.decode}"]
        decision, moved = self.decision, self.moved
        if decision is not None:
            fields.append(f"uncached={decision.uncached_tokens}")
        fields.append(f"cached={self.ticket.skip_tokens if self.ticket else 0}")
        fields.append(f"bytes={moved.total_bytes if moved else 0}")
        if moved is not None:
            fields.append(f"hidden={moved.hidden_fraction:.4f}")
        if self.transfer_s is not None:
            fields.append(f"transfer_s={self.transfer_s:.4f}")
        if self.prefill_s is not None:
            fields.append(f"prefill_s={self.prefill_s:.4f}")
        if decision is not None:
            fields.append(f"threshold={decision.threshold_tokens:.0f}")
            if math.isfinite(decision.predicted_ttft_s):
                fields.append(f"predicted_ttft_s={decision.predicted_ttft_s:.4f}")
        if self.prefix_source is not None:
            fields.append(f"cache_transfer={self.prefix_source}:{self.prefix_bytes}")
        if self.fallback is not None:
            fields.append(f"fallback={self.fallback}")
        fields.append(f"reason={self.reason}")
        return "; ".join(fields)
