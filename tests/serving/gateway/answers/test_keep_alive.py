"""Clients that wait for a stream's first token: comments keep their connection, and what fails then is an event."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from prfaas.serving.gateway.answers.streams import EventStream

from ..stand_in import answer_text
from ..stand_in_apis import MESSAGES, RESPONSES
from ..world import GATEWAY, OPTIONS, World
from .test_decode_deaths import CHAT, LONG

InWorld = Callable[..., None]
OFTEN = replace(GATEWAY, keep_alive_s=0.05)
COMMENT = b": keep-alive\n\n"
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 5},
    "/v1/chat/completions": CHAT | {"max_tokens": 5},
    MESSAGES: {"model": "stand-in", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
    RESPONSES: {"model": "stand-in", "input": "hello"},
}


async def waits(world: World) -> None:
    """Until the gateway has waited for the decode engine, and for longer than its clients like to."""
    while not world.decode.generated():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)


async def raw(world: World, path: str) -> tuple[int, bytes]:
    async with world.client.post(path, json={"stream": True} | ASKED[path]) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_waits_gets_comments_and_then_the_answer(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        world.decode.mulls = True
        asked = asyncio.create_task(raw(world, path))
        await waits(world)
        assert not asked.done() and await world.metric("prfaas_gateway_ttft_seconds_count") == 0
        world.decode.goes_on.set()
        status, told = await asked
        comments = told.count(COMMENT)
        assert status == 200 and comments >= 2 and told.startswith(COMMENT * comments)
        if path == "/v1/completions":
            events = [orjson.loads(part[6:]) for part in told[len(COMMENT) * comments :].split(b"\n\n")[:-2]]
            assert "".join(event["choices"][0]["text"] for event in events) == answer_text(LONG, 5)
        # The time to a first token is that of a token.
        assert await world.metric("prfaas_gateway_ttft_seconds_sum") > 0.3

    in_world(body, gateway_config=OFTEN)


@pytest.mark.parametrize("path", ASKED)
def test_what_fails_after_a_comment_is_an_error_event(in_world: InWorld, path: str) -> None:
    async def body(world: World) -> None:
        world.decode.mulls, world.decode.dies = True, "before-headers"
        asked = asyncio.create_task(raw(world, path))
        await waits(world)
        world.decode.goes_on.set()
        status, told = await asked
        assert status == 200 and told.startswith(COMMENT)
        (event,) = (part for part in told.split(b"\n\n") if part and not part.startswith(b":"))
        error = orjson.loads(event[event.index(b"{") :])
        assert "decode" in (error.get("error") or error)["message"]
        assert await world.metric("prfaas_gateway_requests_total{") == 1
        # As it would have been without a comment.
        assert await world.metric('prfaas_gateway_refused_total{reason="unavailable"}') == 1

    in_world(body, gateway_config=OFTEN)


@pytest.mark.parametrize("path", ASKED)
def test_a_fault_of_the_gateway_after_the_head_is_an_error_event(
    in_world: InWorld, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a second answer in the middle of the first one."""

    def breaks(stream: EventStream, chunk: bytes) -> bytes:
        raise RuntimeError("a fault")

    async def body(world: World) -> None:
        world.decode.mulls = True
        asked = asyncio.create_task(raw(world, path))
        await waits(world)
        monkeypatch.setattr(EventStream, "take", breaks)
        world.decode.goes_on.set()
        async with asyncio.timeout(20):
            status, told = await asked
        assert status == 200 and told.startswith(COMMENT) and b"HTTP/1.1" not in told
        (event,) = (part for part in told.split(b"\n\n") if part and not part.startswith(b":"))
        error = orjson.loads(event[event.index(b"{") :])
        assert "gateway failed" in (error.get("error") or error)["message"]
        assert await world.metric("prfaas_gateway_requests_total{endpoint") == 1
        assert await world.metric("prfaas_gateway_refused_total") == 0

    in_world(body, gateway_config=OFTEN)


def test_another_engine_answers_after_a_comment(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.mulls, world.decode.dies = True, "before-headers"
        asked = asyncio.create_task(raw(world, "/v1/completions"))
        await waits(world)
        world.decode.goes_on.set()
        _, told = await asked
        assert told.startswith(COMMENT) and b"error" not in told and told.endswith(b"[DONE]\n\n")

    in_world(body, gateway_config=OFTEN, spare=True)


def test_an_engines_refusal_after_a_comment_is_an_error_event(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.mulls, world.decode.refuses_user, world.decode.refuses_in_stream = True, True, False
        sent = {"prompt": LONG, "user": "x", "stream": True}

        async def ask() -> bytes:
            async with world.client.post("/v1/completions", json=sent) as response:
                assert response.status == 200
                return await response.read()

        asked = asyncio.create_task(ask())
        await waits(world)
        world.decode.goes_on.set()
        assert b"no such user" in await asked
        assert await world.metric("prfaas_gateway_refused_total") == 1

    in_world(body, gateway_config=OFTEN)


def test_answers_in_one_piece_get_no_comments(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.mulls = True
        asked = asyncio.create_task(world.complete(LONG))
        await waits(world)
        world.decode.goes_on.set()
        _, answer = await asked
        assert answer["choices"][0]["text"] == answer_text(LONG)

    in_world(body, gateway_config=OFTEN, options=OPTIONS)
