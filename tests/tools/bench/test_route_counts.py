"""What is read from a gateway's counters, and what two readings say together."""

from io import StringIO

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from prfaas.serving.gateway.metrics import Metrics
from prfaas.tools.bench.route_counts import (
    CountsError,
    GatewayCounts,
    GatewayReading,
    counts_between,
    counts_notes,
    counts_table,
)


class Gateway:
    """The gateway's own metrics, as it counts them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = Metrics(self._registry)

    def serve(self, route: str, count: int, *, kv_bytes: int = 0, ttft_s: float = 0.5) -> None:
        metrics = self.metrics
        for _ in range(count):
            metrics.requests.labels("completions", route, "ok").inc()
            metrics.uncached_tokens.labels(route).inc(5000)
            metrics.ttft_seconds.labels(route).observe(ttft_s)
            if kv_bytes:
                metrics.transferred_bytes.labels(route).inc(kv_bytes)
                metrics.overlapped_bytes.labels(route).inc(kv_bytes * 3 // 4)
                metrics.transfer_seconds.labels(route).observe(ttft_s / 2)

    def read(self) -> GatewayReading:
        return GatewayReading.of(generate_latest(self._registry).decode())


def counted() -> GatewayCounts:
    gateway = Gateway()
    gateway.serve("offload", 3, kv_bytes=1 << 20, ttft_s=9.0)
    before = gateway.read()
    gateway.serve("offload", 2, kv_bytes=4 << 20, ttft_s=2.0)
    gateway.serve("local", 5, ttft_s=0.25)
    gateway.metrics.fallbacks.labels("frozen").inc(2)
    gateway.metrics.refused.labels("queue").inc()
    return counts_between(before, gateway.read())


def test_only_what_came_between_the_readings_counts() -> None:
    local, offload = counted().routes
    assert (local.route, local.requests, local.kv_bytes, local.hidden_fraction) == ("local", 5, 0, None)
    assert local.ttft_s == pytest.approx(0.25) and local.transfer_s is None
    assert (offload.requests, offload.uncached_tokens, offload.kv_bytes) == (2, 10_000, 8 << 20)
    assert offload.hidden_fraction == pytest.approx(0.75)
    assert (offload.ttft_s, offload.transfer_s) == (pytest.approx(2.0), pytest.approx(1.0))


def test_routes_without_requests_are_left_out() -> None:
    gateway = Gateway()
    before = gateway.read()
    gateway.serve("local", 1)
    assert [route.route for route in counts_between(before, gateway.read()).routes] == ["local"]


def test_a_gateway_that_was_started_again_is_noticed() -> None:
    gateway, again = Gateway(), Gateway()
    gateway.serve("local", 5)
    again.serve("local", 2)
    with pytest.raises(CountsError, match="started again during the test"):
        counts_between(gateway.read(), again.read())


def test_for_people() -> None:
    counts = counted()
    out = StringIO()
    Console(file=out, width=100).print(counts_table(counts))
    text = out.getvalue()
    for part in ("offload", "10,000", "2 s", "8.0 MiB", "75%", "250 ms"):
        assert part in text
    assert list(counts_notes(counts, sent=6)) == [
        "1 requests were others' or warm-up; the table counts them too",
        "2 prefills elsewhere failed (frozen) and were done by the PD cluster",
        "1 requests were refused (queue)",
    ]
    assert counts.to_json()["routes"]["offload"]["kv_bytes"] == 8 << 20


def test_what_is_no_metrics_page_is_an_error() -> None:
    with pytest.raises(ValueError):
        GatewayReading.of("<html>{not metrics")
