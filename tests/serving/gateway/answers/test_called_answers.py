"""A chat that breaks once a tool has been called is continued: each call whole, with one id, and none of them twice."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.serving.gateway.answers import calls
from prfaas.serving.gateway.answers.answer_bytes import TakenIds
from prfaas.serving.gateway.answers.transcript import BegunAnswer, NotPlainError
from prfaas.serving.gateway.prompts.prompt import Endpoint

from ..stand_in import CALL_TOKENS, DERENDER, StandInEngine
from ..world import World
from .test_decode_deaths import CHAT, stream

InWorld = Callable[..., None]
CHATS = "/v1/chat/completions"
TOKENS, CALLS_AFTER = 17, 3
ASKED: dict[str, Any] = CHAT | {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "max_completion_tokens": TOKENS,
    "stream_options": {"include_usage": True},
}
CONTINUED = 'prfaas_gateway_continuations_total{outcome="%s"}'


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_PAUSE_S", 0.0)


def read(events: list[Any]) -> tuple[str, dict[int, dict[str, str]], list[str], Any]:
    """The content, the calls by their index, why the answer ended, and its usage."""
    content, called, reasons, usage = "", dict[int, dict[str, str]](), [], None
    for event in filter(None, events):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for told in choice["delta"].get("tool_calls") or ():
                assert None not in told.values() and None not in told["function"].values()
                call = called.setdefault(told["index"], {"arguments": ""})
                if "id" in told:
                    assert "id" not in call
                    call |= {"id": told["id"], "name": told["function"]["name"]}
                call["arguments"] += told["function"]["arguments"]
    return content, called, reasons, usage


def unnamed(called: dict[int, dict[str, str]]) -> dict[int, dict[str, str]]:
    """Without their ids, which are each answer's own."""
    assert len({call["id"] for call in called.values()}) == len(called)
    return {index: call | {"id": ""} for index, call in called.items()}


def states(engine: StandInEngine) -> list[dict[str, Any]]:
    """Of what it was asked to derender."""
    return [seen.body["stream_state"] for seen in engine.seen if seen.path == DERENDER]


def prepare(world: World) -> None:
    for engine in world.engines:
        engine.calls_after = CALLS_AFTER


@pytest.mark.parametrize("fault", ["mid-stream", "mid-event", "error-event"])
@pytest.mark.parametrize("dies_after", [4, 6, CALLS_AFTER + CALL_TOKENS, 12, 16])
def test_a_call_goes_on_where_it_broke(in_world: InWorld, dies_after: int, fault: str) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        prepare(world)
        _, whole = await stream(world, CHATS, ASKED)
        world.decode.dies, world.decode.dies_after = fault, dies_after
        _, broken = await stream(world, CHATS, ASKED)
        content, called, reasons, usage = read(broken)
        expected = read(whole)
        assert (content, unnamed(called)) == (expected[0], unnamed(expected[1]))
        assert (reasons, usage) == (["length"], expected[3]) and broken.count(None) == 1
        assert len({event["id"] for event in broken if event}) == 1
        # The tokens before the seam are the first engine's, and the KV of all but the last is loaded.
        (asked,) = [seen for seen in world.spare.seen if seen.path == "/inference/v1/generate"]
        assert asked.body["sampling_params"]["max_tokens"] == TOKENS - dies_after
        assert world.spare.loaded == [len(asked.body["token_ids"]) - 1]
        assert list(asked.body["kv_transfer_params"]) == ["prfaas"]
        assert await world.metric(CONTINUED % "continued") == 1

    in_world(body, spare=True)


def test_an_answer_that_ends_by_itself_has_called_tools(in_world: InWorld) -> None:
    """And the token that ends it is none of its text."""

    async def body(world: World) -> None:
        prepare(world)
        for engine in world.engines:
            engine.end = "e"
        asked = ASKED | {"max_completion_tokens": 2000, "min_tokens": 9}
        _, whole = await stream(world, CHATS, asked)
        world.decode.dies, world.decode.dies_after = "mid-stream", 7
        _, broken = await stream(world, CHATS, asked)
        content, called, reasons, usage = read(broken)
        assert (content, unnamed(called)) == (read(whole)[0], unnamed(read(whole)[1]))
        assert reasons == read(whole)[2] == ["tool_calls"] and usage == read(whole)[3]

    in_world(body, spare=True)


