"""HTTP/1.1 to the engines, on asyncio's protocols and llhttp's parser: the engine hops are the gateway's hot path.

A hop costs a third of what it does with aiohttp's client. What is left out is what engines do not need: redirects,
cookies, proxies, compression, pipelining, upgrades.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import httptools

from prfaas.serving.own_process import on_time_timeout
from prfaas.serving.transport.io.sockets import keep_alive
from prfaas.serving.transport.io.tls_identity import TlsIdentity

# With so much of an answer waiting to be taken, no more is read from the network.
_MAX_WAITING_BYTES = 256 << 10
# What an engine's kernel has not acknowledged for so long is lost. Frozen processes acknowledge, dead machines don't.
_USER_TIMEOUT_S = 30.0
# A connection may lose its first packet, or meet a full queue of connections to accept.
_CONNECT_ATTEMPTS = 2
_SHORTEST_SWEEP_S, _LONGEST_SWEEP_S = 0.02, 5.0
_MAX_HEAD_BYTES = 64 << 10
# Of an answer that is read whole, and of all of them together.
_MOST_BYTES, _MOST_HELD_BYTES = 256 << 20, 1 << 30


class AnswerCutError(ConnectionError):
    """The connection ended, or what came was not HTTP, before the answer was complete."""

    def __init__(self, text: str, *, by_server: bool = False) -> None:
        """`by_server`: the server closed or reset the connection, which only a process that lives or has died does."""
        super().__init__(text)
        self.by_server = by_server


class AnswerTooLongError(AnswerCutError):
    """It has more bytes than may be kept of it."""


class ServerSilentError(AnswerCutError):
    """The server was judged frozen (`HttpPool.bar`)."""


class AnswerLateError(AnswerCutError):
    """Nothing came for too long."""

    def __init__(self, reason: str, limit_s: float) -> None:
        """`reason`: "first-byte" or "idle"."""
        super().__init__(f"nothing came for {limit_s:g} s")
        self.reason = reason


class EngineResponse:
    """One response whose head has come. Take its body with `readany` or `read`, from one task."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_error",
        "_sink",
        "_waiter",
        "_waiting_bytes",
        "complete",
        "raw_headers",
        "status",
    )

    def __init__(self, connection: "_Connection") -> None:
        self.status = 0
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        """Whether the whole body has come. It may not have been taken yet."""
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: AnswerCutError | None = None
        self._sink: Callable[[bytes], bool] | None = None

    @property
    def content_type(self) -> str:
        """JSON when the engine doesn't say."""
        return self.header(b"content-type") or "application/json"

    def header(self, name: bytes) -> str | None:
        """The value of a header, by its lower-case name; None if there is none."""
        for given, value in self.raw_headers:
            if len(given) == len(name) and given.lower() == name:
                return value.decode("latin-1")
        return None

    async def readany(self) -> bytes:
        """What of the body has come since the last call, at least a byte; b"" at its end. Raises AnswerCutError."""
        if not self._chunks and not self.complete and self._error is None:
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._chunks:
            taken = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            self._waiting_bytes = 0
            self._connection.resume()
            return taken
        if self._error is not None:
            raise self._error
        return b""

    async def pump(self, sink: Callable[[bytes], bool]) -> None:
        """Give each piece of the body to `sink` in the callback in which it comes, which spares a turn of the loop.

        Ends when `sink` says False, and at the body's end or cut, which the next `readany` tells. `sink` must not
        raise.
        """
        while self._chunks:
            chunk = self._chunks.popleft()
            self._waiting_bytes -= len(chunk)
            if not sink(chunk):
                return
        if self.complete or self._error is not None:
            return
        self._connection.resume()
        self._waiter = self._connection.loop.create_future()
        self._sink = sink
        try:
            await self._waiter
        finally:
            self._waiter = self._sink = None

    async def read(self, most_bytes: int = _MOST_BYTES) -> bytes:
        """The rest of the body. Raises AnswerCutError: AnswerTooLongError where it has more than `most_bytes`."""
        parts, held = [], self._connection.held
        try:
            while part := await self.readany():
                parts.append(part)
                held.grow(self, len(part), most_bytes)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            held.release(self)

    def give_up(self, error: AnswerCutError) -> None:
        """Have whoever reads it get `error` in place of the rest."""
        if not self.complete and self._error is None:
            self._connection.abort(error)
        self._chunks.clear()
        self.complete, self._error = False, error

    def close(self) -> None:
        """Close the connection if the answer is not complete, which makes vLLM abort the request."""
        if not self.complete and self._error is None:
            self._connection.abort(AnswerCutError("the answer was closed"))

    def feed(self, chunk: bytes) -> None:
        """A piece of the body has come."""
        if self._sink is not None:
            if not self._sink(chunk):
                self._sink = None
                self._wake()
            return
        self._chunks.append(chunk)
        self._waiting_bytes += len(chunk)
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            self._connection.pause()
        self._wake()

    def end(self, error: AnswerCutError | None = None) -> None:
        """No more will come: the answer is complete, or cut by `error`."""
        self.complete, self._error = error is None, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HeldAnswers:
    """Bounds what answers that are read whole hold, each and all together: then the longest of them is given up."""

    def __init__(self) -> None:
        self._bytes_of: dict[EngineResponse, int] = {}
        self._bytes = 0

    def grow(self, answer: EngineResponse, nbytes: int, most_bytes: int) -> None:
        """So much more of an answer is kept, of which there may be `most_bytes`."""
        size_bytes = self._bytes_of[answer] = self._bytes_of.get(answer, 0) + nbytes
        self._bytes += nbytes
        if size_bytes > most_bytes:
            answer.give_up(AnswerTooLongError(f"the answer has more than {most_bytes} bytes"))
        elif self._bytes > _MOST_HELD_BYTES:
            longest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            longest.give_up(AnswerTooLongError("the longest of answers that have too many bytes together"))

    def release(self, answer: EngineResponse) -> None:
        """Nothing of an answer is kept any more; idempotent."""
        self._bytes -= self._bytes_of.pop(answer, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTimes:
    """How long a pool waits for its servers, and keeps connections."""

    connect_s: float
    """For one of two attempts to connect."""
    keepalive_s: float
    """How long a connection is kept without use."""
    tls_keepalive_s: float | None = None
    """The same for connections with TLS, which are dear to make; None: as long as others."""
    first_byte_s: float = math.inf
    """From a request to the first byte of its answer, at most."""
    idle_s: float = math.inf
    """Between two pieces of an answer, at most, which are no comments. While we do not read it, no time passes."""


class HttpPool:
    """Connections to any number of servers, kept for a while after use. Use it from one event loop only."""

    def __init__(
        self, times: HttpTimes, *, clock: Callable[[], float] = time.monotonic, tls: TlsIdentity | None = None
    ) -> None:
        """`times` may be replaced later. `tls`: who this side is, for servers that want TLS."""
        self.times = times
        self.held = HeldAnswers()
        self._tls = tls
        self.clock = clock
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._barred: dict[tuple[str, int], str] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    async def request(
        self,
        method: str,
        host: str,
        port: int,
        path: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        server_name: str | None = None,
    ) -> EngineResponse:
        """Send a request, over a new connection if the server has closed the kept one.

        `headers`: beside those of the connection and the body. `server_name`: speak TLS with a server whose certificate
        is for that name; None: no TLS. Of the response the head is read.

        Raises:
            OSError: there is no answer (AnswerCutError among others), or TLS found a wrong certificate (SSLError).
            TimeoutError: no connection within the limit, twice.
            ValueError: a header contains a line break.
        """
        head = _request_head(method, host, port, path, headers, len(body))
        barred = self._barred.get((host, port))
        if barred is not None:
            raise ServerSilentError(barred)
        kept = self._kept(host, port)
        if kept is not None:
            try:
                return await kept.exchange(head, body)
            except (ServerSilentError, AnswerLateError):
                raise
            except AnswerCutError:
                if kept.heard:
                    raise
        fresh = await self._connect(host, port, server_name)
        return await fresh.exchange(head, body)

    def bar(self, host: str, port: int, reason: str | None) -> None:
        """The server is frozen: cut what is open there, and refuse what comes. None: it answers again."""
        peer = (host, port)
        if reason is None:
            self._barred.pop(peer, None)
            return
        self._barred[peer] = reason
        for connection in tuple(self._open):
            if connection.peer == peer:
                connection.abort(ServerSilentError(reason))

    def close(self) -> None:
        """End all connections; answers that are being read are cut."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in tuple(self._open):
            connection.abort(AnswerCutError("the pool was closed"))

    def keep(self, connection: "_Connection") -> None:
        """`connection` has done its work and can be used again."""
        self._idle[connection.peer].append(connection)

    def forget(self, connection: "_Connection") -> None:
        """`connection` is closed."""
        self._open.discard(connection)
        idle = self._idle[connection.peer]
        if connection in idle:
            idle.remove(connection)

    def _kept(self, host: str, port: int) -> "_Connection | None":
        idle = self._idle.get((host, port))
        if not idle:
            return None
        # The one used last, so that those which are no longer needed reach the keepalive limit and are closed.
        latest = idle.pop()
        times = self.times
        kept_s = (latest.encrypted and times.tls_keepalive_s) or times.keepalive_s
        stale_s = latest.loop.time() - kept_s
        while idle and idle[0].used_s < stale_s:
            idle.popleft().abort(AnswerCutError("idle for too long"))
        if latest.used_s < stale_s:
            latest.abort(AnswerCutError("idle for too long"))
            return None
        return latest

    async def _connect(self, host: str, port: int, server_name: str | None) -> "_Connection":
        loop = asyncio.get_running_loop()
        context = None
        if server_name is not None:
            if self._tls is None:
                raise ConnectionError(f"{server_name} wants TLS, and this side has no certificate")
            context = self._tls.https_context()
        peer = (host, port)
        self._idle.setdefault(peer, deque())
        for attempt in range(_CONNECT_ATTEMPTS):
            try:
                async with on_time_timeout(self.times.connect_s, self.clock):
                    _, connection = await loop.create_connection(
                        lambda: _Connection(loop, self, peer, encrypted=context is not None),
                        host,
                        port,
                        ssl=context,
                        server_hostname=server_name,
                    )
                break
            except TimeoutError:
                if attempt + 1 == _CONNECT_ATTEMPTS:
                    raise
        self._open.add(connection)
        if peer in self._barred:
            connection.abort(ServerSilentError(self._barred[peer]))
            raise ServerSilentError(self._barred[peer])
        if self._sweeping is None:
            self._sweep()
        return connection

    def _sweep(self) -> None:
        """End the exchanges in which nothing has come for too long; again and again while anything is open."""
        now_s = self.clock()
        for connection in tuple(self._open):
            connection.check(now_s, self.times)
        self._sweeping = None
        shortest_s = min(self.times.first_byte_s, self.times.idle_s)
        if self._open and shortest_s < math.inf:
            period_s = min(max(shortest_s / 4, _SHORTEST_SWEEP_S), _LONGEST_SWEEP_S)
            self._sweeping = asyncio.get_running_loop().call_later(period_s, self._sweep)


class _Connection(asyncio.Protocol):
    """One connection to a server; carries one exchange at a time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pool: HttpPool, peer: tuple[str, int], *, encrypted: bool
    ) -> None:
        self.loop = loop
        self.peer = peer
        self.heard = False
        """Whether the server has sent something since the last request."""
        self.used_s = 0.0
        """When the last exchange ended, by the loop's clock."""
        self._pool = pool
        self.held = pool.held
        self.encrypted = encrypted
        self._transport: asyncio.Transport
        self._open = False
        self._paused = False
        self._parser = httptools.HttpResponseParser(self)
        self._answer: EngineResponse | None = None
        self._begun: asyncio.Future[EngineResponse] | None = None
        self._head_bytes = 0
        self._keeps_alive = False
        self._heard_s = 0.0

    async def exchange(self, head: bytes, body: bytes) -> EngineResponse:
        """Send a request; its answer once the head has come. Raises AnswerCutError."""
        self.heard, self._head_bytes = False, 0
        self._heard_s = self._pool.clock()
        self._answer = answer = EngineResponse(self)
        begun: asyncio.Future[EngineResponse] = self.loop.create_future()
        self._begun = begun
        self._transport.write(head)
        if body:
            self._transport.write(body)
        try:
            return await begun
        except BaseException:
            # After a whole answer the connection is free, or carries another exchange by now.
            if not answer.complete:
                self.abort(AnswerCutError("the request was given up"))
            raise

    def abort(self, error: AnswerCutError) -> None:
        """End the connection, and with it what is under way."""
        if self._open:
            self._open = False
            self._transport.abort()
        self._cut(error)

    def check(self, now_s: float, times: HttpTimes) -> None:
        """End the exchange if nothing has come for too long."""
        if self._answer is None or self._paused:
            return
        reason, limit_s = (
            ("idle", times.idle_s) if self._answer.status else ("first-byte", times.first_byte_s)
        )
        if now_s - self._heard_s > limit_s:
            self.abort(AnswerLateError(reason, limit_s))

    def pause(self) -> None:
        if self._open and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._open:
            self._paused = False
            self._heard_s = self._pool.clock()
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open = True
        keep_alive(transport.get_extra_info("socket"), user_timeout_s=_USER_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        answer = self._answer
        if answer is None:
            self.abort(AnswerCutError("the server sent something without a request"))
            return
        # Of the head or, behind the last of the body, of trailers. The parser keeps a field until it is whole.
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(AnswerCutError(f"what came is not an HTTP answer: {error}"))
            return
        if self._answer is None:
            self._reuse()
        elif self._head_bytes > _MAX_HEAD_BYTES:
            self.abort(AnswerCutError(f"the answer's head or end has more than {_MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        answer = self._answer
        # The end of an encrypted connection is not authenticated, so it can't say where a body ends.
        if answer is not None and answer.status and error is None and not self.encrypted:
            framing = (b"content-length", b"transfer-encoding")
            if all(answer.header(name) is None for name in framing):
                self._answer = None
                answer.end()
        text = "the server closed the connection" if error is None else str(error)
        # Without TimeoutError: what ends by TCP's own limits was a silent machine or a broken way.
        by_server = error is None or isinstance(error, ConnectionError)
        self._cut(AnswerCutError(text, by_server=by_server))
        self._pool.forget(self)

    def on_message_begin(self) -> None:
        # A second answer to one request says that the two sides disagree about where answers end.
        if self._answer is None:
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if answer is not None and not answer.status:
            answer.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None:
            return
        if status < 200:
            # An interim response: the real one follows.
            answer.raw_headers.clear()
            return
        answer.status = status
        self._heard_s = self._pool.clock()
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(answer)

    def on_body(self, chunk: bytes) -> None:
        self._head_bytes = 0
        # Comments of event streams say that a server lives, not that it gets on.
        if not chunk.startswith(b":"):
            self._heard_s = self._pool.clock()
        if self._answer is not None:
            self._answer.feed(chunk)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is not None and answer.status:
            self._keeps_alive = self._parser.should_keep_alive()
            self._answer = None
            answer.end()

    def _reuse(self) -> None:
        """The exchange is over: keep the connection for another one if it can carry it."""
        # A server that answers before it has read the whole request will not read the rest.
        if self._keeps_alive and self._open and not self._transport.get_write_buffer_size():
            self.resume()
            self.used_s = self.loop.time()
            self._pool.keep(self)
        else:
            self.abort(AnswerCutError("the server keeps no connection"))

    def _cut(self, error: AnswerCutError) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end(error)
        if self._begun is not None and not self._begun.done():
            self._begun.set_exception(error)


def _request_head(
    method: str, host: str, port: int, path: str, headers: Mapping[str, str], body_bytes: int
) -> bytes:
    """The lines before the body. Raises ValueError when a header contains a line break."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    length = f"Content-Length: {body_bytes}\r\n" if body_bytes or method == "POST" else ""
    text = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\n{length}{''.join(lines)}\r\n"
    # More line feeds than lines: a value contains one.
    if text.count("\n") != len(lines) + (4 if length else 3) or text.count("\r") != text.count("\n"):
        raise ValueError("a request header contains a line break")
    return text.encode("latin-1")
