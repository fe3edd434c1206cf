"""The trace of one request as the stages of the gateway write it: spans, what they tell, and what engines get of it.

Nothing here needs OpenTelemetry: `prfaas.serving.tracing.otel` makes spans, where traces are wanted. Names are those of
the GenAI semantic conventions and of vLLM's spans where there is one; the others begin with "prfaas.". No attribute
holds anything of a prompt or an answer.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prfaas.core.scheduling import Decision
from prfaas.serving.tracing import CANCELLED, Attributes, AttributeValue

if TYPE_CHECKING:
    from prfaas.serving.tracing.otel import OtelSpan, OtelTrace


STEP_NAMES = {"read": "read", "tokenize": "tokenize", "turn": "wait_for_turn"}
"""Steps of a request's record that are spans too, under these names."""


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


def error_word(error: BaseException) -> str:
    """One word for what ended a stage."""
    if isinstance(error, asyncio.CancelledError | ConnectionResetError | GeneratorExit):
        return CANCELLED
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, str) else type(error).__name__


class EngineCall:
    """A call to an engine, with the headers that it is made with; a span if its request is traced."""

    __slots__ = ("_span", "headers")

    def __init__(self, headers: Mapping[str, str], span: "OtelSpan | None") -> None:
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
    trace: "OtelTrace | None", headers: Mapping[str, str], attributes: Attributes
) -> Iterator[EngineCall]:
    """While a decode engine is asked; an exception is the span's error."""
    call = EngineCall(headers, None if trace is None else trace.open("decode", attributes, asks_engine=True))
    try:
        yield call
    except BaseException as error:
        call.end(error_word(error))
        raise
    else:
        call.end()
