"""The trace of one request as the stages of the gateway write it: spans, what they tell, and what engines get of it.

Nothing here knows OpenTelemetry: `prfaas.serving.tracing.otel` makes these, where traces are wanted. Names are those of
the GenAI semantic conventions and of vLLM's spans where there is one; the others begin with "prfaas.". No attribute
holds anything of a prompt or an answer.
"""

import asyncio
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from prfaas.core.scheduling import Decision

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

CANCELLED = "cancelled"
"""The error of a span that ended with its request: the client has left, or another stage has failed."""

# Fixed words: in "stop_reason" vLLM quotes the client's own stop string.
_REASONS = rb"stop|length|tool_calls|function_call|content_filter|abort|error|repetition"
_FINISH_REASON = re.compile(rb'"finish_reason":\s?"(' + _REASONS + rb')"')
_STOP_REASON = re.compile(
    rb'"stop_reason":\s?"(end_turn|max_tokens|stop_sequence|tool_use|pause_turn|refusal)"'
)
_MOST_REASONS = 16

STEP_NAMES = {"read": "read", "tokenize": "tokenize", "turn": "wait_for_turn"}
"""Steps of a request's record that are spans too, under these names."""


class Span(Protocol):
    """A span that is open."""

    @property
    def traceparent(self) -> str:
        """The W3C header by which an engine makes its spans children of this one."""
        ...

    def tell(self, attributes: Attributes) -> None:
        """Add attributes."""
        ...

    def end(self, error: str | None = None) -> None:
        """It ends now, with an error in one word or without. Only the first call counts."""
        ...


class RequestSpans(Protocol):
    """The spans of one request that is traced. Times are those of `time.perf_counter`."""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        ...

    def open(self, name: str, attributes: Attributes, *, asks_engine: bool = False) -> Span:
        """A span begins now. `asks_engine`: it is a call to one."""
        ...

    def step(self, name: str, begun_s: float, ended_s: float, attributes: Attributes | None = None) -> None:
        """A span that is over."""
        ...

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something has happened now."""
        ...

    def end(
        self, name: str, ended_s: float, attributes: Attributes, error: str | None, *, failed: bool
    ) -> None:
        """The request is over, and with it every span that is open.

        Args:
            name: of its span, now that more is known.
            error: in one word; None: there was none.
            failed: whether it is this side's.
        """
        ...


class BegunTrace(Protocol):
    """What becomes of a request's trace at its start."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What engines get: `traceparent`, and `tracestate` if there is one. They say too if it is not traced."""
        ...

    @property
    def trace(self) -> RequestSpans | None:
        """None: the request is not among those that are traced."""
        ...


class Tracing(Protocol):
    """Makes traces of requests and has them sent."""

    def begin(self, name: str, received: Mapping[str, str], at_s: float, began_s: float) -> BegunTrace:
        """A request has come.

        Args:
            name: of its span.
            received: the client's headers; a well-formed `traceparent` is continued.
            at_s: Unix time of its arrival.
            began_s: the same by `time.perf_counter`.
        """
        ...

    async def close(self) -> None:
        """Send what is left, for a short while at most."""
        ...


def decision_attributes(decision: Decision, policy: str) -> dict[str, AttributeValue]:
    """What a decision's span tells."""
    told: dict[str, AttributeValue] = {
        "prfaas.policy": policy,
        "prfaas.route": str(decision.route),
        "prfaas.reason": decision.reason,
        "prfaas.uncached_tokens": decision.uncached_tokens,
        "prfaas.prefill_tokens": decision.prefill_tokens,
        "prfaas.skip_tokens": decision.skip_tokens,
        "prfaas.prefill.instance": decision.prefill,
        "prfaas.decode.instance": decision.decode,
    }
    for name, value in (
        ("prfaas.threshold_tokens", decision.threshold_tokens),
        ("prfaas.predicted_ttft_s", decision.predicted_ttft_s),
    ):
        # No attribute in place of "never" and "unknown".
        if math.isfinite(value):
            told[name] = float(value)
    return told


def finish_reasons(tail: bytes) -> list[str]:
    """Why the answers of a request ended, from the end of what was written. In generated text quotes are escaped."""
    found = _FINISH_REASON.findall(tail) or _STOP_REASON.findall(tail)
    return [reason.decode("ascii") for reason in found[-_MOST_REASONS:]]


def error_word(error: BaseException) -> str:
    """One word for what ended a stage."""
    if isinstance(error, asyncio.CancelledError | ConnectionResetError | GeneratorExit):
        return CANCELLED
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, str) else type(error).__name__


class EngineCall:
    """A call to an engine, with the headers that it is made with; a span if its request is traced."""

    __slots__ = ("_span", "headers")

    def __init__(self, headers: Mapping[str, str], span: Span | None) -> None:
        self._span = span
        self.headers = headers if span is None else {**headers, "traceparent": span.traceparent}
        """For the engine."""

    def tell(self, attributes: Attributes) -> None:
        """Add attributes to the span."""
        if self._span is not None:
            self._span.tell(attributes)

    def end(self, error: str | None = None) -> None:
        """The call is over."""
        if self._span is not None:
            self._span.end(error)


@contextmanager
def engine_call(
    trace: RequestSpans | None, name: str, headers: Mapping[str, str], attributes: Attributes
) -> Iterator[EngineCall]:
    """While an engine is asked for something; an exception is the span's error."""
    call = EngineCall(headers, None if trace is None else trace.open(name, attributes, asks_engine=True))
    try:
        yield call
    except BaseException as error:
        call.end(error_word(error))
        raise
    else:
        call.end()
