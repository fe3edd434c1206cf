"""What routing needs to know of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """`num_tokens`: the whole prompt. `prefix_tokens`: instance name → tokens of this prompt it is believed
    to hold."""

    num_tokens: int
    prefix_tokens: Mapping[str, int] = field(default_factory=dict)

    def prefix_at(self, instance: str) -> int:
        """Tokens held by `instance`, never more than can be skipped: the last prompt token is always
        computed."""
        return min(self.prefix_tokens.get(instance, 0), max(self.num_tokens - 1, 0))
