"""Streams as the packages of OpenAI and Anthropic read them, whose decode engine is lost at one point or another."""

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from prfaas.serving.gateway.answers import calls

from ..prompts.shapes import claude_code_body, codex_body
from ..world import World

InWorld = Callable[..., None]
POINTS = (1, 3, 6, 9, 14)
CALLS_AFTER = 2
# A stand-in's parser counts tokens: the calls must have begun.
IN_CALLS = (3, 4, 7, 11, 16)
TOKENS = 17
SAID: Any = [{"role": "user", "content": "tell me " * 40}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class ErrorEvent(Exception):
    """The package raises nothing for it."""


ERRORS = (ErrorEvent, openai.APIError, anthropic.APIError)
Read = Callable[[str], Awaitable[Any]]


async def completion(base: str) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
        told = await client.completions.create(
            model="stand-in", prompt=SAID[0]["content"], max_tokens=TOKENS, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in told if chunk.choices])


async def chat(base: str, **fields: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
        asked: Any = {"model": "stand-in", "messages": SAID, "max_completion_tokens": TOKENS, **fields}
        stream = client.chat.completions.stream(**asked, stream_options={"include_usage": True})
        try:
            async with stream as told:
                whole: Any = await told.get_final_completion()
        except openai.LengthFinishReasonError as error:
            # It has all the same; this says only that the answer was as long as it might be.
            whole = error.completion
    (choice,) = whole.choices
    called = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content, called, choice.finish_reason, whole.usage


async def chat_with_tools(base: str) -> Any:
    return await chat(base, tools=TOOLS)


async def chat_with_a_user(base: str) -> Any:
    return await chat(base, user="me", metadata={"a": "b"}, store=True, service_tier="auto")


async def response(base: str, **fields: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
        asked: Any = {"model": "stand-in", "input": SAID, "max_output_tokens": TOKENS, **fields}
        told = await client.responses.create(**asked, stream=True)
        deltas = []
        async for event in told:
            if event.type == "error":
                raise ErrorEvent(event.message)
            deltas += [event.delta] if event.type == "response.output_text.delta" else []
        return deltas


async def codex(base: str) -> Any:
    return await response(base, **codex_body(SAID[0]["content"]))


async def message(base: str, **fields: Any) -> Any:
    async with anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=0) as client:
        asked: Any = {"model": "stand-in", "messages": SAID, "max_tokens": TOKENS, **fields}
        told = await client.messages.create(**asked, stream=True)
        return [event.delta async for event in told if event.type == "content_block_delta"]


async def claude_code(base: str) -> Any:
    body = claude_code_body(SAID[0]["content"])
    return await message(base, **body, extra_query={"beta": "true"}, extra_headers={"anthropic-beta": "x-1"})


async def read_at_each_point(world: World, read: Read) -> tuple[Any, list[Any]]:
    """What a client has of a stream that is whole, and of one for each point: an exception where it gets one."""
    base = str(world.client._base_url).rstrip("/")
    for engine in world.engines:
        engine.calls_after = CALLS_AFTER
    whole, broken = await read(base), list[Any]()
    for point in IN_CALLS if read is chat_with_tools else POINTS:
        world.plane._suspects.clear()
        world.decode.dies, world.decode.dies_after = "mid-stream", point
        try:
            broken.append(await read(base))
        except ERRORS as error:
            broken.append(error)
    return whole, broken


@pytest.mark.parametrize(
    "read", [completion, chat, chat_with_tools, chat_with_a_user], ids=lambda read: read.__name__
)
def test_completions_and_chats_are_whole(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch, read: Read
) -> None:
    monkeypatch.setattr(calls, "_PAUSE_S", 0.0)

    async def body(world: World) -> None:
        whole, broken = await read_at_each_point(world, read)
        assert broken == [whole] * len(POINTS)
        assert await world.metric('prfaas_gateway_continuations_total{outcome="continued"}') == len(POINTS)

    in_world(body, spare=True)


@pytest.mark.parametrize("read", [response, codex, message, claude_code], ids=lambda read: read.__name__)
def test_other_apis_end_with_an_error_of_their_own(in_world: InWorld, read: Read) -> None:
    async def body(world: World) -> None:
        whole, broken = await read_at_each_point(world, read)
        assert len(whole) == TOKENS
        assert all(isinstance(each, ERRORS) for each in broken)
        assert all("died" in str(error) for error in broken)

    in_world(body, spare=True)
