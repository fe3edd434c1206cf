"""The client's end of an answer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.request_log import RequestRecord
from prfaas.serving.gateway.stream import END_OF_EVENT, EVENT_STREAM, WholeAnswer


@dataclass(slots=True)
class KeepBudget:
    """Bytes that all streams of one gateway together may still keep."""

    left_bytes: int


class KeptStream:
    """What was written of one stream, so that another engine can continue it. It is dropped when it grows too long."""

    def __init__(self, budget: KeepBudget, limit_bytes: int) -> None:
        """`limit_bytes`: what this stream may keep of `budget`. 0: nothing."""
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._chunks: list[bytes] | None = [] if limit_bytes else None
        self._kept_bytes = 0
        self.torn = False
        """Whether what was written ends within an event."""

    def add(self, chunk: bytes) -> None:
        """`chunk` is written next: whole events, or a piece of one that is too long to be kept."""
        self.torn = not chunk.endswith(END_OF_EVENT)
        if self._chunks is None:
            return
        beyond = self._kept_bytes + len(chunk) > self._limit_bytes or len(chunk) > self._budget.left_bytes
        if beyond or self.torn:
            self.drop()
            return
        self._chunks.append(chunk)
        self._kept_bytes += len(chunk)
        self._budget.left_bytes -= len(chunk)

    def written(self) -> bytes | None:
        """All that was written; None if it was not kept."""
        return b"".join(self._chunks) if self._chunks is not None else None

    def drop(self) -> None:
        """Give the bytes back to the budget and keep nothing more."""
        self._budget.left_bytes += self._kept_bytes
        self._kept_bytes = 0
        self._chunks = None


class ResponseWriter:
    """Writes an answer to the client. The headers leave with the first byte: until then another engine may answer."""

    def __init__(self, http: web.Request, record: RequestRecord, metrics: Metrics, kept: KeptStream) -> None:
        self._http = http
        self._record = record
        self._metrics = metrics
        self._response: web.StreamResponse | None = None
        self.kept = kept

    @property
    def begun(self) -> bool:
        """Whether the client has seen anything."""
        return self._response is not None

    async def write(self, chunk: bytes, content_type: str = EVENT_STREAM) -> None:
        """Pass on a piece of a stream.

        Raises:
            ConnectionResetError: the client has left.
        """
        if self._response is None:
            self._note_first_byte()
            headers = self._record.headers() | {"Content-Type": content_type, "Cache-Control": "no-cache"}
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._http)
        self.kept.add(chunk)
        await self._response.write(chunk)

    async def end(self) -> web.StreamResponse:
        """End the stream."""
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    def send(self, answer: WholeAnswer) -> web.Response:
        """The answer in one piece."""
        self._note_first_byte()
        headers = self._record.headers() | {"Content-Type": answer.content_type}
        return web.Response(status=answer.status, body=answer.body, headers=headers)

    def _note_first_byte(self) -> None:
        ttft_s = time.perf_counter() - self._record.began_s
        self._record.steps_s["first_byte"] = ttft_s
        self._metrics.ttft_seconds.labels(self._record.route).observe(ttft_s)


@contextmanager
def writing(
    http: web.Request, record: RequestRecord, metrics: Metrics, budget: KeepBudget, keep_bytes: int
) -> Iterator[ResponseWriter]:
    """A writer for one answer, of whose stream at most `keep_bytes` are kept until the end."""
    kept = KeptStream(budget, keep_bytes)
    try:
        yield ResponseWriter(http, record, metrics, kept)
    finally:
        kept.drop()
