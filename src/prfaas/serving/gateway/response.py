"""The client's end of an answer."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.request_log import RequestRecord
from prfaas.serving.gateway.stream import END_OF_EVENT, EVENT_STREAM, WholeAnswer


class AnswerBudget:
    """Bytes that all streams of one gateway together may keep."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes


class ResponseWriter:
    """Writes an answer to the client, and keeps what was written so that another engine can continue it.

    The headers leave with the first byte: until then another engine may answer. Leaving the `with` block gives the
    kept bytes back to the budget.
    """

    def __init__(
        self,
        http: web.Request,
        record: RequestRecord,
        metrics: Metrics,
        budget: AnswerBudget,
        *,
        keep_bytes: int,
    ) -> None:
        """`keep_bytes`: what may be kept of this answer's stream, out of `budget`. 0: nothing is kept."""
        self._http = http
        self._record = record
        self._metrics = metrics
        self._budget = budget
        self._keep_bytes = keep_bytes
        self._kept: list[bytes] | None = [] if keep_bytes else None
        self._kept_bytes = 0
        self._response: web.StreamResponse | None = None
        self.torn = False
        """Whether what was written ends within an event."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._forget()

    @property
    def begun(self) -> bool:
        """Whether the client has seen anything."""
        return self._response is not None

    def written(self) -> bytes | None:
        """All that was written of a stream; None if it was not kept."""
        return b"".join(self._kept) if self._kept is not None else None

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
        self.torn = not chunk.endswith(END_OF_EVENT)
        if self._kept is not None:
            self._keep(chunk)
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

    def _keep(self, chunk: bytes) -> None:
        assert self._kept is not None
        beyond = self._kept_bytes + len(chunk) > self._keep_bytes or len(chunk) > self._budget.left_bytes
        if beyond or self.torn:
            self._forget()
            return
        self._kept.append(chunk)
        self._kept_bytes += len(chunk)
        self._budget.left_bytes -= len(chunk)

    def _forget(self) -> None:
        self._budget.left_bytes += self._kept_bytes
        self._kept_bytes = 0
        self._kept = None

    def _note_first_byte(self) -> None:
        ttft_s = time.perf_counter() - self._record.began_s
        self._record.steps_s["first_byte"] = ttft_s
        self._metrics.ttft_seconds.labels(self._record.route).observe(ttft_s)
