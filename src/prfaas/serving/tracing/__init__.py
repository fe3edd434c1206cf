"""Traces of requests by OpenTelemetry, over OTLP/HTTP. Only `otel.py` and `queue.py` import its packages."""

from collections.abc import Mapping, Sequence

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

CANCELLED = "cancelled"
"""The error of a span that ended with its request: the client has left, or another stage has failed."""
