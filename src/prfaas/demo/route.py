"""What the gateway says about a request in its `x-prfaas-route` header."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ROUTE_HEADER = "x-prfaas-route"


@dataclass(frozen=True, slots=True)
class RouteReport:
    """`local` or `offload`, the instances, and the transfer. Times and shares are None where nothing was moved.

    `cached_tokens` were on the decode side already and did not move; `hidden_fraction` of the bytes had arrived when
    the prefill ended; `fallback` says why a prefill elsewhere failed, if one did.
    """

    route: str
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    kv_bytes: int = 0
    hidden_fraction: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    fallback: str | None = None
    other: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, header: str) -> "RouteReport":
        """From a header like `offload; prefill=east-0; decode=home-0; cached=0; bytes=6553600; hidden=0.83`.

        Raises:
            ValueError: it doesn't begin with a route, or a number in it is none.
        """
        route, *parts = (part.strip() for part in header.split(";"))
        if route not in ("local", "offload"):
            raise ValueError(f"{ROUTE_HEADER} must begin with local or offload, not {header!r}")
        fields = dict(part.split("=", 1) for part in parts if "=" in part)

        def number(name: str) -> float | None:
            return float(fields.pop(name)) if name in fields else None

        return cls(
            route=route,
            prefill=fields.pop("prefill", ""),
            decode=fields.pop("decode", ""),
            cached_tokens=int(fields.pop("cached", "0")),
            kv_bytes=int(fields.pop("bytes", "0")),
            hidden_fraction=number("hidden"),
            prefill_s=number("prefill_s"),
            transfer_s=number("transfer_s"),
            fallback=fields.pop("fallback", None),
            other=fields,
        )
