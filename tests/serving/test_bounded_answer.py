"""Answers of other servers without end: what reads them whole gives up at its bound."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from prfaas.serving.bounded_answer import read_bounded


@pytest.mark.parametrize("form", ["chunked", "length"])
def test_an_answer_is_read_up_to_its_bound(form: str) -> None:
    most = 1 << 20
    sent_bytes = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes
        nbytes = int(request.query["bytes"])
        response = web.StreamResponse()
        if form == "length":
            response.content_length = nbytes
        await response.prepare(request)
        for _ in range(nbytes >> 10):
            await response.write(b"x" * 1024)
            sent_bytes += 1024
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            async with aiohttp.ClientSession() as session:
                async with session.get(url, params={"bytes": most}) as response:
                    assert len(await read_bounded(response, most)) == most
                async with session.get(url, params={"bytes": 1 << 40}) as response:
                    with pytest.raises(aiohttp.ClientPayloadError, match=f"more than {most} bytes"):
                        await read_bounded(response, most)
        finally:
            await runner.cleanup()

    asyncio.run(run())
    assert sent_bytes < 64 << 20
