"""What routing needs to know of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas.cache.held import NOTHING, Held

__all__ = ["NOTHING", "Held", "RoutingRequest"]


# Not frozen, like `Decision`, and as little to be changed.
@dataclass(slots=True)
class RoutingRequest:
    """`num_tokens`: the whole prompt. `held`: instance name → what it holds of it; absent means nothing.

    `ordinal` counts requests in the order of their arrival: the only thing a policy may take turns by.
    """

    num_tokens: int
    held: Mapping[str, Held] = field(default_factory=dict)
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
