"""What became of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROUTE_HEADER = "x-prfaas-route"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds since the beginning of the replay; None where it never came to that.

    `arrival_s`: when the request was due; `sent_s`: when it was sent. `input_tokens`, `output_tokens`: what it
    asked for; `answered_tokens` and `cached_tokens` (of the prompt) as the server counts them, None if it
    doesn't. `route` and `route_fields`: what `x-prfaas-route` says, empty for other servers. `error`: why there
    was no whole answer, None if there was.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    answered_tokens: int | None = None
    cached_tokens: int | None = None
    status: int | None = None
    request_id: str = ""
    route: str = ""
    route_fields: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_lost(self) -> bool:
        """True without a whole answer."""
        return self.error is not None

    @property
    def behind_s(self) -> float | None:
        """How late it was sent."""
        return None if self.sent_s is None else self.sent_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """From when it was due, as its user would count, to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first."""
        if self.first_token_s is None or self.last_token_s is None or (self.answered_tokens or 0) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / ((self.answered_tokens or 0) - 1)

    @property
    def e2e_s(self) -> float | None:
        """From when it was due to the end of the answer; None if it is lost."""
        return None if self.ended_s is None or self.is_lost else self.ended_s - self.arrival_s

    def to_json(self) -> dict[str, Any]:
        """One line of a file of records."""
        return {
            "index": self.index,
            "arrival_s": self.arrival_s,
            "sent_s": self.sent_s,
            "first_token_s": self.first_token_s,
            "last_token_s": self.last_token_s,
            "ended_s": self.ended_s,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "answered_tokens": self.answered_tokens,
            "cached_tokens": self.cached_tokens,
            "status": self.status,
            "request_id": self.request_id,
            "route": self.route,
            "route_fields": dict(self.route_fields),
            "error": self.error,
        }


def parse_route(header: str) -> tuple[str, dict[str, str]]:
    """`offload; prefill=east-0; bytes=6553600` → the route and its fields; "" and none without a header."""
    route, *parts = (part.strip() for part in header.split(";"))
    return route, dict(part.split("=", 1) for part in parts if "=" in part)
