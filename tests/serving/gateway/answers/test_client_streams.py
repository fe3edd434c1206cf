"""Streams as clients of every kind read them: pieces leave in the callback in which they come from the engine."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import orjson
import pytest

from prfaas.serving.gateway.answers.streams import ResponseWriter

from ..stand_in import answer_text
from ..world import World
from .test_decode_deaths import stream, text_of

InWorld = Callable[..., None]
PROMPT = list(range(10))


async def ask(
    world: World, version: bytes, **fields: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of its own, the request sent."""
    host, port = world.client._base_url.host, world.client._base_url.port
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 16)
    body = orjson.dumps({"prompt": PROMPT, "stream": True, **fields})
    writer.write(
        b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (version, len(body)) + body
    )
    return reader, writer


def test_many_pieces_at_once_all_arrive_in_order(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.chunks = 2000
        results = await asyncio.gather(
            *(stream(world, "/v1/completions", {"prompt": PROMPT}) for _ in range(8))
        )
        for _, events in results:
            assert events[-1] is None and text_of(events) == answer_text(PROMPT, 2000)

    in_world(body)


def test_a_client_of_http_1_0_gets_the_bare_stream(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        world.decode.chunks = 50
        reader, writer = await ask(world, b"1.0")
        head, _, rest = (await asyncio.wait_for(reader.read(-1), 30)).partition(b"\r\n\r\n")
        writer.close()
        assert b"chunked" not in head.lower()
        assert rest.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")

    in_world(body)


def test_a_client_that_is_gone_when_its_next_piece_is_written_is_no_error(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine a piece may be written before aiohttp tells the handler that the connection has ended."""

    async def read_in_time(self: ResponseWriter, writing: Awaitable[None]) -> None:
        await writing
        if b"data:" in self.latest:
            raise ConnectionResetError("the client has left")

    monkeypatch.setattr(ResponseWriter, "_read_in_time", read_in_time)

    async def body(world: World) -> None:
        _, writer = await ask(world, b"1.1", max_tokens=50)
        cancelled = 'prfaas_gateway_requests_total{endpoint="completions",outcome="cancelled"'
        while not await world.metric(cancelled):
            await asyncio.sleep(0.01)
        writer.close()

    in_world(body)
    assert [each.getMessage() for each in caplog.records if each.levelno > logging.INFO] == []


@pytest.mark.slow("waits for time limits of connections")
def test_a_client_that_does_not_read_makes_its_engine_wait(in_world: InWorld) -> None:
    """The rest comes, whole, when it reads again."""

    async def body(world: World) -> None:
        world.decode.chunks = 60_000
        reader, writer = await ask(world, b"1.1")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)
        raw = bytearray()
        while not raw.endswith(b"0\r\n\r\n"):
            piece = await asyncio.wait_for(reader.read(1 << 16), 30)
            assert piece, "the stream was cut"
            raw += piece
        writer.close()
        data = bytearray()
        at = 0
        while True:
            end = raw.index(b"\r\n", at)
            size = int(raw[at:end], 16)
            if not size:
                break
            data += raw[end + 2 : end + 2 + size]
            assert raw[end + 2 + size : end + 4 + size] == b"\r\n"
            at = end + 4 + size
        assert data.count(b"data: ") >= 60_001 and data.endswith(b"data: [DONE]\n\n")

    in_world(body)
