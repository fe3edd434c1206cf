"""A decode engine dies at any point: another one takes over, and the client sees one whole answer."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest

from ..stand_in import answer_text
from ..world import OPTIONS, World, route_of

InWorld = Callable[..., None]
LONG = list(range(50, 250)) * 5
SHORT = list(range(60, 90))
CHAT = {"messages": [{"role": "user", "content": "tell me " * 40}]}
BEFORE_THE_FIRST_BYTE = ("before-headers", "in-body", "http-500")
IN_A_STREAM = ("mid-stream", "mid-event", "error-event", "early-end")


async def stream(world: World, path: str, body: Mapping[str, Any]) -> tuple[Mapping[str, str], list[Any]]:
    """The answer's headers and its events; the mark at the end is None."""
    async with world.client.post(path, json={"stream": True} | dict(body)) as response:
        assert response.status == 200
        raw = await response.read()
    assert raw.endswith(b"\n\n")
    parts = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]
    return response.headers, [None if part == b"[DONE]" else orjson.loads(part) for part in parts]


def text_of(events: list[Any]) -> str:
    choices = [event["choices"][0] for event in events if event and event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"]["content"] for c in choices)


@pytest.mark.parametrize("prompt", [LONG, SHORT], ids=["offload", "local"])
@pytest.mark.parametrize("fault", [*BEFORE_THE_FIRST_BYTE, "refuses"])
def test_a_whole_answer_comes_from_another_engine(in_world: InWorld, fault: str, prompt: list[int]) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        if fault == "refuses":
            await world.decode.stop_http()
        else:
            world.decode.dies = fault
        route, answer = await world.complete(prompt)
        assert answer["choices"][0]["text"] == answer_text(prompt)
        assert route["decode"] == "spare" and route["prefill"] in ("remote", "local")
        assert world.spare.loaded == [len(prompt) - 1]
        reason = {"refuses": "unreachable", "before-headers": "unreachable", "in-body": "died"}.get(
            fault, fault
        )
        assert await world.metric(f'prfaas_gateway_decode_failures_total{{reason="{reason}"}}') == 1
        # An engine that answers, though with an error, stays in routing: the request may be at fault.
        assert world.plane.suspected == ([] if fault == "http-500" else [("decode", True)])
        assert len(world.plane.observed) == 1

    in_world(body, spare=True)


@pytest.mark.parametrize("fault", ["before-headers", "after-headers", "http-500"])
def test_a_stream_that_has_not_begun_comes_whole_from_another_engine(in_world: InWorld, fault: str) -> None:
    async def body(world: World) -> None:
        world.decode.dies = fault
        headers, events = await stream(world, "/v1/completions", {"prompt": LONG, "max_tokens": 9})
        assert "decode=spare" in headers["x-prfaas-route"]
        assert text_of(events) == answer_text(LONG, 9) and events.count(None) == 1
        assert {event["id"][-5:] for event in events if event} == {"spare"}

    in_world(body, spare=True)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("dies_after", [1, 4, 8])
@pytest.mark.parametrize("fault", IN_A_STREAM)
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_is_continued_by_another_engine(
    in_world: InWorld, fault: str, chat: bool, dies_after: int, usage: bool
) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked: dict[str, Any] = (
            CHAT | {"max_completion_tokens": 9} if chat else {"prompt": LONG, "max_tokens": 9}
        )
        asked |= {"temperature": 0.5, "top_p": 0.9, "stop": ["#"], "model": "stand-in"}
        if usage:
            asked["stream_options"] = {"include_usage": True}
        _, whole = await stream(world, path, asked)
        before = len(world.spare.generated())
        world.decode.dies, world.decode.dies_after = fault, dies_after
        _, broken = await stream(world, path, asked)
        # But for the id, which is each request's own, the client can't tell the difference.
        ids = {event.pop("id") for event in broken if event}
        for event in whole:
            if event:
                event.pop("id")
        assert broken == whole and len(ids) == 1 and ids.pop().endswith("decode")
        (rest,) = world.spare.generated()[before:]
        assert rest.path == path
        assert rest.body["max_completion_tokens" if chat else "max_tokens"] == 9 - dies_after
        # The stop string may have begun before the seam: the gateway looks for it.
        assert (rest.body["temperature"], rest.body["top_p"], rest.body.get("stop")) == (0.5, 0.9, None)
        assert await world.metric('prfaas_gateway_continuations_total{outcome="continued"}') == 1
        assert await world.metric("prfaas_gateway_requests_total{") == 2
        assert len(world.plane.observed) == 2

    in_world(body, spare=True)


@pytest.mark.parametrize("fault", IN_A_STREAM)
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_before_the_first_token_any_stream_goes_to_another_engine(
    in_world: InWorld, fault: str, chat: bool
) -> None:
    async def body(world: World) -> None:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked = (CHAT if chat else {"prompt": LONG}) | {"response_format": {"type": "json_object"}, "seed": 5}
        _, whole = await stream(world, path, asked)
        world.decode.dies, world.decode.dies_after = fault, 0
        headers, events = await stream(world, path, asked)
        # Not even a role came from the first one.
        assert {event["id"][-5:] for event in events if event} == {"spare"}
        assert text_of(events) == text_of(whole) and "decode=spare" in headers["x-prfaas-route"]
        assert await world.metric("prfaas_gateway_continuations_total{") == 0

    in_world(body, spare=True)


def test_an_answer_that_was_complete_but_for_its_end_needs_no_other_engine(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        asked = {"prompt": LONG, "max_tokens": 5, "stream_options": {"include_usage": True}}
        _, whole = await stream(world, "/v1/completions", asked)
        world.decode.dies = "before-usage"
        _, broken = await stream(world, "/v1/completions", asked)
        for event in (*whole, *broken):
            if event:
                event.pop("id")
        assert broken == whole and world.spare.generated() == []
        assert await world.metric('prfaas_gateway_continuations_total{outcome="finished"}') == 1

    in_world(body, spare=True)


def test_a_continuation_that_dies_is_continued_too(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None and world.third is not None
        world.decode.dies = world.spare.dies = "mid-stream"
        world.decode.dies_after, world.spare.dies_after = 2, 3
        asked = {"prompt": LONG, "max_tokens": 9, "stream_options": {"include_usage": True}}
        _, events = await stream(world, "/v1/completions", asked)
        assert text_of(events) == answer_text(LONG, 9) and events[-1] is None
        assert events[-2]["usage"] == {"prompt_tokens": 1000, "completion_tokens": 9, "total_tokens": 1009}
        assert [e.body["max_tokens"] for e in (*world.spare.generated(), *world.third.generated())] == [7, 4]

    in_world(body, spare=True, third=True)


def test_a_stream_that_kills_engines_does_not_reach_them_all(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None and world.third is not None
        world.decode.dies = world.spare.dies = "mid-stream"
        _, events = await stream(world, "/v1/completions", {"prompt": LONG, "max_tokens": 9})
        assert "error" in events[-1] and text_of(events[:-1]) == answer_text(LONG, 2)
        assert world.spare.generated() and not world.third.generated()
        assert await world.metric('prfaas_gateway_continuations_total{outcome="attempts"}') == 1

    in_world(body, spare=True, third=True, options=replace(OPTIONS, decode_attempts=2))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"seed": 3},
        {"seed": 3, "temperature": 1.0},
        {"frequency_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"bad_words": ["x"]},
    ],
    ids=str,
)
def test_what_counts_the_answers_own_tokens_ends_with_an_error(
    in_world: InWorld, fields: dict[str, Any]
) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        world.decode.dies = "mid-stream"
        asked = {"prompt": LONG, "max_tokens": 9} | fields
        _, events = await stream(world, "/v1/completions", asked)
        assert "died" in events[-1]["error"]["message"] and None not in events
        assert world.spare.generated() == []
        assert await world.metric('prfaas_gateway_continuations_total{outcome="parameters"}') == 1
        assert (
            await world.metric('prfaas_gateway_requests_total{endpoint="completions",outcome="engine_error"')
            == 1
        )

    in_world(body, spare=True)


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "some_new_field": 1},
        {"logit_bias": {"5": 1}, "repetition_penalty": 1.2, "top_k": 5, "skip_special_tokens": False},
        {"return_token_ids": True},
        {"return_tokens_as_token_ids": True, "logprobs": 1},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_no_sample_never_matters(in_world: InWorld, fields: dict[str, Any], chat: bool) -> None:
    async def body(world: World) -> None:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked: dict[str, Any] = (CHAT if chat else {"prompt": LONG}) | {"max_tokens": 9} | fields
        _, whole = await stream(world, path, asked)
        world.decode.dies, world.decode.dies_after = "mid-stream", 4
        _, broken = await stream(world, path, asked)
        for event in (*whole, *broken):
            if event:
                event.pop("id")
        assert broken == whole
        assert await world.metric('prfaas_gateway_continuations_total{outcome="continued"}') == 1

    in_world(body, spare=True)


def test_stop_strings_end_the_answer_wherever_the_seam_is(in_world: InWorld) -> None:
    draw, answer = random.Random(35), answer_text(LONG, 40)

    async def body(world: World) -> None:
        for _ in range(40):
            begin, length = draw.randrange(30), draw.randint(1, 6)
            asked = {
                "prompt": LONG,
                "max_tokens": 30,
                "stop": [answer[begin : begin + length], "zz"],
                "min_tokens": draw.choice((0, 0, 12)),
                "include_stop_str_in_output": draw.random() < 0.3,
                "stream_options": {"include_usage": True},
            }
            world.decode.dies, world.decode.joins = None, draw.randint(1, 3)
            _, whole = await stream(world, "/v1/completions", asked)
            world.decode.dies, world.decode.dies_after = "mid-stream", draw.randint(1, 20)
            _, broken = await stream(world, "/v1/completions", asked)
            assert text_of(broken) == text_of(whole) and broken[-1] is None
            ended = [[e["choices"][0] for e in told if e and e["choices"]][-1] for told in (whole, broken)]
            for field in ("finish_reason", "stop_reason"):
                assert ended[0][field] == ended[1][field]
            counts = [told[-2]["usage"]["completion_tokens"] for told in (whole, broken)]
            # Of tokens that come together it can't be said which one ended the answer.
            assert 0 <= counts[1] - counts[0] < world.decode.joins
            world.plane.suspected.clear()
            world.plane.prefers = "decode"

    in_world(body, spare=True)


def test_without_another_engine_a_stream_ends_with_the_engines_own_error(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.dies = "error-event"
        _, events = await stream(world, "/v1/completions", {"prompt": LONG, "max_tokens": 9})
        assert events[-1]["error"]["message"] == "EngineDeadError" and None not in events

    in_world(body)


@pytest.mark.parametrize("fault", BEFORE_THE_FIRST_BYTE)
def test_without_another_engine_the_client_is_told(in_world: InWorld, fault: str) -> None:
    async def body(world: World) -> None:
        world.decode.dies = fault
        response, answer = await world.post("/v1/completions", {"prompt": LONG})
        assert response.status == (500 if fault == "http-500" else 503)
        assert answer["error"]["message"]
        assert route_of(response)["decode"] == "decode" and len(response.headers["X-Request-Id"]) == 32

    in_world(body)


def test_a_request_that_kills_engines_does_not_reach_them_all(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        world.decode.dies = world.spare.dies = "before-headers"
        response, _ = await world.post("/v1/completions", {"prompt": LONG})
        assert response.status == 503 and world.decode.generated() and not world.spare.generated()

    in_world(body, spare=True, options=replace(OPTIONS, decode_attempts=1))


def test_a_dead_engine_that_was_to_tell_token_ids_is_not_waited_for(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        await world.complete("x" * 300)
        await world.decode.stop_http()
        # Its ids come from whoever else decodes; the prompt is still looked at.
        route, _ = await world.complete("y" * 300)
        assert (route["decode"], route["uncached"]) == ("spare", "300")
        assert world.plane.suspected == [("decode", True)]

    in_world(body, spare=True, other_ids=True)
