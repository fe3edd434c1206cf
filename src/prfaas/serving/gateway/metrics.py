"""What the gateway counts, in Prometheus form."""

import contextlib
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from prfaas import __version__
from prfaas.serving.declared_metrics import (
    Declared,
    DeclaredMetrics,
    cached_counter,
    cached_histogram,
    counter,
    gauge,
)
from prfaas.serving.transport.protocol.wire import read_body

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.5, 1.0, 2.5),
)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics(DeclaredMetrics):
    """All series of one gateway; docs/reference/metrics.md lists them."""

    prefix = "prfaas_gateway_"

    requests = cached_counter(
        "Requests that ended, by endpoint, route and outcome (ok, client_error, engine_error, cancelled).",
        *("endpoint", "route", "outcome"),
    )
    uncached_tokens = cached_counter("Prompt tokens that the PD cluster did not hold.", "route")
    transferred_bytes = cached_counter("KV bytes moved to decode instances.", "route")
    transfers = cached_counter(
        "KV transfers to decode instances that completed, by what moved them (prfaas, nixl).", "route", "by"
    )
    overlapped_bytes = cached_counter(
        "KV bytes that had arrived when the prefill ended.", "route", name="hidden_bytes"
    )
    kept_tokens = counter("Tokens of broken transfers that decode engines could go on from.")
    fallbacks = cached_counter("Failed prefills elsewhere, by reason.", "reason")
    cache_transfers = cached_counter(
        "Prefixes that were to move to a prefill instance first, by outcome (done, or why not).", "outcome"
    )
    cache_transferred_bytes = counter("KV bytes moved to prefill instances before they prefilled.")
    egress_cost = counter(
        "What KV bytes over a link cost, in the currency of the deployment file's prices.", "link"
    )
    ledger_lost = counter("Requests that the ledger could not keep, since its file could not be written.")
    decode_failures = cached_counter(
        "Decode instances that failed a request, by reason (unreachable, died, http-STATUS).", "reason"
    )
    continuations = cached_counter(
        "Streams whose decode instance failed after the first byte, by what became of them.", "outcome"
    )
    first_tokens = cached_counter("First tokens wanted from the prefill, by what became of them.", "outcome")
    shadows = cached_counter(
        "Answers chosen to be compared with the plain path's, by outcome (match, tie, mismatch, yielded, "
        "skipped, failed).",
        "outcome",
    )
    direct = cached_counter("Requests prefilled by their decode instance, by reason.", "reason")
    ttft_seconds = cached_histogram(
        _SECONDS, "From the request's arrival to the first byte of its answer.", "route"
    )
    prefill_seconds = cached_histogram(_SECONDS, "A prefill hop, from request to answer.", "route")
    transfer_seconds = cached_histogram(
        _SECONDS, "From the prefill's start to the transfer's completion.", "route"
    )
    request_seconds = cached_histogram(
        _SECONDS, "From the request's arrival to the end of its answer.", "route"
    )
    tpot_seconds = cached_histogram(
        _TOKEN_SECONDS,
        "Mean time per further token of each stream: from its first byte to its end, over its tokens less one.",
        "route",
    )
    answer_tokens = cached_counter(
        "Generated tokens, by the answers' usage; of streams without it, their events.", "route"
    )
    refused = cached_counter(
        "Generating requests that got a refusal in place of an answer, by reason.", "reason"
    )
    waiting_requests = gauge("Requests without an answer so far, by what they wait for.", "step")
    loop_lag_seconds = Declared(
        partial(Histogram, buckets=_LAG_SECONDS), "How late the event loop was, five times a second."
    )
    staging_used_bytes = gauge("Memory of an instance in which KV waits for its request.", "instance")
    staging_bytes = gauge("Memory that an instance has for KV that waits.", "instance")
    queue_wait_seconds = gauge("The least that a new request would wait, as predicted.")
    queue_limit_seconds = gauge("The wait beyond which new requests are refused.")
    certificate_expires = gauge(
        "When a certificate on the gateway's machine ends, in Unix time.",
        "certificate",
        name="certificate_expires_timestamp_seconds",
    )
    trace_spans = cached_counter(
        "Spans of traces, by what became of them (sent, failed, dropped).", "outcome"
    )
    in_flight_requests = gauge("Requests being served.")
    in_flight_transfers = gauge("KV transfers being waited for.")
    background_tasks = gauge("Abandonments under way.")

    def __init__(self, registry: CollectorRegistry) -> None:
        """`registry`: what `GET /metrics` shows; others may register theirs in it too."""
        super().__init__(registry)
        self._registry = registry
        self.before_shown: list[Callable[[], None]] = []
        """Called before everything is shown: they write what is known elsewhere."""
        build = Gauge(
            "prfaas_build_info", "1; the labels say what runs.", ("version", "python"), registry=registry
        )
        build.labels(__version__, platform.python_version()).set(1)

    def exposition(self) -> bytes:
        """The text format of GET /metrics."""
        for write in self.before_shown:
            write()
        return generate_latest(self._registry)


# Ranks are asked twice a second; so many that it takes longer are a few thousand.
_FRESH_S = 30.0
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Staging(msgspec.Struct):
    """The part of a STATS answer that says how full a rank's staging is."""

    staging_used_blocks: _Count
    staging_total_blocks: _Count
    staging_block_bytes: _Count


class StagingGauges:
    """How much staging of each instance is in use, by what its ranks have told the control plane lately."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._used, self._total = metrics.staging_used_bytes, metrics.staging_bytes
        self._clock = clock
        # Instance and rank → when it has told something sane, and what.
        self._told: dict[tuple[str, int], tuple[float, _Staging]] = {}
        metrics.before_shown.append(self._show)

    def told(self, name: str, rank: int, answer: Mapping[str, Any]) -> None:
        """A rank of an instance has answered at its KV port."""
        with contextlib.suppress(ValueError):
            self._told[name, rank] = self._clock(), read_body(_Staging, answer)

    def _show(self) -> None:
        self._used.clear()
        self._total.clear()
        since_s = self._clock() - _FRESH_S
        self._told = {rank: told for rank, told in self._told.items() if told[0] >= since_s}
        for (name, _), (_, told) in self._told.items():
            self._used.labels(name).inc(told.staging_used_blocks * told.staging_block_bytes)
            self._total.labels(name).inc(told.staging_total_blocks * told.staging_block_bytes)
