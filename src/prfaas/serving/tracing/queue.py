"""Spans on their way to a collector: so many at most, sent by a thread, each counted once by what became of it."""

import threading
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

MOST_SPANS = 4096
_BATCH_SPANS = 512

OUTCOMES = ("sent", "failed", "dropped")
"""The collector took it; it did not; there was no room for it."""


class SpanQueue(SpanProcessor):
    """A batch processor that never waits, and says what it drops. Spans are given to it by one thread."""

    def __init__(
        self, exporter: SpanExporter, count: Callable[[str, int], None], most_spans: int = MOST_SPANS
    ) -> None:
        """
        Args:
            exporter: sends batches, as slowly as it likes.
            count: called with one of `OUTCOMES` and a number of spans, from any thread.
            most_spans: that wait or are being sent; more are dropped.
        """
        self._count = count
        self._most_spans = most_spans
        self._given = 0
        self._exporter = _CountingExporter(exporter, count)
        self._batches = BatchSpanProcessor(
            self._exporter, max_queue_size=most_spans, max_export_batch_size=min(_BATCH_SPANS, most_spans)
        )

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is done with spans that are open."""

    def on_end(self, span: ReadableSpan) -> None:
        """Have a span sent, if there is room."""
        if self._given - self._exporter.taken >= self._most_spans:
            self._count("dropped", 1)
            return
        self._given += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Send what is left; as long as it takes, at most half a minute."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what is there now, as long as it takes."""
        return self._batches.force_flush(timeout_millis)

    def close(self, within_s: float) -> None:
        """Send what is left, for `within_s` seconds at most. A thread that a collector holds up is left behind."""
        ending = threading.Thread(target=self._batches.shutdown, name="prfaas-traces-end", daemon=True)
        ending.start()
        ending.join(within_s)


class _CountingExporter(SpanExporter):
    """Counts what the thread that sends has done."""

    def __init__(self, exporter: SpanExporter, count: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._count = count
        self.taken = 0
        """Spans that are sent or have failed. One thread at a time writes it."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.taken += len(spans)
            self._count("sent" if result is SpanExportResult.SUCCESS else "failed", len(spans))
        return result

    def shutdown(self) -> None:
        """Give up what is being tried again."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what an exporter keeps."""
        return self._exporter.force_flush(timeout_millis)
