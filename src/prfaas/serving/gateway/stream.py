"""The client's end of an answer, and an engine's: bytes go from one to the other without being parsed.

A stream of server-sent events on its way to the client: whole events pass, and they are remembered.
"""

import contextlib
import re
import time
from dataclasses import dataclass

import orjson
from aiohttp import web

from prfaas.serving.gateway.bodies import without_transfer_params
from prfaas.serving.gateway.http_pool import EngineResponse
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.request import PreparedRequest
from prfaas.serving.gateway.request_log import RequestRecord

END_OF_EVENT = b"\n\n"
LAST_EVENT = b"data: [DONE]\n\n"
DATA = b"data: "
# vLLM ends a stream like this when its engine has died and its HTTP server lives. Quotes inside of generated text
# are escaped, so these bytes can only begin such an event.
_ERROR = b'data: {"error":'
# Events that are longer are passed on in pieces.
_LONGEST_EVENT_BYTES = 1 << 20


class Budget:
    """Bytes that all streams of one gateway together may keep."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes


class EventStream:
    """What has come of one engine's stream.

    `ended`: the mark at its end has come. `torn`: what was passed on ends within an event. `failure`: the event,
    not passed on, in which the engine says that it failed (a status of 500 or more).
    """

    __slots__ = ("_budget", "_kept", "_kept_bytes", "_limit_bytes", "_partial", "ended", "failure", "torn")

    def __init__(self, budget: Budget, limit_bytes: int, *, remember: bool) -> None:
        """`limit_bytes`: what this stream may keep of `budget`; nothing is kept unless `remember`."""
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._kept: list[bytes] | None = [] if remember else None
        self._kept_bytes = 0
        self._partial = b""
        self.ended = False
        self.torn = False
        self.failure: bytes | None = None

    def take(self, chunk: bytes) -> bytes:
        """What may be passed on now that `chunk` has come: events as far as they are whole."""
        if self._partial or self.torn or not chunk.endswith(END_OF_EVENT):
            chunk = self._cut(chunk)
        if _ERROR in chunk:
            chunk = self._before_failure(chunk)
        if chunk:
            self.ended = chunk.endswith(LAST_EVENT)
            if self._kept is not None:
                self._keep(chunk)
        return chunk

    def passed(self) -> bytes | None:
        """All that was passed on; None if it was not kept."""
        return b"".join(self._kept) if self._kept is not None else None

    def forget(self) -> None:
        """Give the room back; nothing is kept any more. Call it at the end, too."""
        self._budget.left_bytes += self._kept_bytes
        self._kept_bytes = 0
        self._kept = None

    def _keep(self, chunk: bytes) -> None:
        assert self._kept is not None
        if self._kept_bytes + len(chunk) > self._limit_bytes or len(chunk) > self._budget.left_bytes:
            self.forget()
            return
        self._kept.append(chunk)
        self._kept_bytes += len(chunk)
        self._budget.left_bytes -= len(chunk)

    def _cut(self, chunk: bytes) -> bytes:
        chunk = self._partial + chunk
        found = chunk.rfind(END_OF_EVENT)
        end = 0 if found < 0 else found + len(END_OF_EVENT)
        if len(chunk) - end > _LONGEST_EVENT_BYTES:
            self.forget()
            end = len(chunk)
        self._partial = chunk[end:]
        if end:
            self.torn = not chunk.endswith(END_OF_EVENT, 0, end)
        return chunk[:end]

    def _before_failure(self, chunk: bytes) -> bytes:
        begin = chunk.find(_ERROR)
        event = chunk[begin : chunk.find(END_OF_EVENT, begin) + len(END_OF_EVENT)]
        try:
            code = orjson.loads(event[len(DATA) :])["error"]["code"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return chunk
        if not isinstance(code, int) or code < 500:
            return chunk
        self.failure = event
        return chunk[:begin]


ROUTE_HEADER = "x-prfaas-route"
REQUEST_ID_HEADER = "X-Request-Id"
EVENT_STREAM = "text/event-stream"

# In generated text the quotes would be escaped. The usage stands at the end.
_ANSWER_TOKENS = re.compile(rb'"completion_tokens":\s?(\d+)')
_USAGE_BYTES = 2048


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An engine's answer in one piece, less what is not the client's."""

    status: int
    body: bytes
    content_type: str


