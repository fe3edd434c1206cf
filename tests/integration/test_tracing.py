"""One trace of one request, from the client to the last token: the gateway's spans and those of real vLLM engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from tests.trace_collector import Collector, SeenSpan, running_collector

from prfaas.core.deployment import load_deployment
from prfaas.serving.engines.running import RunningEngines
from prfaas.serving.live import serve_live

from .stack import ENGINE_ENV, MODEL, PATIENCE_S, TEMPLATES, prompt, write_deployment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow("engines of its own, that send their traces in batches"),
    pytest.mark.timeout(1800),
]

TOKENS, ANSWER_TOKENS = 2500, 5
CLIENTS_SPAN = "7" * 16
SERVER = 2


@asynccontextmanager
async def running_traced(directory: Path, collector: Collector) -> AsyncIterator[aiohttp.ClientSession]:
    """One engine that prefills elsewhere, one that decodes, and a gateway: all send their spans to `collector`."""
    path = write_deployment(directory, bandwidth="100 Mbit/s", max_model_len=8192)
    document = json.loads(path.read_text())
    document["clusters"][1]["instances"].pop(0)
    document["gateway"]["tracing"] = {"endpoint": collector.endpoint}
    path.write_text(json.dumps(document))
    deployment = load_deployment(path)
    engines = RunningEngines(deployment, extra_env=ENGINE_ENV, templates=TEMPLATES)
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    try:
        await asyncio.to_thread(engines.start)
        await asyncio.to_thread(engines.wait_ready)
        gateway = asyncio.create_task(serve_live(deployment, ready=port.set_result))
        try:
            await asyncio.wait({gateway, port}, return_when=asyncio.FIRST_COMPLETED)
            if gateway.done():
                gateway.result()
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port.result()}") as client:
                yield client
        finally:
            gateway.cancel()
            with suppress(asyncio.CancelledError):
                await gateway
    finally:
        await asyncio.to_thread(engines.stop)


async def ask(client: aiohttp.ClientSession, trace_id: str, *, sampled: bool) -> None:
    headers = {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-{sampled:02x}"}
    # Its end is another one's beginning: nothing of it is cached.
    body = {"model": MODEL, "prompt": prompt(int(trace_id[:2]), TOKENS), "max_tokens": ANSWER_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True}
    async with client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        route = response.headers["x-prfaas-route"]
        assert route.startswith("offload; prefill=east-prefill-0; decode=home-decode-0"), route
        assert "fallback" not in route


async def sent(collector: Collector, trace_id: str, servers: int) -> list[SeenSpan]:
    """The spans of a trace, when so many of them are those of servers."""

    def found() -> list[SeenSpan]:
        return [span for span in collector.spans if span.trace_id == trace_id]

    async with asyncio.timeout(PATIENCE_S):
        while sum(span.kind == SERVER for span in found()) < servers:
            await asyncio.sleep(0.1)
    return found()


def test_one_trace_from_the_client_to_the_last_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who the client has not sampled leaves no span at any engine."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    unsampled, traced = "11" * 16, "22" * 16

    async def main() -> None:
        async with running_collector() as collector, running_traced(tmp_path, collector) as client:
            await ask(client, unsampled, sampled=False)
            await ask(client, traced, sampled=True)
            spans = await sent(collector, traced, servers=3)
            check(spans)
            assert [span for span in collector.spans if span.trace_id == unsampled] == []

    asyncio.run(main())


def check(spans: list[SeenSpan]) -> None:
    (root,) = [span for span in spans if span.parent_id == CLIENTS_SPAN]
    assert (root.name, root.resource["service.name"]) == (f"text_completion {MODEL}", "prfaas-gateway")
    named = {span.name: span for span in spans if span.parent_id == root.span_id}
    assert {"prefill", "kv_transfer", "decode"} <= named.keys()
    moved = named["kv_transfer"].attributes
    assert (moved["prfaas.kv.producer"], moved["prfaas.kv.consumer"]) == ("east-prefill-0", "home-decode-0")
    assert moved["prfaas.kv.bytes"] > 0
    # Each engine's own span is a child of the gateway's call to it.
    engines = {span.resource.get("service.instance.id"): span for span in spans if span.name == "llm_request"}
    assert engines.keys() == {"east-prefill-0", "home-decode-0"}
    for call, engine, made in (
        ("prefill", "east-prefill-0", 1),
        ("decode", "home-decode-0", ANSWER_TOKENS),
    ):
        span = engines[engine]
        assert (span.parent_id, span.resource["service.name"]) == (named[call].span_id, "vllm")
        assert span.attributes["gen_ai.usage.completion_tokens"] == made
        assert named[call].begun_ns <= span.begun_ns <= named[call].ended_ns
    assert engines["home-decode-0"].attributes["gen_ai.usage.prompt_tokens"] == TOKENS
    assert len(spans) == 1 + len(named) + len(engines)
    assert not any(span.is_error for span in spans)
