"""Of an engine's metrics only those are asked for that are read, wherever the engine can choose."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prfaas.serving.control.engine_http import EngineHttp
from prfaas.serving.control.engine_reading import read_exposition

from .world import deployment_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LABELS = {"model_name": "m", "engine": "0"}


def registry() -> CollectorRegistry:
    """Some of vLLM's metrics, as vLLM makes them, and one that nobody reads."""
    made = CollectorRegistry()
    Gauge("vllm:num_requests_running", "text", LABELS, registry=made).labels(**LABELS).set(3)
    Counter("vllm:prefix_cache_queries", "text", LABELS, registry=made).labels(**LABELS).inc(70)
    Counter("vllm:prompt_tokens", "text", LABELS, registry=made).labels(**LABELS).inc(11)
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds"):
        Histogram(name, "text", LABELS, registry=made).labels(**LABELS).observe(0.5)
    facts = {"block_size": "16", "num_gpu_blocks": "10"}
    Gauge("vllm:cache_config_info", "text", facts, registry=made).labels(**facts).set(1)
    Gauge("process_start_time_seconds", "text", registry=made).set(5.0)
    return made


WHOLE = generate_latest(registry())


async def tell_all(_request: web.Request) -> web.StreamResponse:
    return web.Response(body=WHOLE)


async def tell_chosen(request: web.Request) -> web.StreamResponse:
    """As prometheus_client answers."""
    return web.Response(body=generate_latest(registry().restricted_registry(request.query.getall("name[]"))))


async def tell_nothing(_request: web.Request) -> web.StreamResponse:
    """As prometheus_client answers where several processes write one registry: it knows no names there."""
    return web.Response(body=b"")


async def refuse(_request: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


async def fail(_request: web.Request) -> web.StreamResponse:
    raise web.HTTPServiceUnavailable


def asked(
    folder: Path, below: Handler, whole: Handler = tell_all, times: int = 1
) -> tuple[list[bytes | None], str]:
    """What the questions gave, and which paths were asked for: a letter each."""
    paths = []

    async def main() -> list[bytes | None]:
        app = web.Application()

        async def noted(request: web.Request) -> web.StreamResponse:
            paths.append("w" if request.path == "/metrics" else "c")
            return await (whole if request.path == "/metrics" else below)(request)

        app.router.add_get("/metrics", noted)
        app.router.add_get("/metrics/", noted)
        async with TestServer(app) as server:
            instance = replace(deployment_of(folder).instance("home-d0"), http_port=server.port)
            http = EngineHttp()
            try:
                return [await http.metrics(instance, 10.0) for _ in range(times)]
            finally:
                await http.close()

    return asyncio.run(main()), "".join(paths)


def test_only_what_is_read_is_told(tmp_path: Path) -> None:
    (text, again), paths = asked(tmp_path, tell_chosen, times=2)
    assert paths == "cc" and text is not None and again is not None
    assert read_exposition(text) == read_exposition(again) == read_exposition(WHOLE)
    reading = read_exposition(text)
    assert (reading.running, reading.prefix_queries, reading.token_gaps_s) == (3, 70, 0.5)
    assert (reading.cache_blocks, reading.started_at_s) == (10, 5.0)
    assert b"_bucket" not in text and b"time_to_first" not in text


def test_who_can_not_choose_is_asked_for_everything_from_then_on(tmp_path: Path) -> None:
    assert asked(tmp_path, tell_nothing, times=3) == ([WHOLE] * 3, "cwww")
    assert asked(tmp_path, refuse, times=2) == ([WHOLE] * 2, "cww")


def test_who_is_not_ready_is_asked_again_for_what_is_read(tmp_path: Path) -> None:
    assert asked(tmp_path, fail, times=2) == ([None] * 2, "cc")
    # What holds both back is the engine; it is not known yet whether it can choose.
    assert asked(tmp_path, refuse, whole=fail, times=2) == ([None] * 2, "cwcw")


def test_metrics_without_end_are_no_metrics(tmp_path: Path) -> None:
    """They are read in one piece of the event loop, which four MiB of samples held for a third of a second."""

    async def tell_too_much(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"process_start_time_seconds 1\n" * (2 << 15))

    assert asked(tmp_path, tell_too_much, times=1)[0] == [None]
