"""The gateway's pool over TLS: who is let in on both sides, and what a change of certificates does."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.serving.transport.authority import Authority

from prfaas.serving.gateway.http_pool import AnswerCutError, EngineResponse, HttpPool, HttpTimes
from prfaas.serving.transport.io.tls_identity import TlsIdentity

Run = Callable[[Coroutine[Any, Any, None]], None]

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nhello"


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def loop_run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "own")


class Server:
    """Answers every request; over TLS where it has an identity."""

    def __init__(self, answer: bytes, *, close: bool) -> None:
        self.answer = answer
        self.close = close
        self.clients: list[dict[str, Any]] = []
        """The certificate of every connection that came with a request."""
        self.closing: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.closing.append(writer)
        first = True
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                if first:
                    self.clients.append(writer.get_extra_info("peercert") or {})
                    first = False
                writer.write(self.answer)
                await writer.drain()
                if self.close:
                    return
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    identity: TlsIdentity | None,
    pool_identity: TlsIdentity | None,
    answer: bytes = HELLO,
    *,
    close: bool = False,
    connect_timeout_s: float = 5.0,
) -> AsyncIterator[tuple[Server, HttpPool, int]]:
    server = Server(answer, close=close)
    context = None if identity is None else identity.listening_context()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    pool = HttpPool(HttpTimes(connect_s=connect_timeout_s, keepalive_s=60.0), tls=pool_identity)
    try:
        async with asyncio.timeout(60):
            yield server, pool, listening.sockets[0].getsockname()[1]
    finally:
        pool.close()
        for writer in server.closing:
            writer.transport.abort()
        listening.close()


async def ask(pool: HttpPool, port: int, server_name: str | None = "far-0") -> EngineResponse:
    return await pool.request("GET", "127.0.0.1", port, "/health", {}, server_name=server_name)


async def text(pool: HttpPool, port: int, server_name: str | None = "far-0") -> bytes:
    return await (await ask(pool, port, server_name)).read()


def names(certificate: dict[str, Any]) -> list[str]:
    return [value for _, value in certificate["subjectAltName"]]


def test_both_sides_show_a_certificate_and_keep_the_connection(loop_run: Run, authority: Authority) -> None:
    async def body() -> None:
        async with serving(authority.identity("far-0"), authority.identity("gateway")) as (
            server,
            pool,
            port,
        ):
            for _ in range(5):
                assert await text(pool, port) == b"hello"
            assert [names(each) for each in server.clients] == [["gateway"]]

    loop_run(body())


def test_connections_with_tls_are_kept_for_longer(authority: Authority) -> None:
    async def body() -> None:
        gateway = authority.identity("gateway")
        async with serving(authority.identity("far-0"), None) as (server, _, port):
            pool = HttpPool(HttpTimes(connect_s=5.0, keepalive_s=0.0, tls_keepalive_s=60.0), tls=gateway)
            for _ in range(2):
                assert await text(pool, port) == b"hello"
            assert len(server.clients) == 1
            pool.close()
            brief = HttpPool(HttpTimes(connect_s=5.0, keepalive_s=0.0), tls=gateway)
            for _ in range(2):
                assert await text(brief, port) == b"hello"
                await asyncio.sleep(0.01)
            assert len(server.clients) == 3
            brief.close()

    asyncio.run(body())


def test_names_with_an_underscore_are_names(loop_run: Run, authority: Authority) -> None:
    async def body() -> None:
        identity = authority.identity("Far_0.east")
        async with serving(identity, authority.identity("gateway")) as (_, pool, port):
            assert await text(pool, port, "far_0.East") == b"hello"

    loop_run(body())


def test_the_wrong_server_is_asked_nothing(loop_run: Run, authority: Authority, tmp_path: Path) -> None:
    foreign = Authority(tmp_path / "foreign").identity("far-0")
    gateway = authority.identity("gateway")
    for identity in (
        authority.identity("far-1"),
        foreign,
        authority.identity("far-0", file="old", expired=True),
    ):

        async def body(identity: TlsIdentity = identity) -> None:
            async with serving(identity, gateway) as (server, pool, port):
                with pytest.raises(ssl.SSLCertVerificationError):
                    await ask(pool, port)
                assert server.clients == []

        loop_run(body())


def test_a_server_that_lost_its_encryption_is_asked_nothing(loop_run: Run, authority: Authority) -> None:
    async def body() -> None:
        # It waits for the end of a request's head, which never comes.
        async with serving(None, authority.identity("gateway"), connect_timeout_s=0.2) as (
            server,
            pool,
            port,
        ):
            with pytest.raises(OSError):
                await ask(pool, port)
            assert server.clients == []

    loop_run(body())


def test_strangers_get_no_answer(loop_run: Run, authority: Authority, tmp_path: Path) -> None:
    foreign = Authority(tmp_path / "foreign").identity("gateway")
    stranger = TlsIdentity(foreign.certificate, foreign.key, authority.file)
    for identity in (stranger, authority.identity("gateway", file="old", expired=True)):

        async def body(identity: TlsIdentity = identity) -> None:
            async with serving(authority.identity("far-0"), identity) as (server, pool, port):
                with pytest.raises(OSError):
                    await ask(pool, port)
                assert server.clients == []

        loop_run(body())


def test_without_a_certificate_nothing_is_sent_in_the_clear(loop_run: Run, authority: Authority) -> None:
    async def body() -> None:
        async with serving(authority.identity("far-0"), None) as (server, pool, port):
            with pytest.raises(ConnectionError, match="far-0 wants TLS, and this side has no certificate"):
                await ask(pool, port)
            with pytest.raises(OSError):
                await ask(pool, port, None)
            assert server.clients == []

    loop_run(body())


def test_an_answer_without_an_end_of_its_own_is_not_whole(loop_run: Run, authority: Authority) -> None:
    """Whoever sits on the line can end the connection, and must not be able to shorten an answer by that."""

    async def body() -> None:
        identities = authority.identity("far-0"), authority.identity("gateway")
        async with serving(*identities, answer=ENDLESS, close=True) as (_, pool, port):
            with pytest.raises(AnswerCutError):
                await text(pool, port)
        async with serving(None, None, answer=ENDLESS, close=True) as (_, pool, port):
            assert await text(pool, port, None) == b"hello"

    loop_run(body())


def test_new_certificates_serve_new_connections(loop_run: Run, authority: Authority) -> None:
    async def body() -> None:
        far, gateway = authority.identity("far-0"), authority.identity("gateway")
        async with serving(far, gateway) as (server, pool, port):
            assert await text(pool, port) == b"hello"
            authority.write("far-0", "far-0.new")
            authority.write("gateway", "gateway.new")
            assert await text(pool, port) == b"hello"
            assert len(server.clients) == 1
            # A second request while the first is open needs a second connection.
            open_answer = await ask(pool, port, "far-0")
            other = HttpPool(HttpTimes(connect_s=5.0, keepalive_s=60.0), tls=gateway)
            try:
                assert await text(other, port, "far-0.new") == b"hello"
            finally:
                other.close()
            assert await open_answer.read() == b"hello"
            assert [names(each) for each in server.clients] == [["gateway"], ["gateway", "gateway.new"]]

    loop_run(body())


def test_a_ca_that_is_retired_is_not_trusted_by_a_server_that_runs(
    loop_run: Run, authority: Authority, tmp_path: Path
) -> None:
    async def body() -> None:
        far, old_gateway = authority.identity("far-0"), authority.identity("gateway")
        second = Authority(tmp_path / "second", "next CA")
        new_gateway = second.identity("gateway")
        newest = second.file.read_bytes()
        both = authority.file.read_bytes() + newest
        new_gateway.ca.write_bytes(both)
        async with serving(far, old_gateway) as (_, pool, port):
            assert await text(pool, port) == b"hello"
            fresh = HttpPool(HttpTimes(connect_s=5.0, keepalive_s=60.0), tls=new_gateway)
            with pytest.raises(OSError):
                await ask(fresh, port)
            authority.file.write_bytes(both)
            assert await text(fresh, port) == b"hello"
            authority.file.write_bytes(newest)
            late = HttpPool(
                HttpTimes(connect_s=5.0, keepalive_s=60.0),
                tls=TlsIdentity(old_gateway.certificate, old_gateway.key, new_gateway.ca),
            )
            with pytest.raises(OSError):
                await ask(late, port)
            late.close()
            fresh.close()

    loop_run(body())
