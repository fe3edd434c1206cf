"""Traces of requests with OpenTelemetry's SDK."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as ApiSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from prfaas import __version__
from prfaas.serving.secret_files import load_headers
from prfaas.serving.tracing import CANCELLED, NO_TRACE, Attributes, RequestSpans, TraceSpan
from prfaas.serving.tracing.collector import TraceCollector
from prfaas.serving.tracing.queue import MOST_SPANS, SpanQueue

SERVICE = "prfaas-gateway"
# How long a gateway that ends waits for its last spans.
_CLOSE_S = 2.0

_propagator = TraceContextTextMapPropagator()


class OtelTracing:
    """Makes traces, and has them sent to one collector."""

    def __init__(
        self,
        collector: TraceCollector,
        deployment: str,
        count: Callable[[str, int], None],
        most_spans: int = MOST_SPANS,
    ) -> None:
        """
        Args:
            collector: where to.
            deployment: its name, for the traces' resource.
            count: see `SpanQueue`.
            most_spans: see `SpanQueue`.

        Raises:
            TraceHeadersError: the collector's file of headers can't be used.
        """
        headers = None if collector.headers_file is None else load_headers(collector.headers_file)
        self._queue = SpanQueue(OTLPSpanExporter(collector.endpoint, headers=headers), count, most_spans)
        ratio = collector.sample_ratio
        resource = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or SERVICE,
            "service.version": __version__,
            "prfaas.deployment": deployment,
        }
        provider = TracerProvider(
            # A client that has decided about its trace has decided about this part of it.
            sampler=None if ratio is None else ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("prfaas.gateway", __version__)

    def begin(self, name: str, received: Mapping[str, str], at_s: float, began_s: float) -> "OtelBegun":
        """A request has come.

        Args:
            name: of its span.
            received: the client's headers; a well-formed `traceparent` is continued.
            at_s: Unix time of its arrival.
            began_s: the same by `time.perf_counter`.
        """
        before = _propagator.extract(received, Context())
        at_ns = int(at_s * 1e9)
        root = self._tracer.start_span(name, before, SpanKind.SERVER, start_time=at_ns)
        context = set_span_in_context(root, before)
        headers: dict[str, str] = {}
        _propagator.inject(headers, context)
        if not root.is_recording():
            return OtelBegun(headers)
        trace = OtelTrace(self._tracer, root, context, at_ns, began_s)
        return OtelBegun(headers, trace, f"{root.get_span_context().trace_id:032x}")

    async def close(self) -> None:
        """Send what is left, for a short while at most."""
        await asyncio.to_thread(self._queue.close, _CLOSE_S)


class OtelBegun:
    """What becomes of a request's trace at its start."""

    __slots__ = ("headers", "trace", "trace_id")

    def __init__(
        self, headers: Mapping[str, str], trace: RequestSpans = NO_TRACE, trace_id: str | None = None
    ) -> None:
        self.headers = headers
        """What engines get: `traceparent`, and `tracestate` if there is one. They say too if it is not traced."""
        self.trace = trace
        self.trace_id = trace_id
        """32 hex digits; None: the request is not among those that are traced."""


class OtelTrace(RequestSpans):
    """Spans of one traced request. It belongs to the event loop's thread."""

    __slots__ = ("_at_ns", "_began_s", "_context", "_open", "_root", "_tracer")

    is_kept = True

    def __init__(self, tracer: Tracer, root: ApiSpan, context: Context, at_ns: int, began_s: float) -> None:
        self._tracer = tracer
        self._root = root
        self._context = context
        self._at_ns = at_ns
        self._began_s = began_s
        self._open: list[OtelSpan] = []

    def open(self, name: str, attributes: Attributes, *, asks_engine: bool = False) -> "OtelSpan":
        kind = SpanKind.CLIENT if asks_engine else SpanKind.INTERNAL
        span = self._tracer.start_span(name, self._context, kind, attributes, start_time=self.now_ns())
        opened = OtelSpan(self, span)
        self._open.append(opened)
        return opened

    def step(self, name: str, begun_s: float, ended_s: float, attributes: Attributes | None = None) -> None:
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=self._ns(begun_s)
        )
        span.end(self._ns(ended_s))

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        self._root.add_event(name, attributes, self.now_ns())

    def end(
        self, name: str, ended_s: float, attributes: Attributes, error: str | None, *, failed: bool
    ) -> None:
        ended_ns = self._ns(ended_s)
        # What is cancelled with the request ends some steps of the loop later.
        for span in self._open:
            span.end_at(ended_ns, CANCELLED)
        self._root.update_name(name)
        self._root.set_attributes(attributes)
        if error is not None:
            self._root.set_attribute("error.type", error)
        if failed:
            self._root.set_status(Status(StatusCode.ERROR))
        self._root.end(ended_ns)

    def now_ns(self) -> int:
        """Unix time in nanoseconds, by the clock that never jumps."""
        return self._ns(time.perf_counter())

    def _ns(self, perf_s: float) -> int:
        return self._at_ns + int((perf_s - self._began_s) * 1e9)


class OtelSpan(TraceSpan):
    """A span that is open."""

    __slots__ = ("_has_ended", "_span", "_trace")

    def __init__(self, trace: OtelTrace, span: ApiSpan) -> None:
        self._trace = trace
        self._span = span
        self._has_ended = False

    def headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """With the W3C header by which an engine makes its spans children of this one."""
        return {**headers, "traceparent": _traceparent(self._span.get_span_context())}

    def tell(self, attributes: Attributes) -> None:
        if not self._has_ended:
            self._span.set_attributes(attributes)

    def end(self, error: str | None = None) -> None:
        self.end_at(self._trace.now_ns(), error)

    def end_at(self, ended_ns: int, error: str | None) -> None:
        """The same at a time of the past."""
        if self._has_ended:
            return
        self._has_ended = True
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(ended_ns)


def _traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
