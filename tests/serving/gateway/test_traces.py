"""The trace of a request as a collector gets it: its spans, what they tell, and what it costs when nobody takes it."""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from tests.trace_collector import Collector, SeenSpan, running_collector

from prfaas.core.deployment import TracingConfig
from prfaas.serving.gateway.answers.answer_bytes import finish_reasons
from prfaas.serving.tracing import error_word, otel

from .stand_in import answer_text
from .world import GATEWAY, World, route_of, running_world

SECRET = "s3cr3tpr0mpt"
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))
CLIENTS_TRACE, CLIENTS_SPAN = "5" * 32, "7" * 16
SERVER, CLIENT = 2, 3
SAMPLED = 1

Body = Callable[[World, Collector], Any]
InTraced = Callable[..., None]


@pytest.fixture
def in_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InTraced:
    """Runs an async test body in a fresh world whose gateway sends its traces to a collector."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")

    def run(body: Body, sample_ratio: float = 1.0, **kwargs: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(240), running_collector() as collector:
                tracing = TracingConfig(collector.endpoint, sample_ratio)
                config = replace(GATEWAY, tracing=tracing)
                async with running_world(tmp_path, gateway_config=config, **kwargs) as world:
                    await body(world, collector)
                    await world.settled()

        asyncio.run(main())

    return run


def by_name(spans: list[SeenSpan]) -> dict[str, SeenSpan]:
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


def root_of(spans: list[SeenSpan]) -> SeenSpan:
    (root,) = [span for span in spans if span.kind == SERVER]
    return root


def check_tree(spans: list[SeenSpan]) -> None:
    """Every other span is a child of the request's own, and no longer."""
    root = root_of(spans)
    for span in spans:
        if span is not root:
            assert span.parent_id == root.span_id, span
            assert root.begun_ns <= span.begun_ns <= span.ended_ns <= root.ended_ns, (span, root)


async def traced_id(world: World, response: Any) -> str:
    """The trace of an answered request, by what `prfaas explain` is told."""
    async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
        trace_id = (await page.json())["trace_id"]
    assert isinstance(trace_id, str)
    return trace_id


def test_an_offloaded_request(in_traced: InTraced) -> None:
    async def body(world: World, collector: Collector) -> None:
        world.plane.links.resent[("remote", "decode")] = 7000
        # The reason of the end, the usage and the mark come in three pieces.
        world.decode.chunk_s = 0.05
        asked = {"prompt": LONG, "stream": True, "max_tokens": 6, "stream_options": {"include_usage": True}}
        headers = {"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01", "tracestate": "vendor=1"}
        async with world.client.post("/v1/completions", json=asked, headers=headers) as response:
            await response.content.readany()
            world.plane.links.resent[("remote", "decode")] = 9000
            await response.read()
            route = route_of(response)
        assert await traced_id(world, response) == CLIENTS_TRACE
        spans = await collector.trace(CLIENTS_TRACE)
        check_tree(spans)
        named = by_name(spans)
        root = named.pop("text_completion stand-in")
        assert set(named) == {
            "read",
            "tokenize",
            "decide",
            "wait_for_turn",
            "prefill",
            "kv_transfer",
            "decode",
        }
        assert root.parent_id == CLIENTS_SPAN and root.kind == SERVER and not root.is_error
        told = root.attributes
        assert told["gen_ai.operation.name"] == "text_completion"
        assert (told["gen_ai.request.model"], told["gen_ai.request.stream"]) == ("stand-in", True)
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (len(LONG), 6)
        assert told["gen_ai.response.finish_reasons"] == ["length"]
        assert 0 < told["gen_ai.response.time_to_first_chunk"] <= told["gen_ai.latency.e2e"]
        assert told["gen_ai.request.id"] == response.headers["X-Request-Id"]
        assert (told["prfaas.route"], told["prfaas.outcome"]) == ("offload", "ok")
        assert told["http.response.status_code"] == 200
        assert [name for name, _ in root.events] == ["first_byte"]

        decide = named["decide"].attributes
        assert (decide["prfaas.reason"], decide["prfaas.policy"]) == ("long", "static_threshold")
        assert (decide["prfaas.uncached_tokens"], decide["prfaas.threshold_tokens"]) == (len(LONG), 100.0)
        prefill, decode, transfer = named["prefill"], named["decode"], named["kv_transfer"]
        assert (prefill.attributes["prfaas.instance"], prefill.attributes["prfaas.cluster"]) == (
            "remote",
            "far",
        )
        assert (decode.attributes["prfaas.instance"], decode.attributes["prfaas.cluster"]) == ("decode", "pd")
        moved = transfer.attributes
        assert moved["prfaas.kv.bytes"] == int(route["bytes"]) == 4 * (len(LONG) - 1)
        assert moved["prfaas.kv.wire_bytes"] == moved["prfaas.kv.bytes"]
        assert moved["prfaas.kv.overlapped_fraction"] == pytest.approx(float(route["hidden"]), abs=0.01)
        assert moved["prfaas.kv.link"] == "far->pd"
        # What the kernels sent again after the transfer is not its own.
        assert moved["prfaas.kv.link_resent_bytes"] == 0
        assert not any(span.is_error for span in spans)
        # The steps follow each other; the transfer begins with the prefill.
        assert named["tokenize"].ended_ns <= named["decide"].begun_ns
        assert named["wait_for_turn"].ended_ns <= prefill.begun_ns <= transfer.begun_ns <= transfer.ended_ns

        for engine, span in ((world.remote, prefill), (world.decode, decode)):
            assert span.kind == CLIENT
            seen = engine.generated()[-1].headers
            assert seen["traceparent"] == f"00-{CLIENTS_TRACE}-{span.span_id}-01"
            assert seen["tracestate"] == "vendor=1"
        resource = collector.resources[0]
        assert (resource["service.name"], resource["prfaas.deployment"]) == ("prfaas-gateway", "test")

    in_traced(body)


