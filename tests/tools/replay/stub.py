"""A server that answers completions as a gateway does, in its own thread; tests say how it misbehaves."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
ROUTE = {
    "x-prfaas-route": "offload; prefill=a; decode=b; cached=2; bytes=10; hidden=0.5",
    "X-Request-Id": "r1",
}


class Stub:
    """`bodies`: what came, in the order of coming. `open_now`, `most_open`: requests being answered."""

    def __init__(self, handler: Handler) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.open_now = self.most_open = 0
        self._handler = handler

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 4096}, {"id": "other"}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            return await self._handler(request, body)
        finally:
            self.open_now -= 1


@contextmanager
def served(handler: Handler) -> Iterator[Stub]:
    """The stub, listening; its thread has ended on exit."""
    stub = Stub(handler)
    listening, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        runner = web.AppRunner(stub.application(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        listening.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert listening.wait(60)
        yield stub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


async def streamed(request: web.Request, events: list[object]) -> web.StreamResponse:
    """Events as a stream; strings go as they are."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **ROUTE})
    await response.prepare(request)
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {text}\n\n".encode())
    return response


def usage(prompt: int, answer: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A whole answer of as many tokens as were asked for."""
    count, prompt = body["max_tokens"], len(body["prompt"])
    if not body.get("stream"):
        answer = {"choices": [{"text": "x" * count}], "usage": usage(prompt, count)}
        return web.json_response(answer, headers=ROUTE)
    pieces: list[object] = [{"choices": [{"text": "x"}]} for _ in range(count)]
    return await streamed(request, [*pieces, {"choices": [], "usage": usage(prompt, count)}, "[DONE]"])
