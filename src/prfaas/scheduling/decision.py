"""Where one request goes."""

from dataclasses import dataclass
from enum import StrEnum


class Route(StrEnum):
    """`LOCAL`: prefilled inside the PD cluster (perhaps by the decode instance itself). `OFFLOAD`: by a
    PrfaaS cluster."""

    LOCAL = "local"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Decision:
    """One routing decision.

    `prefill == decode` means that the decode instance prefills itself and nothing is transferred.
    `uncached_tokens`: what the PD cluster would have to prefill, the number compared with the threshold.
    `skip_tokens`: leading tokens whose attention blocks the decode instance holds and need not be sent.
    `reason`: one word for logs and metrics.
    """

    route: Route
    prefill: str
    decode: str
    uncached_tokens: int
    skip_tokens: int
    reason: str

    @property
    def transfers(self) -> bool:
        """Whether KV moves from one instance to another."""
        return self.prefill != self.decode