def test_what_was_sent_again_while_the_transfer_ran(in_traced: InTraced) -> None:
    async def body(world: World, collector: Collector) -> None:
        world.plane.links.resent[("remote", "decode")] = 7000
        world.remote.lingers = "ends"
        request = asyncio.create_task(world.complete(LONG))
        await collector.until(lambda: world.decode.early == 1)
        world.plane.links.resent[("remote", "decode")] = 9500
        world.remote.goes_on.set()
        await request
        await collector.until(lambda: any(span.kind == SERVER for span in collector.spans))
        check_tree(collector.spans)
        named = by_name(collector.spans)
        assert named["kv_transfer"].attributes["prfaas.kv.link_resent_bytes"] == 2500
        # The decode engine is asked before the last byte has come.
        assert named["decode"].begun_ns < named["kv_transfer"].ended_ns <= named["decode"].ended_ns

    in_traced(body)


def test_names_are_the_conventions(in_traced: InTraced) -> None:
    seen: list[SeenSpan] = []

    async def body(world: World, collector: Collector) -> None:
        await world.complete(LONG)
        await collector.until(lambda: any(span.kind == SERVER for span in collector.spans))
        seen.extend(collector.spans)

    in_traced(body)
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    # As vLLM's own spans call what the conventions have no name for.
    known |= {"gen_ai.request.id", "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"}
    used = {name for span in seen for name in span.attributes if name.startswith("gen_ai.")}
    assert used and used <= known


def test_a_fallback(in_traced: InTraced) -> None:
    async def body(world: World, collector: Collector) -> None:
        world.remote.fails = 500
        response, answer = await world.post("/v1/completions", {"model": "stand-in", "prompt": LONG})
        assert answer["choices"][0]["text"] == answer_text(LONG)
        spans = await collector.trace(await traced_id(world, response))
        check_tree(spans)
        root = root_of(spans)
        assert not root.is_error
        assert (
            "prfaas.fallback",
            {"prfaas.reason": "http-500", "prfaas.prefill.instance": "remote"},
        ) in root.events
        first, second = sorted((s for s in spans if s.name == "prefill"), key=lambda span: span.begun_ns)
        assert first.is_error and first.attributes["error.type"] == "http-500"
        assert (second.attributes["prfaas.instance"], second.is_error) == ("local", False)
        given_up, moved = sorted(
            (s for s in spans if s.name == "kv_transfer"), key=lambda span: span.begun_ns
        )
        assert given_up.is_error and "prfaas.kv.bytes" not in given_up.attributes
        assert moved.attributes["prfaas.kv.link"] == "pd" and not moved.is_error
        assert "prfaas.kv.link_resent_bytes" not in moved.attributes
        assert root.attributes["prfaas.attempts"] == 2

    in_traced(body)


