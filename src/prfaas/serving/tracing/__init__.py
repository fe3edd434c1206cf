"""Traces of requests by OpenTelemetry, over OTLP/HTTP. Only `otel.py` and `queue.py` import its packages.

Names are those of the GenAI semantic conventions and of vLLM's spans where there is one; the others begin with
"prfaas.". No attribute holds anything of a prompt or an answer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

CANCELLED = "cancelled"
"""The error of a span that ended with its request: the client has left, or another stage has failed."""


class TraceSpan:
    """A span that is open; it ends with the block that it is entered for. This one drops what it is told."""

    __slots__ = ()

    def headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Those of a call to an engine, whose own spans become children of this one."""
        return headers

    def tell(self, attributes: Attributes) -> None:
        """Add attributes."""

    def end(self, error: str | None = None) -> None:
        """It ends now, with an error in one word or without. Only the first call counts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end(None if error is None else error_word(error))


class RequestSpans:
    """Where the stages of one request write their spans. This one drops them: the request is not traced, or over."""

    __slots__ = ()

    is_kept = False

    def open(self, _name: str, _attributes: Attributes, *, asks_engine: bool = False) -> TraceSpan:  # noqa: ARG002
        """A span begins now. `asks_engine`: it is a call to one."""
        return _NO_SPAN

    def step(self, name: str, begun_s: float, ended_s: float, attributes: Attributes | None = None) -> None:
        """A span that is over. Times are those of `time.perf_counter`."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something has happened now."""

    def end(
        self, name: str, ended_s: float, attributes: Attributes, error: str | None, *, failed: bool
    ) -> None:
        """The request is over, and with it every span that is open.

        Args:
            name: of its span, now that more is known.
            ended_s: when.
            attributes: of its span.
            error: in one word; None: there was none.
            failed: whether it is this side's.
        """


_NO_SPAN = TraceSpan()
NO_TRACE = RequestSpans()


def error_word(error: BaseException) -> str:
    """One word for what ended a stage."""
    if isinstance(error, asyncio.CancelledError | ConnectionResetError | GeneratorExit):
        return CANCELLED
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, str) else type(error).__name__
