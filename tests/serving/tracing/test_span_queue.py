"""What becomes of spans on their way to a collector: each is counted once, and so many wait at most."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from prfaas.serving.tracing.queue import SpanQueue


class FakeExporter(SpanExporter):
    """`gate`: what an export waits for."""

    def __init__(self, results: Sequence[SpanExportResult | Exception]) -> None:
        self.results = list(results)
        self.gate = threading.Event()
        self.names: list[str] = []
        self.has_begun = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_begun.set()
        self.gate.wait(20)
        self.names += [span.name for span in spans]
        result = self.results.pop(0) if self.results else SpanExportResult.SUCCESS
        if isinstance(result, Exception):
            raise result
        return result


class Counts:
    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self._guard = threading.Lock()

    def __call__(self, outcome: str, spans: int) -> None:
        with self._guard:
            self.of[outcome] += spans


def made(exporter: FakeExporter, most_spans: int) -> tuple[SpanQueue, Counts, Callable[[str], None]]:
    """A queue, its counts, and what ends a span of a name."""
    counts = Counts()
    queue = SpanQueue(exporter, counts, most_spans)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("test")
    return queue, counts, lambda name: tracer.start_span(name).end()


def test_what_finds_no_room_is_dropped_and_counted() -> None:
    exporter = FakeExporter([])
    queue, counts, end = made(exporter, 4)
    for number in range(10):
        end(str(number))
    assert counts.of["dropped"] == 6
    exporter.gate.set()
    queue.close(20)
    # The first ones are kept: the beginning of a trace explains its end.
    assert exporter.names == ["0", "1", "2", "3"]
    assert counts.of == {"sent": 4, "dropped": 6}


def test_what_is_being_sent_still_takes_room() -> None:
    exporter = FakeExporter([])
    queue, counts, end = made(exporter, 4)
    for number in range(4):
        end(str(number))
    assert exporter.has_begun.wait(20)
    end("late")
    assert counts.of == {"dropped": 1}
    exporter.gate.set()
    queue.close(20)


@settings(max_examples=25, deadline=None)
@given(
    spans=st.integers(0, 40),
    most_spans=st.integers(1, 12),
    results=st.lists(
        st.sampled_from([SpanExportResult.SUCCESS, SpanExportResult.FAILURE, ValueError("made to fail")]),
        max_size=8,
    ),
    opens_after=st.integers(0, 40),
)
def test_every_span_is_counted_once(
    spans: int, most_spans: int, results: list[SpanExportResult | Exception], opens_after: int
) -> None:
    exporter = FakeExporter(results)
    queue, counts, end = made(exporter, most_spans)
    for number in range(spans):
        if number == opens_after:
            exporter.gate.set()
        end(str(number))
    exporter.gate.set()
    queue.close(20)
    assert sum(counts.of.values()) == spans
    assert len(exporter.names) == counts.of["sent"] + counts.of["failed"]
    if opens_after >= spans:
        assert counts.of["dropped"] == max(spans - most_spans, 0)


def test_spans_that_are_not_sampled_take_no_room() -> None:
    exporter = FakeExporter([])
    queue, counts, _ = made(exporter, 2)
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(queue)
    for _ in range(5):
        provider.get_tracer("test").start_span("x").end()
    exporter.gate.set()
    queue.close(20)
    assert not counts.of and not exporter.names


def test_an_end_does_not_wait_for_a_collector_that_hangs() -> None:
    exporter = FakeExporter([])
    queue, counts, end = made(exporter, 4)
    end("x")
    begun_s = time.monotonic()
    queue.close(0.05)
    # The exporter would hold it up for twenty seconds.
    assert time.monotonic() - begun_s < 15
    assert not counts.of
    exporter.gate.set()


@pytest.mark.parametrize("timeout", [1, 30_000])
def test_a_flush_sends_what_is_there(timeout: int) -> None:
    exporter = FakeExporter([])
    exporter.gate.set()
    queue, counts, end = made(exporter, 4)
    end("x")
    assert queue.force_flush(timeout)
    assert counts.of == {"sent": 1}
    queue.close(20)