def test_a_transfer_that_fails_is_an_error_of_its_own_span(in_traced: InTraced) -> None:
    async def body(world: World, collector: Collector) -> None:
        world.remote.lingers = "aborts"
        asking = asyncio.create_task(world.post("/v1/completions", {"model": "stand-in", "prompt": LONG}))
        await collector.until(lambda: world.decode.early == 1)
        world.remote.goes_on.set()
        response, _ = await asking
        spans = await collector.trace(await traced_id(world, response))
        check_tree(spans)
        failed = min((s for s in spans if s.name == "kv_transfer"), key=lambda span: span.begun_ns)
        assert failed.is_error and failed.attributes["error.type"] == "transfer-failed"

    in_traced(body)


@pytest.mark.parametrize("left_in", ["prefill", "transfer", "stream"])
def test_a_stream_that_its_client_leaves(in_traced: InTraced, left_in: str) -> None:
    async def body(world: World, collector: Collector) -> None:
        world.decode.chunks, world.decode.chunk_s = 1000, 0.01
        world.remote.hangs = left_in == "prefill"
        world.remote.lingers = "ends" if left_in == "transfer" else None
        asked = {"prompt": LONG, "stream": True}
        if left_in == "stream":
            async with world.client.post("/v1/completions", json=asked) as response:
                await response.content.readany()
        else:
            hanging = asyncio.create_task(world.post("/v1/completions", asked))
            begun = world.decode if left_in == "transfer" else world.remote
            await collector.until(lambda: len(begun.generated()) == 1)
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
        await collector.until(lambda: any(span.kind == SERVER for span in collector.spans))
        await world.settled()
        spans = collector.spans
        check_tree(spans)
        root, named = root_of(spans), by_name(spans)
        assert (root.attributes["prfaas.outcome"], root.attributes["error.type"]) == (
            "cancelled",
            "cancelled",
        )
        assert not root.is_error
        # While the last bytes are on their way, three are open; two of them end after the request itself.
        left = {"decode"} if left_in == "stream" else {"prefill", "kv_transfer"}
        for name in left | ({"decode"} if left_in == "transfer" else set()):
            assert named[name].attributes["error.type"] == "cancelled"
        assert ("decode" in named) is (left_in != "prefill")

    in_traced(body)


def test_a_decode_engine_that_dies(in_traced: InTraced) -> None:
    async def body(world: World, collector: Collector) -> None:
        world.decode.dies = "before-headers"
        response, _ = await world.post("/v1/completions", {"prompt": SHORT})
        assert response.status == 200
        spans = await collector.trace(await traced_id(world, response))
        check_tree(spans)
        first, second = sorted((s for s in spans if s.name == "decode"), key=lambda span: span.begun_ns)
        assert first.is_error and not second.is_error
        assert (first.attributes["prfaas.instance"], second.attributes["prfaas.instance"]) == (
            "decode",
            "spare",
        )
        notes = [told["prfaas.note"] for name, told in root_of(spans).events if name == "prfaas.note"]
        assert notes == [f"decode failed: {first.attributes['error.type']}"]

    in_traced(body, spare=True)