def test_ids_are_told_to_who_asked_for_them(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        prepare(world)
        asked = ASKED | {"return_token_ids": True}
        told = []
        for dies in (None, "mid-stream"):
            world.decode.dies, world.decode.dies_after = dies, 6
            _, events = await stream(world, CHATS, asked)
            told.append([one for e in events if e for c in e["choices"] for one in c.get("token_ids") or ()])
        assert told[0] == told[1] and len(told[0]) == TOKENS

    in_world(body, spare=True)


def test_a_second_engine_that_dies_in_a_call_is_followed_by_a_third(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        prepare(world)
        _, whole = await stream(world, CHATS, ASKED)
        world.decode.dies = world.spare.dies = "mid-stream"
        # Of its own tokens: in the middle of the second call.
        world.decode.dies_after, world.spare.dies_after = 5, 5
        world.spare.chunk_s = 0.02
        _, broken = await stream(world, CHATS, ASKED)
        called = read(broken)[1]
        assert unnamed(called) == unnamed(read(whole)[1]) and read(broken)[3] == read(whole)[3]
        # The third one is told of both calls that have begun: its own parser would name them anew.
        assert world.third is not None
        state = states(world.third)[0]
        assert state["last_tool_call_ids"] == [called[index]["id"] for index in range(2)]

    in_world(body, spare=True, third=True)


def test_the_answer_is_read_again_in_the_steps_in_which_it_came(in_world: InWorld) -> None:
    """What a parser makes of tokens may depend on which of them come together."""

    async def body(world: World) -> None:
        assert world.spare is not None
        prepare(world)
        world.decode.joins, world.decode.dies, world.decode.dies_after = 3, "mid-stream", 9
        _, broken = await stream(world, CHATS, ASKED)
        assert states(world.spare)[0]["output_chunk_lens"] == [3, 3, 3] and broken[-1] is None

    in_world(body, spare=True)


@pytest.mark.parametrize("fields", [{"stop": ["never"]}, {"logprobs": True}], ids=str)
def test_what_tokens_alone_do_not_tell_ends_with_an_error(in_world: InWorld, fields: dict[str, Any]) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        prepare(world)
        world.decode.dies, world.decode.dies_after = "mid-stream", 6
        _, events = await stream(world, CHATS, ASKED | fields)
        assert "died" in events[-1]["error"]["message"] and None not in events
        assert not world.spare.generated()
        assert await world.metric(CONTINUED % "in-call") == 1

    in_world(body, spare=True)


def test_without_derender_a_call_ends_with_an_error(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        assert world.spare is not None
        prepare(world)
        world.decode.dies, world.decode.dies_after = "mid-stream", 6
        world.spare.renders = False
        _, events = await stream(world, CHATS, ASKED)
        assert "error" in events[-1] and not any(seen.path == DERENDER for seen in world.spare.seen)
        assert await world.metric(CONTINUED % "in-call") == 1

    in_world(body, spare=True)


@given(st.lists(st.integers(0, 4), max_size=9), st.data())
def test_steps_add_up_to_the_ids(steps: list[int], data: st.DataObject) -> None:
    taken = TakenIds(Endpoint.CHAT, is_asked=False)
    for step in steps:
        taken.keep([7] * step)
    count = data.draw(st.integers(0, sum(steps)))
    taken.cut(count)
    assert taken.ids == array("I", [7] * count) and sum(taken.steps) == taken.shown == count
    assert list(taken.steps)[:-1] == steps[: len(taken.steps)][:-1]


@pytest.mark.parametrize(
    "said",
    [
        b"data: 5",
        b'data: {"choices": 5}',
        b'data: {"other": 1}',
        b'data: {"choices": [{"token_ids": ["x"]}]}',
        b'data: {"choices": [{"index": 0}]}',
        b'data: {"choices": [[1]]}',
        b"data: {",
    ],
)
def test_what_is_no_event_of_tokens_is_not_read_on(said: bytes) -> None:
    """An engine may say anything."""
    answers = calls.CalledAnswers.__new__(calls.CalledAnswers)
    with pytest.raises(NotPlainError):
        asyncio.run(answers.told(said + b"\n\n", cast(BegunAnswer, None), "decode-0"))
