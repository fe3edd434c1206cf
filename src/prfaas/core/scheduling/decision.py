"""Where one request goes.

What routing needs to know of one request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.core.prefix.index import NOTHING, PrefixHit

__all__ = ["NOTHING", "PrefixHit", "RoutingRequest"]


# Not frozen, like `Decision`, and as little to be changed.
@dataclass(slots=True)
class RoutingRequest:
    """`num_tokens`: the whole prompt. `held`: instance name → what it holds of it; absent means nothing.

    `ordinal` counts requests in the order of their arrival: the only thing a policy may take turns by.
    """

    num_tokens: int
    held: Mapping[str, PrefixHit] = field(default_factory=dict)
    ordinal: int = 0

    def reusable_at(self, instance: str) -> int:
        """Tokens a prefill at `instance` need not compute; the last prompt token is always computed."""
        here = self.held.get(instance)
        return 0 if here is None else self._but_the_last(here.reusable_tokens)

    def attention_at(self, instance: str) -> int:
        """Tokens whose full-attention blocks `instance` holds, less the last prompt token."""
        here = self.held.get(instance)
        return 0 if here is None else self._but_the_last(here.attention_tokens)

    def _but_the_last(self, tokens: int) -> int:
        return tokens if tokens < self.num_tokens else max(self.num_tokens - 1, 0)


class Route(StrEnum):
    """`LOCAL`: prefilled inside the PD cluster (perhaps by the decode instance itself). `OFFLOAD`: by a
    PrfaaS cluster."""

    LOCAL = "local"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class CacheTransfer:
    """KV of a prompt's first `num_tokens` tokens goes from `source` to the prefill instance before it starts.

    `skip_tokens` of them are there already. Section 3.4.3: where the longer cache is not in the cluster that
    computes, and bandwidth is abundant, that cache moves first.
    """

    source: str
    num_tokens: int
    skip_tokens: int
    kv_bytes: int


# Not frozen: a frozen one takes four times as long to make, and a simulator asks for a hundred thousand a second.
@dataclass(slots=True)
class Decision:
    """One routing decision, with the numbers that decided; never changed, `replace` makes another.

    `prefill == decode` means that the decode instance prefills itself and nothing is transferred.
    `uncached_tokens`: what was compared with the threshold: what the PD cluster would have to prefill.
    `prefill_tokens`: what `prefill` has to compute. `skip_tokens`: leading tokens whose attention blocks the
    decode instance holds and that need not be sent. `threshold_tokens`: as it was then, adjustments included.
    `predicted_ttft_s`: wait, prefill and what of the transfer the prefill does not hide.
    `reason`: one word for logs and metrics. `urgency_s`: None, and the prefill goes to its instance at once, in the
    order of arrival; or the least goes first among those that wait for the cluster's instances, and `prefill` is the
    one it would get now; if `is_bound`, the only one it may get.
    """

    route: Route
    prefill: str
    decode: str
    uncached_tokens: int
    prefill_tokens: int
    skip_tokens: int
    kv_bytes: int
    reason: str
    threshold_tokens: float
    predicted_ttft_s: float
    cache_transfer: CacheTransfer | None = None
    urgency_s: float | None = None
    is_bound: bool = False

    @property
    def transfers(self) -> bool:
        """Whether KV moves from one instance to another."""
        return self.prefill != self.decode