def test_refused_requests_and_broken_streams_have_traces(in_traced: InTraced) -> None:
    async def body(world: World, collector: Collector) -> None:
        response, _ = await world.post("/v1/completions", {"prompt": SHORT, "model": SECRET})
        assert response.status == 404
        (root,) = await collector.trace(await traced_id(world, response))
        assert root.attributes["error.type"] == "client_error" and not root.is_error
        assert root.attributes["http.response.status_code"] == 404
        world.decode.dies = "error-event"
        async with world.client.post("/v1/completions", json={"prompt": SHORT, "stream": True}) as broken:
            await broken.read()
        root = root_of(await collector.trace(await traced_id(world, broken)))
        assert root.is_error and root.attributes["error.type"] == "engine_error"
        response, _ = await world.post("/tokenize", {"prompt": "x"})
        root = root_of(await collector.trace(await traced_id(world, response)))
        assert root.name == "tokenize" and "gen_ai.operation.name" not in root.attributes

    in_traced(body)


def test_what_is_not_sampled_is_not_sent(in_traced: InTraced) -> None:
    async def body(world: World, collector: Collector) -> None:
        response, _ = await world.post("/v1/completions", {"prompt": LONG})
        async with world.admin.get(f"/prfaas/requests/{response.headers['X-Request-Id']}") as page:
            assert (await page.json())["trace_id"] is None
        # Engines would begin a trace of their own, and send it.
        for engine in (world.remote, world.decode):
            flags = int(engine.generated()[-1].headers["traceparent"][-2:], 16)
            assert flags & SAMPLED == 0
        headers = {"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"}
        await world.post("/v1/completions", {"prompt": SHORT}, headers=headers)
        # A client that traces has decided.
        await collector.trace(CLIENTS_TRACE)
        assert {span.trace_id for span in collector.spans} == {CLIENTS_TRACE}
        # They count once the collector's answer has come.
        while await world.metric("prfaas_gateway_trace_spans_total") != len(collector.spans):
            await asyncio.sleep(0.02)

    in_traced(body, sample_ratio=0.0)


@pytest.mark.parametrize("given", ["00-" + "0" * 32 + "-" + CLIENTS_SPAN + "-01", "no trace", "00-12-34-01"])
def test_a_malformed_parent_is_not_continued(in_traced: InTraced, given: str) -> None:
    async def body(world: World, collector: Collector) -> None:
        headers = {"traceparent": given, "tracestate": "vendor=1"}
        response, _ = await world.post("/v1/completions", {"prompt": SHORT}, headers=headers)
        root = root_of(await collector.trace(await traced_id(world, response)))
        assert root.parent_id == ""
        seen = world.decode.generated()[-1].headers
        assert seen["traceparent"].startswith(f"00-{root.trace_id}-") and "tracestate" not in seen

    in_traced(body)


def test_without_tracing_engines_get_what_the_client_sent(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), running_world(tmp_path) as world:
            headers = {"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01", "tracestate": "vendor=1"}
            await world.post("/v1/completions", {"prompt": LONG}, headers=headers)
            for engine in (world.remote, world.decode):
                seen = engine.generated()[-1].headers
                assert {name: seen[name] for name in headers} == headers
            await world.settled()

    asyncio.run(main())


def test_the_headers_file_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    secrets = tmp_path / "headers"
    secrets.write_text("# of the collector\nAuthorization: Bearer t0ken of many = signs\n")
    secrets.chmod(0o600)

    async def main() -> None:
        async with asyncio.timeout(120), running_collector() as collector:
            config = replace(GATEWAY, tracing=TracingConfig(collector.endpoint, headers_file=secrets))
            async with running_world(tmp_path / "world", gateway_config=config) as world:
                await world.complete(SHORT)
                await collector.until(lambda: bool(collector.headers))
        assert collector.headers[0]["Authorization"] == "Bearer t0ken of many = signs"

    (tmp_path / "world").mkdir()
    asyncio.run(main())


