"""Bodies that come slowly, in other forms, or never: who is waited for, and who is given up."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.jumping_loop import JumpingLoop

from prfaas.core.deployment import GatewayLimits
from prfaas.serving.gateway import server
from prfaas.serving.gateway.bodies import ApiError, parse_body
from prfaas.serving.gateway.context import GatewayOptions
from prfaas.serving.gateway.intake import BodyReader

from .world import GATEWAY, World

InWorld = Callable[..., None]
OPTIONS = GatewayOptions()
RATE = OPTIONS.least_body_bytes_per_s


class Body:
    """A body as aiohttp gives it: pieces, each after its time; `inf` never comes."""

    def __init__(self, *pieces: tuple[float, bytes], address: str = "10.0.0.1", **fields: Any) -> None:
        self._pieces = list(pieces)
        self.content = self
        self.remote = address
        self.content_type, self.content_length, self.headers = "application/json", None, {}
        self.__dict__ |= fields

    def is_eof(self) -> bool:
        return not self._pieces

    async def readany(self) -> bytes:
        if not self._pieces:
            return b""
        seconds, piece = self._pieces.pop(0)
        await (asyncio.sleep(seconds) if seconds < float("inf") else asyncio.Event().wait())
        return piece


NEVER = (float("inf"), b"")


def reader(requests: int = 8) -> BodyReader:
    limits = GatewayLimits(requests=requests)
    running = SimpleNamespace(current=SimpleNamespace(gateway=SimpleNamespace(limits=limits)))
    return BodyReader(SimpleNamespace(options=OPTIONS, running=running))  # type: ignore[arg-type]


def run(work: Coroutine[Any, Any, None]) -> float:
    """How long it takes, by a clock that jumps."""
    loop = JumpingLoop()
    try:
        loop.run_until_complete(work)
        return float(loop.time())
    finally:
        loop.close()


async def status_of(bodies: BodyReader, body: Body) -> int:
    try:
        await bodies.read(body, lambda _nbytes: None)  # type: ignore[arg-type]
    except ApiError as error:
        return error.status
    return 200


def test_a_body_that_never_comes_is_given_up() -> None:
    async def main() -> None:
        bodies = reader()
        assert await status_of(bodies, Body((0.0, b"{"), NEVER)) == 408
        assert not bodies._count_of and not bodies._awaited

    assert OPTIONS.body_grace_s <= run(main()) < OPTIONS.body_grace_s + 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 10 * RATE)), max_size=8))
def test_a_body_may_take_as_long_as_the_least_rate_says(pieces: list[tuple[float, int]]) -> None:
    elapsed_s, size_bytes, is_late = 0.0, 0, False
    for seconds, nbytes in pieces:
        elapsed_s += seconds
        margin_s = elapsed_s - OPTIONS.body_grace_s - size_bytes / RATE
        if abs(margin_s) < 1e-3:
            return
        is_late |= margin_s > 0
        size_bytes += nbytes

    async def main() -> None:
        body = Body(*((seconds, b"x" * nbytes) for seconds, nbytes in pieces))
        assert await status_of(reader(), body) == (408 if is_late else 200)

    run(main())


def test_of_too_many_bodies_the_most_silent_of_the_address_with_most_is_given_up() -> None:
    async def main() -> None:
        bodies = reader(requests=8)
        flood = [Body((i / 100, b"{"), NEVER, address=f"fd00::{i}") for i in range(8)]
        honest = Body((0.5, b"{"), (1.0, b"}"), address="fd00:0:0:1::1")
        tasks = [asyncio.create_task(status_of(bodies, body)) for body in flood]
        await asyncio.sleep(0.2)
        asked = asyncio.create_task(status_of(bodies, honest))
        await asyncio.sleep(0.1)
        assert [task.done() for task in tasks] == [True] + [False] * 7
        assert await asked == 200
        assert await asyncio.gather(*tasks) == [408] * 8

    run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {"content_type": "text/plain"},
        {"content_type": "application/octet-stream"},
        {"headers": {"Content-Encoding": "zstd"}},
        {"headers": {"Content-Encoding": "gzip"}},
    ],
)
def test_what_is_no_plain_json_is_not_read(fields: dict[str, Any]) -> None:
    async def main() -> None:
        assert await status_of(reader(), Body(NEVER, **fields)) == 415

    assert run(main()) == 0


def test_slow_bodies_keep_nobody_out(in_world: InWorld) -> None:
    async def body(world: World) -> None:
        host, port = world.client._base_url.host, world.client._base_url.port
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writers = []
        for _ in range(6):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(head + b"Content-Length: 99\r\n\r\n{")
            await writer.drain()
            writers.append(writer)
        await asyncio.sleep(0.2)
        await world.complete(list(range(10)))
        for writer in writers:
            writer.close()

    in_world(body, limits=GatewayLimits(requests=4))


@pytest.mark.parametrize("depth", [64, 300, 1000])
def test_what_is_nested_deeper_than_an_engine_can_walk_is_refused(depth: int) -> None:
    for raw in (b'{"x":' + b"[" * depth + b"]" * depth + b"}", b'{"x":' * depth + b"1" + b"}" * depth):
        if depth == 64 and raw.startswith(b'{"x":{'):
            parse_body(raw)
            continue
        with pytest.raises(ApiError, match="nested") as error:
            parse_body(raw)
        assert error.value.status == 400


async def answered_by(world: World, *pieces: bytes) -> bytes:
    """All that comes back until the gateway closes the connection."""
    url = world.client._base_url
    assert url is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"


def test_a_head_is_bounded_as_a_whole_and_in_its_time(
    in_world: InWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = b"X-%d: " + b"x" * 60_000 + b"\r\n"

    async def body(world: World) -> None:
        fields = [field % number for number in range(100)]
        assert await answered_by(world, HEAD, *fields) == b""
        # One field may be long, and others come after it.
        assert b"200 OK" in await answered_by(world, HEAD, field % 1, b"Connection: close\r\n\r\n")
        # An empty line behind a request, as of old clients, begins no other one.
        monkeypatch.setattr(server, "_HEAD_S", 0.05)
        assert await answered_by(world, HEAD[:20]) == b""
        last = HEAD + b"Connection: close\r\n\r\n"
        assert b"200 OK" in await answered_by(world, last + b"\r\n")

    in_world(body)


@pytest.mark.parametrize(
    "field",
    [
        b"Authorization: Bearer a-secret\x00\r\n",
        b"Authorization: Bearer " + b"a-secret" * 9000 + b"\r\n",
        b"a-secret\r\n",
        b"Transfer-Encoding: a-secret\r\n",
    ],
)
def test_what_is_no_request_is_refused_without_a_word_of_it(in_world: InWorld, field: bytes) -> None:
    async def body(world: World) -> None:
        answer = await answered_by(world, HEAD + field + b"\r\n")
        head, _, said = answer.partition(b"\r\n\r\n")
        assert b" 400 " in head and b"application/json" in head and b"secret" not in answer
        assert json.loads(said)["error"]["code"] == 400

    in_world(body)


def test_bodies_and_what_is_sent_after_a_refusal_are_no_heads(in_world: InWorld) -> None:
    large = b"x" * 300_000
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    )

    async def body(world: World) -> None:
        for kind, status in ((b"application/json", b"400"), (b"text/plain", b"415")):
            asked = head % (kind, len(large))
            last = HEAD + b"Connection: close\r\n\r\n"
            answers = await answered_by(world, asked, large[:100_000], large[100_000:], last)
            assert b"HTTP/1.1 " + status in answers and b"200 OK" in answers

    in_world(body)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 400),
        ("http://127.0.0.1", 400),
        ("https://chat.example", 400),
        ("http://evil.example:8000", 403),
        ("null", 403),
        ("https://chat.example.evil.example", 403),
    ],
)
def test_web_pages_of_other_names_may_not_ask(in_world: InWorld, origin: str, status: int) -> None:
    async def body(world: World) -> None:
        response, _ = await world.post("/v1/completions", {}, headers={"Origin": origin})
        assert response.status == status

    in_world(body, gateway_config=replace(GATEWAY, hosts=("chat.example",)))
