"""HTTP to engines: every way in which an answer can come, end or fail to, before a server that plays a script."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.serving.gateway import http_pool
from prfaas.serving.gateway.http_pool import (
    AnswerCutError,
    AnswerLateError,
    AnswerTooLongError,
    EngineResponse,
    HttpPool,
    HttpTimes,
    ServerSilentError,
    _Connection,
)
from prfaas.serving.own_process import LoopClock, on_time_timeout

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Plays `script` for every request of every connection; counts connections and keeps requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.open = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                self.requests.append(head + await reader.readexactly(length))
                await self.script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


def says(*pieces: bytes, close: bool = False, abort: bool = False) -> Script:
    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if abort:
            writer.transport.abort()
        elif close:
            writer.close()

    return script


@asynccontextmanager
async def serving(script: Script, **options: float) -> AsyncIterator[tuple[Server, HttpPool, int]]:
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    pool = HttpPool(HttpTimes(**{"connect_s": 2.0, "keepalive_s": 2.0} | options))
    try:
        async with asyncio.timeout(120):
            yield server, pool, listening.sockets[0].getsockname()[1]
    finally:
        pool.close()
        listening.close()
        async with asyncio.timeout(60):
            while server.open:
                await asyncio.sleep(0.01)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def loop_run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return request.param  # type: ignore[no-any-return]


async def post(pool: HttpPool, port: int, body: bytes = b"{}") -> EngineResponse:
    return await pool.request("POST", "127.0.0.1", port, "/v1/x", {"Content-Type": "application/json"}, body)


SMALL = b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"


def test_who_leaves_when_its_answer_has_come_cuts_nobody_who_has_the_connection_now(
    loop_run: Callable[[Coroutine[Any, Any, None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        received = _Connection.data_received
        tasks: list[asyncio.Task[EngineResponse]] = []

        def received_before_another(connection: _Connection, data: bytes) -> None:
            # The second request has its turn before the first one reads its answer, and is given up then.
            if len(tasks) == 1:
                tasks.append(asyncio.create_task(post(pool, port, b"second")))
            received(connection, data)
            tasks[0].cancel()

        monkeypatch.setattr(_Connection, "data_received", received_before_another)
        async with serving(says(SMALL)) as (server, pool, port):
            tasks.append(asyncio.create_task(post(pool, port, b"first")))
            await asyncio.wait(tasks)
            assert tasks[0].cancelled()
            assert await (await tasks[1]).read() == b"hello"
            assert (server.connections, len(server.requests)) == (1, 2)

    loop_run(body())


def test_a_connection_carries_one_exchange_after_the_other(
    loop_run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def body() -> None:
        async with serving(says(SMALL)) as (server, pool, port):
            for index in range(5):
                answer = await post(pool, port, b"x" * index)
                assert (answer.status, answer.content_type, await answer.read()) == (200, "text/x", b"hello")
                assert answer.complete
                answer.close()
            assert server.connections == 1
            assert server.requests[3] == (
                b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 3\r\n" % port
                + b"Content-Type: application/json\r\n\r\nxxx"
            )

    loop_run(body())


@pytest.mark.parametrize(
    ("script", "whole", "connections"),
    [
        (says(CHUNKED), b"hello world", 1),
        (says(*(CHUNKED[i : i + 1] for i in range(len(CHUNKED)))), b"hello world", 1),
        (says(b"HTTP/1.1 100 Continue\r\n\r\n", SMALL), b"hello", 1),
        (says(b"HTTP/1.1 103 Early\r\nContent-Type: no\r\n\r\n" + SMALL), b"hello", 1),
        (says(b"HTTP/1.1 204 No Content\r\n\r\n"), b"", 1),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), b"", 1),
        (says(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab"), b"ab", 2),
        (says(b"HTTP/1.1 200 OK\r\n\r\nto the", b" end", close=True), b"to the end", 2),
        (says(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", close=True), b"ab", 2),
        (says(SMALL + SMALL), b"hello", 2),
        (says(SMALL + b"rubbish"), b"hello", 2),
    ],
)
def test_every_form_of_answer_is_read_to_its_end(script: Script, whole: bytes, connections: int) -> None:
    async def body() -> None:
        async with serving(script) as (server, pool, port):
            for _ in range(2):
                answer = await post(pool, port)
                assert answer.status in (200, 204)
                try:
                    assert await answer.read() == whole
                except AnswerCutError:
                    # What follows the answer without a pause may be seen before its end is taken.
                    assert connections == 2
                assert await answer.readany() == b""
                await asyncio.sleep(0.01)
            assert server.connections == connections

    uvloop.run(body())


@pytest.mark.parametrize(
    "script",
    [
        says(b"", abort=True),
        says(b"", close=True),
        says(b"HTTP/1.1 200 O", close=True),
        says(b"rubbish\r\n\r\n"),
        says(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
        says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000),
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
    ],
)
def test_what_is_no_answer_raises(script: Script) -> None:
    async def body() -> None:
        async with serving(script) as (server, pool, port):
            with pytest.raises(AnswerCutError):
                await post(pool, port)
            assert server.connections == 1

    uvloop.run(body())


@pytest.mark.parametrize(
    "script",
    [
        says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", close=True),
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", close=True),
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nrubbish"),
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", abort=True),
    ],
)
def test_an_answer_that_breaks_off_gives_what_came_and_then_raises(script: Script) -> None:
    async def body() -> None:
        async with serving(script) as (_server, pool, port):
            answer = await post(pool, port)
            got = b""
            with pytest.raises(AnswerCutError):
                while True:
                    part = await answer.readany()
                    assert part
                    got += part
            assert got in (b"hello", b"") and not answer.complete
            with pytest.raises(AnswerCutError):
                await answer.readany()

    uvloop.run(body())


def test_a_kept_connection_that_the_server_has_closed_costs_no_request() -> None:
    async def body() -> None:
        async with serving(says(SMALL, close=True)) as (server, pool, port):
            for _ in range(4):
                assert await (await post(pool, port)).read() == b"hello"
            assert server.connections == 4 and len(server.requests) == 4

    uvloop.run(body())


def test_a_request_is_sent_again_only_when_nothing_was_heard() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server_of[0].connections == 1 and len(server_of[0].requests) == 2:
            writer.write(heard_of[0])
            writer.close()
        else:
            writer.write(SMALL)

    server_of: list[Server] = []
    heard_of = [b""]

    async def body(heard: bytes) -> None:
        async with serving(script) as (server, pool, port):
            server_of[:], heard_of[:] = [server], [heard]
            await (await post(pool, port)).read()
            if heard:
                with pytest.raises(AnswerCutError):
                    await post(pool, port)
                assert len(server.requests) == 2
            else:
                assert await (await post(pool, port)).read() == b"hello"
                assert len(server.requests) == 3

    uvloop.run(body(b""))
    uvloop.run(body(b"HTTP/1.1 2"))


def test_connections_idle_for_too_long_are_not_used() -> None:
    async def body() -> None:
        async with serving(says(SMALL), keepalive_s=0.05) as (server, pool, port):
            answers = await asyncio.gather(*(post(pool, port) for _ in range(3)))
            for answer in answers:
                await answer.read()
            assert server.connections == 3
            await asyncio.sleep(0.1)
            await (await post(pool, port)).read()
            assert server.connections == 4
            await asyncio.sleep(0.02)
            assert server.open == 1

    uvloop.run(body())


def test_many_at_once_get_their_own_answers() -> None:
    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = server_of[0].requests[-1].split(b"\r\n\r\n")[1]
        await asyncio.sleep(0.001 * (len(body) % 3))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    server_of: list[Server] = []

    async def body() -> None:
        async with serving(script) as (server, pool, port):
            server_of.append(server)

            async def one(index: int) -> None:
                for turn in range(5):
                    content = b"%d-%d" % (index, turn) * (index + 1)
                    assert await (await post(pool, port, content)).read() == content

            await asyncio.gather(*(one(index) for index in range(20)))
            assert server.connections <= 20

    uvloop.run(body())


@pytest.mark.parametrize("moment", ["before-head", "in-body"])
def test_leaving_closes_the_connection(moment: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if moment == "in-body":
            writer.write(CHUNKED[:60])
        await reader.read()
        gone.set()

    gone: asyncio.Event

    async def body() -> None:
        nonlocal gone
        gone = asyncio.Event()
        async with serving(script) as (_server, pool, port):
            if moment == "in-body":
                (await post(pool, port)).close()
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await post(pool, port)
            async with asyncio.timeout(60):
                await gone.wait()

    uvloop.run(body())


def test_a_slow_reader_slows_the_server_down() -> None:
    size = 64 << 20
    sent = 0

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        sent = 0
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(1 << 20))
            sent += 1 << 20
            await writer.drain()

    async def body() -> None:
        async with serving(script) as (server, pool, port):
            answer = await post(pool, port)
            await asyncio.sleep(0.3)
            assert sent < size // 2
            assert len(await answer.read()) == size
            assert await (await post(pool, port)).readany()
            assert server.connections == 1

    uvloop.run(body())


def test_an_answer_before_the_request_was_heard_out_ends_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SMALL)
        await asyncio.sleep(0.1)
        seen.append(await reader.read())
        writer.close()

    seen: list[bytes] = []

    async def body() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = HttpPool(HttpTimes(connect_s=1.0, keepalive_s=2.0))
        answer = await post(pool, listening.sockets[0].getsockname()[1], bytes(32 << 20))
        assert await answer.read() == b"hello"
        async with asyncio.timeout(60):
            while not seen:
                await asyncio.sleep(0.01)
        assert len(seen[0]) < 32 << 20
        pool.close()
        listening.close()

    uvloop.run(body())


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb"])
def test_a_header_cannot_become_two(value: str) -> None:
    async def body() -> None:
        pool = HttpPool(HttpTimes(connect_s=1.0, keepalive_s=1.0))
        with pytest.raises(ValueError, match="line break"):
            await pool.request("POST", "127.0.0.1", 1, "/x", {"X": value})

    uvloop.run(body())


def test_nobody_there_is_an_os_error() -> None:
    async def body() -> None:
        pool = HttpPool(HttpTimes(connect_s=1.0, keepalive_s=1.0))
        with pytest.raises(OSError):
            await pool.request("GET", "127.0.0.1", 1, "/x", {})

    uvloop.run(body())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=50), max_size=6), st.lists(st.integers(1, 400), max_size=8))
def test_however_the_network_cuts_it_the_body_is_the_same(chunks: list[bytes], cuts: list[int]) -> None:
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    places = sorted({min(cut, len(wire)) for cut in cuts} | {0, len(wire)})
    pieces = [wire[a:b] for a, b in itertools.pairwise(places)]

    async def body() -> None:
        async with serving(says(*pieces)) as (_server, pool, port):
            assert await (await post(pool, port)).read() == b"".join(chunks)

    uvloop.run(body())


TRAILERS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: "


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\nX: ", TRAILERS], ids=["head", "trailers"])
def test_a_field_without_end_ends_the_answer(begin: bytes) -> None:
    sent = 0

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(begin)
        while sent < 64 << 20:
            sent += 1 << 16
            writer.write(b"x" * (1 << 16))
            await writer.drain()

    async def body() -> None:
        async with serving(script) as (_server, pool, port):
            with pytest.raises(AnswerCutError, match="has more than"):
                await (await post(pool, port)).read()

    uvloop.run(body())
    assert sent < 32 << 20


async def endless(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * (1 << 16))
        await writer.drain()


def test_an_answer_is_kept_up_to_a_length() -> None:
    async def body() -> None:
        async with serving(endless) as (_server, pool, port):
            answer = await post(pool, port)
            with pytest.raises(AnswerTooLongError, match="more than 1000000 bytes"):
                await answer.read(1_000_000)
            assert not answer.complete and not pool.held._bytes

    uvloop.run(body())


def test_of_answers_that_are_too_long_together_the_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_pool, "_MOST_HELD_BYTES", 4 << 20)
    large = b"x" * (1 << 20)
    honest = says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(large), large))

    async def body() -> None:
        async with serving(honest) as (_, _, honest_port), serving(endless) as (_, pool, port):
            reads = [(await post(pool, each)).read() for each in (port, port, honest_port)]
            told = await asyncio.gather(*reads, return_exceptions=True)
            assert [type(each) for each in told] == [AnswerTooLongError, AnswerTooLongError, bytes]
            assert not pool.held._bytes and not pool.held._bytes_of

    uvloop.run(body())


async def never(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


def test_a_barred_server_is_not_waited_for() -> None:
    async def body() -> None:
        async with serving(never) as (server, pool, port):
            waiting = [asyncio.create_task(post(pool, port)) for _ in range(3)]
            while len(server.requests) < 3:
                await asyncio.sleep(0.01)
            pool.bar("127.0.0.1", port, "frozen: it is")
            for each in waiting:
                with pytest.raises(ServerSilentError, match="frozen: it is"):
                    await each
            with pytest.raises(ServerSilentError):
                await post(pool, port)
            assert server.connections == 3
            server.script = says(SMALL)
            pool.bar("127.0.0.1", port, None)
            assert await (await post(pool, port)).read() == b"hello"

    uvloop.run(body())


@pytest.mark.parametrize(
    ("said", "reason"),
    [(b"", "first-byte"), (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "idle")],
)
def test_nothing_for_too_long_ends_the_answer(said: bytes, reason: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await never(reader, writer)

    async def body() -> None:
        async with serving(script, first_byte_s=0.1, idle_s=0.1) as (_server, pool, port):
            with pytest.raises(AnswerLateError) as late:
                await (await post(pool, port)).read()
            assert (late.value.reason, late.value.by_server) == (reason, False)

    uvloop.run(body())


def test_comments_do_not_keep_an_answer_alive() -> None:
    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        # For as long as anybody listens.
        while not writer.transport.is_closing():
            writer.write(b"e\r\n: still here\n\n\r\n")
            await asyncio.sleep(0.02)

    async def body() -> None:
        async with serving(script, first_byte_s=60.0, idle_s=0.2) as (_server, pool, port):
            with pytest.raises(AnswerLateError) as late:
                await (await post(pool, port)).read()
            assert late.value.reason == "idle"

    uvloop.run(body())


def test_a_slow_reader_is_not_an_idle_server() -> None:
    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (4 << 20) + bytes(4 << 20))
        await writer.drain()

    async def body() -> None:
        async with serving(script, first_byte_s=0.1, idle_s=0.1) as (_server, pool, port):
            answer = await post(pool, port)
            await asyncio.sleep(0.5)
            assert len(await answer.read()) == 4 << 20

    uvloop.run(body())


def test_a_kept_connection_has_no_limit() -> None:
    async def body() -> None:
        async with serving(says(SMALL), first_byte_s=0.05, idle_s=0.05) as (server, pool, port):
            for _ in range(2):
                assert await (await post(pool, port)).read() == b"hello"
                await asyncio.sleep(0.2)
            assert server.connections == 1

    uvloop.run(body())


def test_connecting_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(lost: int) -> None:
        async with serving(says(SMALL), connect_s=0.1) as (server, pool, port):
            loop = asyncio.get_running_loop()
            attempts = []

            async def create_connection(*args: Any, **options: Any) -> Any:
                attempts.append(args)
                if len(attempts) <= lost:
                    await asyncio.sleep(60)
                return (
                    await asyncio.get_event_loop_policy().get_event_loop().create_connection(*args, **options)
                )

            class Loop:
                """The loop, but for the first packets of its connections."""

                def __getattr__(self, name: str) -> Any:
                    return create_connection if name == "create_connection" else getattr(loop, name)

            monkeypatch.setattr("prfaas.serving.gateway.http_pool.asyncio.get_running_loop", Loop)
            try:
                if lost < 2:
                    assert await (await post(pool, port)).read() == b"hello"
                else:
                    with pytest.raises(TimeoutError):
                        await post(pool, port)
            finally:
                monkeypatch.undo()
            assert len(attempts) == 2 and server.connections == 2 - lost

    asyncio.run(body(1))
    asyncio.run(body(2))


@pytest.mark.slow("waits for time limits of connections")
def test_time_in_which_the_loop_stood_still_is_no_time_to_connect() -> None:
    async def body() -> None:
        clock = LoopClock()
        ticking = asyncio.create_task(clock.run())
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        async with on_time_timeout(0.4, clock):
            await asyncio.sleep(0.1)
            threading.Timer(0.2, loop.call_soon_threadsafe, (done.set_result, None)).start()
            time.sleep(1.0)
            await done
        with pytest.raises(TimeoutError):
            async with on_time_timeout(0.2, clock):
                await asyncio.Event().wait()
        assert clock.lag_s > 0.8
        ticking.cancel()

    asyncio.run(body())
    uvloop.run(body())


def test_a_pump_gets_what_waits_and_what_comes_until_it_has_enough(
    loop_run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def body() -> None:
        async with serving(says(*(CHUNKED[at : at + 1] for at in range(len(CHUNKED))))) as (_, pool, port):
            answer = await post(pool, port)
            taken: list[bytes] = []

            def sink(piece: bytes) -> bool:
                taken.append(piece)
                return b"".join(taken) != b"hello w"

            await answer.pump(sink)
            assert b"".join(taken) == b"hello w"
            assert await answer.read() == b"orld"
            await answer.pump(sink)
            assert b"".join(taken) == b"hello w"

    loop_run(body())


def test_a_pump_ends_with_the_connection(loop_run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def body() -> None:
        async with serving(says(CHUNKED[:-15], abort=True)) as (_, pool, port):
            answer = await post(pool, port)
            await answer.pump(lambda _: True)
            with pytest.raises(AnswerCutError):
                await answer.readany()

    loop_run(body())
