"""Traces of requests by OpenTelemetry, over OTLP/HTTP. Only `otel.py` and `queue.py` import its packages."""
