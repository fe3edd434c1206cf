"""The `x-prfaas-route` header: what a gateway says about the way of one request. Written and read here only."""

import math
from dataclasses import dataclass

ROUTE_HEADER = "x-prfaas-route"
REQUEST_ID_HEADER = "X-Request-Id"

_ROUTES = ("local", "offload")


@dataclass(frozen=True, slots=True)
class RouteHeader:
    """One header's fields. What is None is left out of the text."""

    route: str
    """`local`: prefilled in the PD cluster. `offload`: prefilled in a PrfaaS cluster."""

    prefill: str = ""
    """Name of the instance that prefilled."""

    decode: str = ""
    """Name of the instance that decoded."""

    uncached_tokens: int | None = None
    """What the PD cluster would have had to prefill; None when the prompt was not looked at."""

    cached_tokens: int = 0
    """Tokens whose KVCache was on the decode side already, so that it did not move."""

    kv_bytes: int = 0
    """KVCache that moved to the decode instance."""

    hidden_fraction: float | None = None
    """Share of `kv_bytes` that had arrived when the prefill ended; None when nothing moved."""

    transfer_s: float | None = None
    """From the prefill's start to the last byte."""

    prefill_s: float | None = None
    """From the prefill's start to its answer."""

    threshold_tokens: float | None = None
    """Above so many uncached tokens the PD cluster offloaded at that moment; infinite: never."""

    predicted_ttft_s: float | None = None
    """What the scheduler expected; left out of the text when it is not finite."""

    prefix_source: str | None = None
    """The instance whose cached prefix moved to the prefill instance first."""

    prefix_bytes: int = 0
    """Bytes of that prefix."""

    transfer: str | None = None
    """`nixl`: vLLM's NIXL connector moved the KVCache; None: our own transport, or nothing moved."""

    first_token: str | None = None
    """`prefill`: who prefilled has sampled the answer's first token; None: who decoded."""

    fallback: str | None = None
    """Why an earlier prefill elsewhere failed, in one word."""

    reason: str | None = None
    """Why the request went this way, in one word."""

    def encode(self) -> str:
        """The header's value: the route, then `name=value` for each field, with "; " between them."""
        parts = [self.route, f"prefill={self.prefill}", f"decode={self.decode}"]
        if self.uncached_tokens is not None:
            parts.append(f"uncached={self.uncached_tokens}")
        parts.append(f"cached={self.cached_tokens}")
        # With an early first token it leaves before anybody knows.
        if self.first_token is None or self.kv_bytes:
            parts.append(f"bytes={self.kv_bytes}")
        if self.hidden_fraction is not None:
            parts.append(f"hidden={self.hidden_fraction:.4f}")
        if self.transfer_s is not None:
            parts.append(f"transfer_s={self.transfer_s:.4f}")
        if self.prefill_s is not None:
            parts.append(f"prefill_s={self.prefill_s:.4f}")
        if self.threshold_tokens is not None:
            parts.append(f"threshold={self.threshold_tokens:.0f}")
        if self.predicted_ttft_s is not None and math.isfinite(self.predicted_ttft_s):
            parts.append(f"predicted_ttft_s={self.predicted_ttft_s:.4f}")
        if self.prefix_source is not None:
            parts.append(f"cache_transfer={self.prefix_source}:{self.prefix_bytes}")
        if self.transfer is not None:
            parts.append(f"transfer={self.transfer}")
        if self.first_token is not None:
            parts.append(f"first_token={self.first_token}")
        if self.fallback is not None:
            parts.append(f"fallback={self.fallback}")
        if self.reason is not None:
            parts.append(f"reason={self.reason}")
        return "; ".join(parts)

    def without_details(self) -> str:
        """The route, its reason and whose the first token is: nothing that depends on what others have sent."""
        told = {"first_token": self.first_token, "reason": self.reason}
        return "; ".join((self.route, *(f"{name}={word}" for name, word in told.items() if word is not None)))

    @classmethod
    def parse(cls, text: str) -> "RouteHeader":
        """The reverse of `encode`, for a header in which any field but the route may be missing.

        Raises:
            ValueError: the text doesn't begin with a route, or a number in it is none.
        """
        route, fields = split_route(text)
        if route not in _ROUTES:
            raise ValueError(f"{ROUTE_HEADER} must begin with local or offload, not {text!r}")

        def number(name: str) -> float | None:
            return float(fields[name]) if name in fields else None

        prefix_source, _, prefix_bytes = fields.get("cache_transfer", "").rpartition(":")
        return cls(
            route=route,
            prefill=fields.get("prefill", ""),
            decode=fields.get("decode", ""),
            uncached_tokens=int(fields["uncached"]) if "uncached" in fields else None,
            cached_tokens=int(fields.get("cached", "0")),
            kv_bytes=int(fields.get("bytes", "0")),
            hidden_fraction=number("hidden"),
            transfer_s=number("transfer_s"),
            prefill_s=number("prefill_s"),
            threshold_tokens=number("threshold"),
            predicted_ttft_s=number("predicted_ttft_s"),
            prefix_source=prefix_source or None,
            prefix_bytes=int(prefix_bytes or "0"),
            transfer=fields.get("transfer"),
            first_token=fields.get("first_token"),
            fallback=fields.get("fallback"),
            reason=fields.get("reason"),
        )


def split_route(text: str) -> tuple[str, dict[str, str]]:
    """A header's route and its fields as text, unchecked; "" and no fields for a server that sends none."""
    route, *parts = (part.strip() for part in text.split(";"))
    return route, dict(part.split("=", 1) for part in parts if "=" in part)
