"""Counters of a gateway between two moments: requests, bytes and times of each route."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from prfaas.core.units import format_bytes, format_s

_PREFIX = "prfaas_gateway_"
_ROUTES = ("local", "offload")

Series = tuple[str, frozenset[tuple[str, str]]]


class CountsError(Exception):
    """Two readings can't be compared."""


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """All counters of a gateway at one moment."""

    values: Mapping[Series, float]

    @classmethod
    def of(cls, text: str) -> "GatewayReading":
        """From what `GET /metrics` on the operators' port answers. ValueError: no such text."""
        from prometheus_client.parser import text_string_to_metric_families

        return cls(
            {
                (sample.name.removeprefix(_PREFIX), frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name.startswith(_PREFIX)
            }
        )


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """One route's requests. Means are None where there was nothing to take the mean of."""

    route: str
    requests: int
    uncached_tokens: int
    kv_bytes: int
    """KVCache that moved to decode instances."""
    hidden_fraction: float | None
    """Share of it that had arrived when the prefill ended."""
    ttft_s: float | None
    """Mean, from the request's arrival at the gateway to the answer's first byte."""
    prefill_s: float | None
    transfer_s: float | None
    """Mean, from the prefill's start to the last byte."""

    def to_json(self) -> dict[str, Any]:
        """Seconds, tokens, bytes."""
        return {
            "requests": self.requests,
            "uncached_tokens": self.uncached_tokens,
            "kv_bytes": self.kv_bytes,
            "hidden_fraction": self.hidden_fraction,
            "mean_ttft_s": self.ttft_s,
            "mean_prefill_s": self.prefill_s,
            "mean_transfer_s": self.transfer_s,
        }


@dataclass(frozen=True, slots=True)
class GatewayCounts:
    """Counts between two readings."""

    routes: tuple[RouteCounts, ...]
    """Those that had requests."""
    fallbacks: Mapping[str, int]
    """Failed prefills elsewhere, by reason."""
    refused: Mapping[str, int]
    """Requests that were refused, by reason."""

    @property
    def requests(self) -> int:
        """Of all routes."""
        return sum(route.requests for route in self.routes)

    def to_json(self) -> dict[str, Any]:
        """Seconds, tokens, bytes."""
        return {
            "routes": {route.route: route.to_json() for route in self.routes},
            "fallbacks": dict(self.fallbacks),
            "refused": dict(self.refused),
        }


def counts_between(before: GatewayReading, after: GatewayReading) -> GatewayCounts:
    """Count from one reading to the next.

    Raises:
        CountsError: a counter went back: the gateway was started again in between.
    """
    grown: dict[Series, float] = {}
    for series, value in after.values.items():
        name = series[0]
        if not name.endswith(("_total", "_sum", "_count")):
            continue
        grown[series] = value - before.values.get(series, 0.0)
        if grown[series] < 0:
            raise CountsError(
                "the gateway was started again during the test, and its counters with it; repeat the test"
            )
    routes = (_route(name, grown) for name in _ROUTES)
    return GatewayCounts(
        tuple(route for route in routes if route.requests),
        _by_reason(grown, "fallbacks_total"),
        _by_reason(grown, "refused_total"),
    )


def _route(route: str, grown: Mapping[Series, float]) -> RouteCounts:
    def total(name: str) -> float:
        return sum(
            value for (each, labels), value in grown.items() if each == name and ("route", route) in labels
        )

    def mean(name: str) -> float | None:
        count = total(f"{name}_count")
        return total(f"{name}_sum") / count if count else None

    moved = total("transferred_bytes_total")
    return RouteCounts(
        route=route,
        requests=round(total("requests_total")),
        uncached_tokens=round(total("uncached_tokens_total")),
        kv_bytes=round(moved),
        hidden_fraction=total("hidden_bytes_total") / moved if moved else None,
        ttft_s=mean("ttft_seconds"),
        prefill_s=mean("prefill_seconds"),
        transfer_s=mean("transfer_seconds"),
    )


def _by_reason(grown: Mapping[Series, float], name: str) -> dict[str, int]:
    return {
        dict(labels)["reason"]: round(value)
        for (each, labels), value in sorted(grown.items(), key=lambda item: -item[1])
        if each == name and value
    }


def counts_table(counts: GatewayCounts) -> Table:
    """A line for each route."""
    table = Table(title="what the gateway counted meanwhile", title_justify="left")
    table.add_column("route")
    for heading in (
        "requests", "uncached\ntokens", "mean\nTTFT", "mean\nprefill", "until the\nlast byte", "KV moved", "hidden"
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for route in counts.routes:
        table.add_row(
            route.route,
            f"{route.requests:,}",
            f"{route.uncached_tokens:,}",
            _seconds(route.ttft_s),
            _seconds(route.prefill_s),
            _seconds(route.transfer_s),
            format_bytes(route.kv_bytes),
            "–" if route.hidden_fraction is None else f"{route.hidden_fraction:.0%}",
        )
    return table


def counts_notes(counts: GatewayCounts, sent: int) -> Iterator[str]:
    """Sentences under the table.

    Args:
        counts: What the gateway counted.
        sent: Requests that the test reports as sent.
    """
    if counts.requests > sent:
        yield f"{counts.requests - sent} requests were others' or warm-up; the table counts them too"
    for reason, count in counts.fallbacks.items():
        yield f"{count} prefills elsewhere failed ({reason}) and were done by the PD cluster"
    for reason, count in counts.refused.items():
        yield f"{count} requests were refused ({reason})"


def _seconds(value: float | None) -> str:
    return "–" if value is None else format_s(value)
