"""The tokenizer's routes of stand-in engines."""

import asyncio
from pathlib import Path

from synthetic_world import running, write_deployment

SAID = "what is it that you do, " * 20
CHAT = {"messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": SAID}]}


def test_ids_of_a_chat_are_told_and_read(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(write_deployment(tmp_path), "home-0") as world:
            ids = (await world.post("home-0", "/tokenize", CHAT)).body["tokens"]
            chat = await world.post("home-0", "/v1/chat/completions", CHAT | {"max_tokens": 4})
            assert chat.body["usage"]["prompt_tokens"] == len(ids)
            text = (await world.post("home-0", "/detokenize", {"tokens": ids})).body["prompt"]
            assert "Be terse." in text and SAID.strip() in text
            assert (await world.post("home-0", "/detokenize", {"tokens": ["a"]})).status == 400

    asyncio.run(check())
