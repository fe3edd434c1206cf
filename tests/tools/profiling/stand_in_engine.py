"""A stand-in for a vLLM server, for tests of measuring only: OpenAI completions that take a known time.

A prefill takes `prefill_s(tokens)`; decoding makes one token per `step_s` for up to `max_num_seqs` requests at once,
others wait. Token ids of a text are its letters. It remembers every prompt of token ids.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class StandInEngine:
    """What it does, and what it was asked."""

    prefill_s: Callable[[int], float] = lambda tokens: tokens * 1e-5
    step_s: float = 0.004
    max_num_seqs: int = 8
    max_model_len: int | None = 4096
    tells_ids: bool = True
    cached_tokens: int = 0
    counted_tokens: int | None = None
    fails_above: int | None = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    url: str = ""

    async def models(self, _request: web.Request) -> web.Response:
        card = {"id": "org/stand-in", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        ids = [ord(letter) for letter in prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompt, str):
            self.prompts.append(tuple(ids))
        if self.fails_above is not None and len(ids) > self.fails_above:
            return web.json_response({"error": {"message": "out of\nmemory"}}, status=500)
        await asyncio.sleep(self.prefill_s(len(ids)))
        if body.get("stream"):
            return await self.stream(request, body["max_tokens"])
        answer: dict[str, Any] = {
            "choices": [{"text": "x", "token_ids": [1]}],
            "usage": {
                "prompt_tokens": len(ids) if self.counted_tokens is None else self.counted_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            },
        }
        if self.tells_ids:
            answer["choices"][0]["prompt_token_ids"] = ids
        return web.json_response(answer)

    async def stream(self, request: web.Request, tokens: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async with self.slots:
            for index in range(tokens):
                if index:
                    await asyncio.sleep(self.step_s)
                event = {"choices": [{"text": "x", "token_ids": [index]}]}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.max_num_seqs)


@contextmanager
def running(engine: StandInEngine) -> Iterator[StandInEngine]:
    """`engine` behind a free port of this machine, in a thread of its own."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/completions", engine.completions)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return int(runner.addresses[0][1])

    thread = threading.Thread(target=loop.run_forever, name="stand-in-engine")
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        engine.url = f"http://127.0.0.1:{port}"
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
