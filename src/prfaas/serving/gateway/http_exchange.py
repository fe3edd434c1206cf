"""Of an HTTP exchange with an engine: the head of the request, the answer, and how it can fail to come."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

# With so much of an answer waiting to be taken, no more is read from the network.
_MAX_WAITING_BYTES = 256 << 10


class AnswerCutError(ConnectionError):
    """The connection ended, or what came was not HTTP, before the answer was complete."""

    def __init__(self, text: str, *, by_server: bool = False) -> None:
        """`by_server`: the server closed or reset the connection, which only a process that lives or has died does."""
        super().__init__(text)
        self.by_server = by_server


class ServerSilentError(AnswerCutError):
    """The server was judged frozen (`HttpPool.bar`)."""


class AnswerLateError(AnswerCutError):
    """Nothing came for too long."""

    def __init__(self, reason: str, limit_s: float) -> None:
        """`reason`: "first-byte" or "idle"."""
        super().__init__(f"nothing came for {limit_s:g} s")
        self.reason = reason


class AnswerCarrier(Protocol):
    """What an answer needs of the connection that it comes over."""

    loop: asyncio.AbstractEventLoop

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self, error: AnswerCutError) -> None: ...


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

    def __init__(self, connection: AnswerCarrier) -> None:
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

    async def read(self) -> bytes:
        """The rest of the body. Raises AnswerCutError."""
        parts = []
        while part := await self.readany():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

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


def request_head(
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