class DecodeFailedError(Exception):
    """A decode engine did not answer to the end. `reason`: one word. `lost`: the engine is gone, not just this answer.

    `answer`: what it said in place of one, `event`: the same in a stream; for when no other engine can say more.
    """

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        lost: bool,
        answer: WholeAnswer | None = None,
        event: bytes | None = None,
    ) -> None:
        super().__init__(detail)
        self.reason = reason
        self.lost = lost
        self.answer = answer
        self.event = event


class ResponseWriter:
    """The client's end. Its headers leave with the first byte: until then another engine may answer."""

    def __init__(self, request: web.Request, record: RequestRecord, metrics: Metrics) -> None:
        self._request = request
        self._record = record
        self._metrics = metrics
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether the client has seen anything."""
        return self._response is not None

    async def write(self, chunk: bytes, content_type: str = EVENT_STREAM) -> None:
        """Pass on a piece of a stream. Raises ConnectionResetError when the client has left."""
        if self._response is None:
            self._first_byte()
            headers = route_headers(self._record) | {
                "Content-Type": content_type,
                "Cache-Control": "no-cache",
            }
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        await self._response.write(chunk)

    async def end(self) -> web.StreamResponse:
        """The stream is over."""
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    def whole(self, answer: WholeAnswer) -> web.Response:
        """The answer in one piece."""
        self._first_byte()
        headers = route_headers(self._record) | {"Content-Type": answer.content_type}
        return web.Response(status=answer.status, body=answer.body, headers=headers)

    def _first_byte(self) -> None:
        record = self._record
        ttft_s = time.perf_counter() - record.began_s
        record.steps_s["first_byte"] = ttft_s
        self._metrics.ttft_seconds.labels(record.route).observe(ttft_s)


def route_headers(record: RequestRecord) -> dict[str, str]:
    """What every answer says about its way, as far as it has got."""
    headers = {REQUEST_ID_HEADER: record.request_id}
    if record.route_header is not None:
        headers[ROUTE_HEADER] = record.route_header
    return headers


async def read_whole(answer: EngineResponse, journey: PreparedRequest, record: RequestRecord) -> WholeAnswer:
    """The whole of `answer`. Raises DecodeFailedError."""
    try:
        whole = await answer.read()
    except OSError as error:
        raise died(journey.decode, error) from error
    note_answer_tokens(record, whole)
    return WholeAnswer(answer.status, without_transfer_params(whole), answer.content_type)


async def read_stream(answer: EngineResponse, journey: PreparedRequest, stream: EventStream) -> bytes:
    """The next events of `answer`; b"" at its end. Raises DecodeFailedError."""
    while not stream.ended:
        if stream.failure is not None:
            raise DecodeFailedError(
                "http-500", f"{journey.decode} failed in the stream", lost=False, event=stream.failure
            )
        try:
            chunk = await answer.readany()
        except OSError as error:
            raise died(journey.decode, error) from error
        if not chunk:
            raise DecodeFailedError("died", f"{journey.decode} ended its stream early", lost=True)
        passed = stream.take(chunk)
        if passed:
            return passed
    # Only a connection read to its end can be used again; what fails after the last event harms nobody.
    with contextlib.suppress(OSError):
        await answer.readany()
    return b""


def note_answer_tokens(record: RequestRecord, piece: bytes) -> None:
    """Remember how many tokens were generated, if the last piece of an answer tells."""
    found = _ANSWER_TOKENS.search(piece, max(len(piece) - _USAGE_BYTES, 0))
    if found is not None:
        record.answer_tokens = int(found.group(1))


def died(instance: str, error: BaseException) -> DecodeFailedError:
    """The engine was lost in the middle of its answer."""
    return DecodeFailedError("died", f"{instance}: {type(error).__name__}: {error}", lost=True)