@pytest.mark.parametrize("kind", ["nobody", "hangs", "refuses"])
def test_a_dead_collector_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1" if kind == "nobody" else "20")
    monkeypatch.setattr(otel, "_CLOSE_S", 0.2)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as unused:
            free_port = unused.getsockname()[1]
        async with running_collector(hangs=kind == "hangs", status=400) as collector:
            port = free_port if kind == "nobody" else collector.port
            config = replace(GATEWAY, tracing=TracingConfig(f"http://127.0.0.1:{port}/v1/traces"))
            async with running_world(tmp_path, gateway_config=config) as world:
                for number in range(5):
                    _, answer = await world.complete([*LONG, number])
                    assert answer["choices"][0]["text"] == answer_text([*LONG, number])
                if kind != "hangs":
                    while not await world.metric('prfaas_gateway_trace_spans_total{outcome="failed"}'):
                        await asyncio.sleep(0.02)
                else:
                    await collector.until(lambda: bool(collector.bodies))
                await world.settled()
                closing_s = loop.time()
            # Twenty seconds of a request that hangs are not waited for.
            assert loop.time() - closing_s < 15

    async def bounded() -> None:
        async with asyncio.timeout(120):
            await main()

    asyncio.run(bounded())


def test_the_log_has_the_trace(
    in_traced: InTraced, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World, collector: Collector) -> None:
        response, _ = await world.post("/v1/completions", {"prompt": SHORT})
        trace_id = await traced_id(world, response)
        lines = [getattr(each, "fields", {}) for each in caplog.records]
        # More than one handler may take the same line.
        assert {each["trace_id"] for each in lines if each.get("path") == "/v1/completions"} == {trace_id}

    caplog.set_level(logging.INFO, logger="prfaas.access")
    monkeypatch.setattr(logging.getLogger("prfaas"), "propagate", True)
    in_traced(body)


def test_no_span_holds_anything_of_prompts_or_answers(in_traced: InTraced) -> None:
    async def body(world: World, collector: Collector) -> None:
        answers: list[str] = []
        count = 0
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": SECRET * 30, "user": SECRET, "stop": SECRET}),
            ("/v1/completions", {"prompt": SECRET * 30, "stream": True, SECRET: SECRET}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET * 20}]}),
            ("/v1/completions", {"prompt": SECRET, "model": SECRET}),
            ("/v1/completions", {"prompt": SECRET, "temperature": -1}),
            ("/v1/messages", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}),
            ("/tokenize", {"prompt": SECRET}),
        ]
        headers = {
            "Authorization": SECRET,
            "X-Request-Id": SECRET,
            "User-Agent": SECRET,
            "tracestate": SECRET,
        }
        for dies in (None, "in-body", "error-event", "http-500"):
            for fails in (None, 400, 500):
                world.remote.fails, world.decode.dies = fails, dies
                for path, body_json in asked:
                    count += 1
                    with contextlib.suppress(aiohttp.ClientError):
                        async with world.client.post(path, json=body_json, headers=headers) as response:
                            answers.append(await response.text())
        await collector.until(lambda: sum(span.kind == SERVER for span in collector.spans) == count)
        texts = {json.loads(answer)["choices"][0]["text"] for answer in answers if '"text"' in answer[:80]}
        for raw in collector.bodies:
            assert SECRET.encode() not in raw
            assert not any(text.encode() in raw for text in texts if len(text) > 4)

    in_traced(body, spare=True, third=True)


@pytest.mark.parametrize(
    ("tail", "reasons"),
    [
        (b'"text":"a","finish_reason":"stop","stop_reason":null', ["stop"]),
        (b'{"finish_reason": "length"},{"finish_reason": "tool_calls"}', ["length", "tool_calls"]),
        # In vLLM's answers this is the stop string that the client gave.
        (b'"finish_reason":"stop","stop_reason":"secret"', ["stop"]),
        (b'"stop_reason":"secret"', []),
        (b'"delta":{"stop_reason":"end_turn"}', ["end_turn"]),
        (b'"text":"\\"finish_reason\\":\\"stop\\"","finish_reason":null', []),
    ],
)
def test_finish_reasons_are_of_a_fixed_set(tail: bytes, reasons: list[str]) -> None:
    assert finish_reasons(tail) == reasons


def test_the_words_of_errors() -> None:
    assert error_word(asyncio.CancelledError()) == error_word(ConnectionResetError(SECRET)) == "cancelled"
    assert error_word(ValueError(SECRET)) == "ValueError"
