"""Results of a replay, as numbers and for people."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from prfaas.core.units import format_bytes, format_s
from prfaas.tools.replay.client import ReplayedRequest, Target

BEHIND_S = 0.05
"""A request that is sent so much later than it was due counts as behind."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of some times in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Percentiles | None":
        """Of those that are known; None if none is."""
        known = np.array([value for value in values if value is not None])
        if not len(known):
            return None
        p50, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
        return cls(float(known.mean()), p50, p90, p99, float(known.max()))

    def to_json(self) -> dict[str, float]:
        """Seconds by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """`records` in the order of arrival. `started_at_s` is Unix time, `duration_s` lasts to the last answer.

    `waited` requests found `max_connections` others open: the replay was no open loop then.
    """

    target: Target
    started_at_s: float
    duration_s: float
    records: tuple[ReplayedRequest, ...]
    waited: int

    @property
    def whole(self) -> list[ReplayedRequest]:
        """Records of requests with a whole answer."""
        return [record for record in self.records if not record.is_lost]

    @property
    def lost(self) -> int:
        """Requests without one."""
        return len(self.records) - len(self.whole)

    @property
    def offered_per_s(self) -> float:
        """Requests per second that were due, up to the last arrival; 0 for a single moment."""
        span_s = max((record.arrival_s for record in self.records), default=0.0)
        return len(self.records) / span_s if span_s > 0 else 0.0

    @property
    def behind(self) -> int:
        """Requests that were sent late: this machine was too busy, or too many were open."""
        return sum((record.behind_s or 0.0) > BEHIND_S for record in self.records)

    @property
    def max_behind_s(self) -> float:
        """How late the latest was."""
        return max((record.behind_s or 0.0 for record in self.records), default=0.0)

    @property
    def errors(self) -> "Counter[str]":
        """How often each reason of a loss occurred."""
        return Counter(record.error for record in self.records if record.error is not None)

    def per_s(self, amount: float) -> float:
        """Something per second of the whole replay."""
        return amount / self.duration_s if self.duration_s > 0 else 0.0

    def by_route(self) -> dict[str, tuple[ReplayedRequest, ...]]:
        """Records by the route that the gateway reported, most frequent first."""
        counts = Counter(record.route for record in self.records if record.route)
        return {
            route: tuple(record for record in self.records if record.route == route)
            for route, _ in counts.most_common()
        }

    def to_json(self) -> dict[str, Any]:
        """The document that `prfaas replay --json` prints; seconds, tokens, bytes."""
        whole = self.whole
        return {
            "url": self.target.url,
            "model": self.target.model,
            "started_at_s": self.started_at_s,
            "duration_s": self.duration_s,
            "requests": len(self.records),
            "lost": self.lost,
            "errors": dict(self.errors.most_common()),
            "offered_per_s": self.offered_per_s,
            "answered_per_s": self.per_s(len(whole)),
            "input_tokens_per_s": self.per_s(sum(record.input_tokens for record in whole)),
            "output_tokens_per_s": self.per_s(sum(record.answered_tokens or 0 for record in whole)),
            "cached_tokens": _total(record.cached_tokens for record in whole),
            "ttft_s": _json(record.ttft_s for record in whole),
            "tpot_s": _json(record.tpot_s for record in whole),
            "e2e_s": _json(record.e2e_s for record in whole),
            "behind": {
                "requests": self.behind,
                "max_s": self.max_behind_s,
                "waited_for_a_connection": self.waited,
            },
            "routes": {route: _route_json(records) for route, records in self.by_route().items()},
        }


def route_bytes(records: Iterable[ReplayedRequest]) -> int | None:
    """KV bytes that moved for these requests, as their routes say; None if the gateway tells clients no numbers."""
    told = [record.route_fields["bytes"] for record in records if "bytes" in record.route_fields]
    return sum(map(_whole, told)) if told else None


def fallbacks(records: Iterable[ReplayedRequest]) -> int:
    """Requests whose prefill elsewhere failed, as their routes say."""
    return sum("fallback" in record.route_fields for record in records)


def _route_json(records: tuple[ReplayedRequest, ...]) -> dict[str, Any]:
    return {
        "requests": len(records),
        "kv_bytes": route_bytes(records),
        "fallbacks": fallbacks(records),
        "ttft_s": _json(record.ttft_s for record in records if not record.is_lost),
    }


def _json(values_s: Iterable[float | None]) -> dict[str, float] | None:
    percentiles = Percentiles.of(values_s)
    return None if percentiles is None else percentiles.to_json()


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def times_table(result: ReplayResult) -> Table:
    """TTFT, time per token and whole answers of all requests, and TTFT by route."""
    whole = result.whole
    table = Table(title=f"{len(result.records)} requests to {result.target.url}", title_justify="left")
    table.add_column("")
    table.add_column("requests", justify="right")
    for name in ("mean", "P50", "P90", "P99", "max"):
        table.add_column(name, justify="right")
    table.add_column("KV moved", justify="right")
    for name, values in (
        ("time to first token", [record.ttft_s for record in whole]),
        ("time per further token", [record.tpot_s for record in whole]),
        ("whole answer", [record.e2e_s for record in whole]),
    ):
        table.add_row(name, str(len(whole)), *_cells(Percentiles.of(values)), "")
    for route, records in result.by_route().items():
        ttft = Percentiles.of(record.ttft_s for record in records if not record.is_lost)
        moved_bytes = route_bytes(records)
        moved = "not told" if moved_bytes is None else format_bytes(moved_bytes)
        table.add_row(f"first token, {route}", str(len(records)), *_cells(ttft), moved)
    return table


def closing(result: ReplayResult) -> Iterator[str]:
    """Sentences under the table."""
    whole = result.whole
    answered = result.per_s(sum(record.answered_tokens or 0 for record in whole))
    yield (
        f"{result.duration_s:.1f} s: {result.offered_per_s:.2f} requests/s offered, "
        f"{result.per_s(len(whole)):.2f} answered, "
        f"{result.per_s(sum(record.input_tokens for record in whole)):,.0f} prompt tokens/s, "
        f"{answered:,.0f} tokens/s"
    )
    if (failed := fallbacks(result.records)) > 0:
        yield f"{failed} prefills elsewhere failed and were done by the decode instance"
    if result.behind:
        cause = "too many requests were open" if result.waited else "this machine was too busy"
        yield (
            f"the replay fell behind: {result.behind} requests were sent late, by up to "
            f"{format_s(result.max_behind_s)}; {cause}"
        )
    for reason, count in result.errors.most_common(5):
        yield f"{count} x {reason}"
    yield (
        f"{result.lost} of {len(result.records)} requests were lost" if result.lost else "no request was lost"
    )


def _cells(percentiles: Percentiles | None) -> list[str]:
    if percentiles is None:
        return ["-"] * 5
    return [format_s(value) for value in percentiles.to_json().values()]
