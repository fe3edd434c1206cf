"""A collector of traces in the test's own event loop: it takes OTLP over HTTP and parses it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class SeenSpan:
    """One span as it was sent. Times are Unix nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool
    resource: dict[str, Any]
    """Who sent it."""


@dataclass
class Collector:
    """`hangs`: it takes requests and never answers. `status`: what it answers."""

    hangs: bool = False
    status: int = 200
    port: int = 0
    spans: list[SeenSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.hangs:
            await asyncio.Event().wait()
        told = ExportTraceServiceRequest.FromString(body)
        for resource in told.resource_spans:
            sender = _attributes(resource.resource.attributes)
            self.resources.append(sender)
            for scope in resource.scope_spans:
                self.spans += [_seen(span, sender) for span in scope.spans]
        return web.Response(status=self.status)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not within twenty seconds; there are {[span.name for span in self.spans]}")

    async def trace(self, trace_id: str) -> list[SeenSpan]:
        """All spans of a request that has ended. Its own span is the last that ends."""

        def found() -> list[SeenSpan]:
            return [span for span in self.spans if span.trace_id == trace_id]

        await self.until(lambda: any(span.kind == 2 for span in found()))
        return found()


@asynccontextmanager
async def running_collector(**fields: Any) -> AsyncIterator[Collector]:
    collector = Collector(**fields)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", collector._take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.port = runner.addresses[0][1]
    try:
        yield collector
    finally:
        await runner.cleanup()


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _attributes(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _seen(span: Any, resource: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        begun_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[(event.name, _attributes(event.attributes)) for event in span.events],
        is_error=span.status.code == 2,
        resource=resource,
    )
