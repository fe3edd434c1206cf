"""What became of one request on its way to its decode engine."""

import math
from dataclasses import dataclass

from prfaas.gateway.order import Look
from prfaas.gateway.transfers import Moved
from prfaas.scheduling import Decision, Route
from prfaas.transport.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Journey:
    """One request, ready for its decode engine.

    `ticket`/`sealed`: None when the decode engine prefills, then `own_prefill_tokens` tokens (0: not known).
    `look` and `decision`: None when the prompt was not looked at. `reason`: why this way, in one word; `fallback`:
    why an earlier prefill elsewhere failed. `prefix_bytes`: what a cache transfer before the prefill moved.
    """

    route: Route
    prefill: str
    decode: str
    reason: str
    look: Look | None = None
    decision: Decision | None = None
    own_prefill_tokens: int = 0
    ticket: Ticket | None = None
    sealed: str | None = None
    moved: Moved | None = None
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
