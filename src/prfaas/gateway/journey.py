"""What became of one request on its way to its decode engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.gateway.transfers import Moved
from prfaas.scheduling import Route
from prfaas.transport.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Journey:
    """One request, ready for its decode engine.

    `ticket`/`sealed`: None when the decode engine prefills. `reuse_ids`: ids it may take instead of
    tokenizing. `chain`: the prompt's block hashes. `uncached_tokens`: None when the prompt was not looked at.
    `reason`: why the decode engine prefills, in one word; `fallback`: why an earlier prefill elsewhere
    failed.
    """

    route: Route
    prefill: str
    decode: str
    reason: str
    uncached_tokens: int | None = None
    skip_tokens: int = 0
    chain: tuple[int, ...] = ()
    reuse_ids: Sequence[int] | None = None
    ticket: Ticket | None = None
    sealed: str | None = None
    moved: Moved | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    fallback: str | None = None

    def header(self) -> str:
        """The value of `x-prfaas-route`."""
        fields = [str(self.route), f"prefill={self.prefill}", f"decode={self.decode}"]
        if self.uncached_tokens is not None:
            fields.append(f"uncached={self.uncached_tokens}")
        fields.append(f"cached={self.skip_tokens if self.ticket else 0}")
        moved = self.moved
        fields.append(f"bytes={moved.total_bytes if moved else 0}")
        if moved is not None:
            fields.append(f"hidden={moved.hidden_fraction:.4f}")
        if self.transfer_s is not None:
            fields.append(f"transfer_s={self.transfer_s:.4f}")
        if self.prefill_s is not None:
            fields.append(f"prefill_s={self.prefill_s:.4f}")
        if self.fallback is not None:
            fields.append(f"fallback={self.fallback}")
        fields.append(f"reason={self.reason}")
        return "; ".join(fields)
