"""What the gateway counts, in Prometheus form."""

import platform
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prfaas import __version__

Child = TypeVar("Child", covariant=True)


class Family(Protocol[Child]):
    """A metric with labels, of prometheus-client."""

    def labels(self, *values: str) -> Child: ...


class CachedLabels(Generic[Child]):
    """A metric family that keeps its labelled children in a dictionary: the library takes a lock to find one.

    Every label must take values from a bounded set, since children are never dropped. Families whose labels name
    members of the deployment are not for this: the series of a member that left are taken out.
    """

    def __init__(self, family: Family[Child]) -> None:
        self._family = family
        self._children: dict[tuple[str, ...], Child] = {}

    def labels(self, *values: str) -> Child:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._family.labels(*values)
        return child


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_TOKEN_SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.5,
    1.0,
    2.5,
)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class _Made:
    """Families with labels in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> CachedLabels[Counter]:
        return CachedLabels(Counter(name, text, labels, registry=self._registry))

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> CachedLabels[Gauge]:
        return CachedLabels(Gauge(name, text, labels, registry=self._registry))

    def histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: Sequence[float]
    ) -> CachedLabels[Histogram]:
        return CachedLabels(Histogram(name, text, labels, registry=self._registry, buckets=buckets))


class Metrics:
    """All series of one gateway. Every label takes values from a bounded set; docs/reference/metrics.md lists them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """`registry`: what `GET /metrics` shows; others may register theirs in it too."""
        self._registry, made = registry, _Made(registry)
        self.requests = made.counter(
            "prfaas_gateway_requests",
            "Requests that ended, by endpoint, route and outcome (ok, client_error, engine_error, cancelled).",
            ("endpoint", "route", "outcome"),
        )
        self.uncached_tokens = made.counter(
            "prfaas_gateway_uncached_tokens", "Prompt tokens that the PD cluster did not hold.", ("route",)
        )
        self.transferred_bytes = made.counter(
            "prfaas_gateway_transferred_bytes", "KV bytes moved to decode instances.", ("route",)
        )
        self.transfers = made.counter(
            "prfaas_gateway_transfers",
            "KV transfers to decode instances that completed, by what moved them (prfaas, nixl).",
            ("route", "by"),
        )
        self.overlapped_bytes = made.counter(
            "prfaas_gateway_hidden_bytes", "KV bytes that had arrived when the prefill ended.", ("route",)
        )
        self.kept_tokens = Counter(
            "prfaas_gateway_kept_tokens",
            "Tokens of broken transfers that decode engines could go on from.",
            registry=registry,
        )
        self.fallbacks = made.counter(
            "prfaas_gateway_fallbacks", "Failed prefills elsewhere, by reason.", ("reason",)
        )
        self.cache_transfers = made.counter(
            "prfaas_gateway_cache_transfers",
            "Prefixes that were to move to a prefill instance first, by outcome (done, or why not).",
            ("outcome",),
        )
        self.cache_transferred_bytes = Counter(
            "prfaas_gateway_cache_transferred_bytes",
            "KV bytes moved to prefill instances before they prefilled.",
            registry=registry,
        )
        self.egress_cost = Counter(
            "prfaas_gateway_egress_cost",
            "What KV bytes over a link cost, in the currency of the deployment file's prices.",
            ("link",),
            registry=registry,
        )
        self.decode_failures = made.counter(
            "prfaas_gateway_decode_failures",
            "Decode instances that failed a request, by reason (unreachable, died, http-STATUS).",
            ("reason",),
        )
        self.continuations = made.counter(
            "prfaas_gateway_continuations",
            "Streams whose decode instance failed after the first byte, by what became of them.",
            ("outcome",),
        )
        self.first_tokens = made.counter(
            "prfaas_gateway_first_tokens",
            "First tokens wanted from the prefill, by what became of them.",
            ("outcome",),
        )
        self.shadows = made.counter(
            "prfaas_gateway_shadows",
            "Answers chosen to be compared with the plain path's, by outcome (match, tie, mismatch, yielded, "
            "skipped, failed).",
            ("outcome",),
        )
        self.direct = made.counter(
            "prfaas_gateway_direct", "Requests prefilled by their decode instance, by reason.", ("reason",)
        )
        self.ttft_seconds = made.histogram(
            "prfaas_gateway_ttft_seconds",
            "From the request's arrival to the first byte of its answer.",
            ("route",),
            buckets=_SECONDS,
        )
        self.prefill_seconds = made.histogram(
            "prfaas_gateway_prefill_seconds",
            "A prefill hop, from request to answer.",
            ("route",),
            buckets=_SECONDS,
        )
        self.transfer_seconds = made.histogram(
            "prfaas_gateway_transfer_seconds",
            "From the prefill's start to the transfer's completion.",
            ("route",),
            buckets=_SECONDS,
        )
        self.request_seconds = made.histogram(
            "prfaas_gateway_request_seconds",
            "From the request's arrival to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
        )
        self.tpot_seconds = made.histogram(
            "prfaas_gateway_tpot_seconds",
            "Mean time per further token of each stream: from its first byte to its end, over its tokens less one.",
            ("route",),
            buckets=_TOKEN_SECONDS,
        )
        self.answer_tokens = made.counter(
            "prfaas_gateway_answer_tokens",
            "Generated tokens, by the answers' usage; of streams without it, their events.",
            ("route",),
        )
        self.refused = made.counter(
            "prfaas_gateway_refused",
            "Generating requests that got a refusal in place of an answer, by reason.",
            ("reason",),
        )
        self.waiting_requests = made.gauge(
            "prfaas_gateway_waiting_requests",
            "Requests without an answer so far, by what they wait for.",
            ("step",),
        )
        self.loop_lag_seconds = Histogram(
            "prfaas_gateway_loop_lag_seconds",
            "How late the event loop was, five times a second.",
            buckets=_LAG_SECONDS,
            registry=registry,
        )
        self.staging_used_bytes = Gauge(
            "prfaas_gateway_staging_used_bytes",
            "Memory of an instance in which KV waits for its request.",
            ("instance",),
            registry=registry,
        )
        self.staging_bytes = Gauge(
            "prfaas_gateway_staging_bytes",
            "Memory that an instance has for KV that waits.",
            ("instance",),
            registry=registry,
        )
        self.queue_wait_seconds = Gauge(
            "prfaas_gateway_queue_wait_seconds",
            "The least that a new request would wait, as predicted.",
            registry=registry,
        )
        self.queue_limit_seconds = Gauge(
            "prfaas_gateway_queue_limit_seconds",
            "The wait beyond which new requests are refused.",
            registry=registry,
        )
        self.certificate_expires = Gauge(
            "prfaas_gateway_certificate_expires_timestamp_seconds",
            "When a certificate on the gateway's machine ends, in Unix time.",
            ("certificate",),
            registry=registry,
        )
        self.trace_spans = made.counter(
            "prfaas_gateway_trace_spans",
            "Spans of traces, by what became of them (sent, failed, dropped).",
            ("outcome",),
        )
        build = Gauge(
            "prfaas_build_info", "1; the labels say what runs.", ("version", "python"), registry=registry
        )
        build.labels(__version__, platform.python_version()).set(1)
        self.in_flight_requests = Gauge(
            "prfaas_gateway_in_flight_requests", "Requests being served.", registry=registry
        )
        self.in_flight_transfers = Gauge(
            "prfaas_gateway_in_flight_transfers", "KV transfers being waited for.", registry=registry
        )
        self.background_tasks = Gauge(
            "prfaas_gateway_background_tasks", "Abandonments under way.", registry=registry
        )

    def exposition(self) -> bytes:
        """The text format of GET /metrics."""
        return generate_latest(self._registry)
