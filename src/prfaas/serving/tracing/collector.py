"""Where traces go: what the deployment file says, or else the OTEL_* variables of the environment.

It needs the standard library only: an engine is told the same, and brings its own OpenTelemetry.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.deployment import TracingConfig
from prfaas.core.deployment.addresses import traces_url

_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_PROTOCOLS = (PROTOCOL_VARIABLE, "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_HEADERS"


@dataclass(frozen=True, slots=True)
class TraceCollector:
    """Who takes traces."""

    endpoint: str
    """The URL for traces."""
    sample_ratio: float | None = None
    """Share of the requests that are traced; None: what OTEL_TRACES_SAMPLER says, or all."""
    headers_file: Path | None = None
    """None: what OTEL_EXPORTER_OTLP_HEADERS says, or none."""
    is_demanded: bool = True
    """Whether the deployment file names it. A variable may be meant for other programs of the machine."""


def collector_of(
    config: TracingConfig | None, environment: Mapping[str, str] | None = None
) -> TraceCollector | None:
    """Where traces go; None: nowhere.

    Args:
        config: the deployment file's. What it says wins.
        environment: default: this process's. `OTEL_SDK_DISABLED=true` in it turns all off.
    """
    told = os.environ if environment is None else environment
    if told.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if config is not None:
        return TraceCollector(config.endpoint, config.sample_ratio, config.headers_file)
    if told.get("OTEL_TRACES_EXPORTER", "otlp").strip() != "otlp":
        return None
    # Another protocol than ours is meant for another port.
    if any(told.get(name, PROTOCOL).strip() not in ("", PROTOCOL) for name in _PROTOCOLS):
        return None
    endpoint = told.get(_TRACES_ENDPOINT, "").strip()
    base = told.get(_ENDPOINT, "").strip()
    if not endpoint and base:
        # Of the general one the specification makes the traces' by adding the path.
        endpoint = base.rstrip("/") + "/v1/traces"
    try:
        return TraceCollector(traces_url(endpoint), is_demanded=False) if endpoint else None
    except ValueError:
        return None
