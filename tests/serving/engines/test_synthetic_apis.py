"""Responses and messages of stand-in engines: the answers of their chats, in the shapes of vLLM."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_world import MODEL, World, running, write_deployment

SAID = "what is it that you do, " * 20
CHAT = {"messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": SAID}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"instructions": "Be terse.", "input": SAID, "max_output_tokens": 24},
    "/v1/messages": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "Be terse."},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": SAID}]}],
        "max_tokens": 24,
    },
}


async def events(world: World, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    url = world.deployment.instance("home-0").url + path
    async with world.session.post(url, json={"model": MODEL, "stream": True, **body}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        raw = await response.text()
    found = []
    for event in raw.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("path", list(BODIES))
def test_the_answer_is_that_of_the_same_chat(tmp_path: Path, path: str) -> None:
    async def check() -> None:
        async with running(write_deployment(tmp_path), "home-0") as world:
            chat = await world.post("home-0", "/v1/chat/completions", CHAT | {"max_tokens": 24})
            expected = chat.body["choices"][0]["message"]["content"]
            whole = (await world.post("home-0", path, BODIES[path])).body
            told = await events(world, path, BODIES[path])
            if path == "/v1/messages":
                assert whole["content"] == [{"type": "text", "text": expected}]
                deltas = [e["delta"]["text"] for e in told if e["type"] == "content_block_delta"]
                assert told[-1] == {"type": "message_stop"}
                assert told[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 24
            else:
                assert whole["output"][0]["content"][0]["text"] == expected
                assert whole["usage"]["input_tokens"] == chat.body["usage"]["prompt_tokens"]
                deltas = [e["delta"] for e in told if e["type"] == "response.output_text.delta"]
                assert [e["sequence_number"] for e in told] == list(range(len(told)))
                assert told[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
            assert "".join(deltas) == expected

    asyncio.run(check())


@pytest.mark.slow("stand-in engines do their work in real time")
def test_ids_of_a_response_are_told_and_taken(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(write_deployment(tmp_path), "home-0") as world:
            ids = (await world.post("home-0", "/tokenize", CHAT)).body["tokens"]
            asked = BODIES["/v1/responses"] | {"enable_response_messages": True}
            told = await world.post("home-0", "/v1/responses", asked)
            assert told.body["input_messages"][0]["tokens"] == ids
            other = asked | {"kv_transfer_params": {"prompt_token_ids": ids[:100]}}
            told = await world.post("home-0", "/v1/responses", other)
            assert told.body["input_messages"][0]["tokens"] == ids[:100]
            count = await world.post("home-0", "/v1/messages/count_tokens", BODIES["/v1/messages"])
            assert count.body == {"input_tokens": len(ids)}
            text = (await world.post("home-0", "/detokenize", {"tokens": ids})).body["prompt"]
            assert "Be terse." in text and SAID.strip() in text

    asyncio.run(check())


def test_bodies_without_a_conversation_are_refused(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(write_deployment(tmp_path), "home-0") as world:
            for path, body in (
                ("/v1/responses", {}),
                ("/v1/responses", {"input": [1]}),
                ("/v1/messages", {"messages": CHAT["messages"]}),
                ("/v1/messages", {"max_tokens": 5}),
                ("/detokenize", {"tokens": ["a"]}),
            ):
                assert (await world.post("home-0", path, body)).status == 400

    asyncio.run(check())
