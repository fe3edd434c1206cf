"""An answer on its way from its decode engine to the client: read and written.

A stream passes as the bytes it came in, whole event by whole event, less the token ids that the gateway asked for.
Nothing of it is parsed.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import orjson
from aiohttp import HttpVersion11, web

from prfaas.serving.gateway.answers.answer_bytes import (
    PromptCut,
    TakenIds,
    without_cached_tokens,
)
from prfaas.serving.gateway.bodies import ApiError
from prfaas.serving.gateway.dialects import END_OF_EVENT, OPENAI, Dialect
from prfaas.serving.gateway.engine_client import Blame, EngineCallError, failed_call, is_ending
from prfaas.serving.gateway.http_pool import AnswerTooLongError, EngineResponse
from prfaas.serving.gateway.metrics import Metrics
from prfaas.serving.gateway.request_log import RequestRecord

EVENT_STREAM = "text/event-stream"
_HEAD_TYPE = "text/event-stream; charset=utf-8"
_KEEP_ALIVE = b": keep-alive\n\n"
# Of one event: the last one of `/v1/responses` has a whole answer in it.
_MOST_EVENT_BYTES = 64 << 20
# Of events that say nothing yet.
_MOST_PREFACE_BYTES = 1 << 20
# How long a client that reads slowly is waited for with the last event of a stream whose time is over.
_LAST_WORDS_S = 1.0
# A client that takes nothing of its answer for so long is cut off.
_UNREAD_S = 60.0

# With so much unsent to one client, its engine's stream waits.
_UNSENT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An engine's answer in one piece, less what is not the client's."""

    status: int
    body: bytes
    content_type: str


class EngineAnswerError(EngineCallError):
    """A decode engine lives, and answers with an error that is its own: another one may answer."""

    def __init__(
        self, instance: str, status: int, *, answer: WholeAnswer | None = None, event: bytes | None = None
    ) -> None:
        """`answer`: for the client when no other engine can answer. `event`: the same in a stream."""
        detail = f"answered {status}" if event is None else "failed in the stream"
        content = event or (b"" if answer is None else answer.body)
        # Else the request itself may be what makes it answer so. That must not take engines out.
        blame = Blame.ENDING if is_ending(status, content) else Blame.NONE
        super().__init__(instance, f"http-{status}", detail, status, blame=blame)
        self.answer = answer
        self.event = event


class EventStream:
    """Server-sent events of one engine's answer, passed on as the bytes they came in, whole event by whole event.

    Nothing is parsed: a relayed piece costs microseconds. Only an engine's own failure is held back.
    """

    def __init__(
        self,
        response: EngineResponse,
        instance: str,
        dialect: Dialect = OPENAI,
        *,
        cut: PromptCut | None = None,
        ids: TakenIds | None = None,
    ) -> None:
        """`instance`: the engine's name, for messages. `cut`, `ids`: take token ids out; None: they stay."""
        self._response = response
        self._cut = cut
        self._ids = ids
        self._instance = instance
        self._dialect = dialect
        self._ends = dialect.ends
        self._error_mark = dialect.error_mark
        self._is_preface: Callable[[bytes], object] | None = dialect.is_preface
        self._held = bytearray()
        self._partial = bytearray()
        self.ended = False
        """Whether the mark at the stream's end has come."""
        self._fault: EngineCallError | None = None
        self.failure: bytes | None = None
        """The event, not passed on, in which the engine says that it failed (a code of 500 or more)."""
        self.refused_status: int | None = None
        """What an event of the stream says in place of a status: vLLM finds some faults after it has sent a 200."""

    async def read(self) -> bytes:
        """The next events; b"" at the stream's end. Raises EngineCallError."""
        while not self.ended:
            if self._fault is not None:
                raise self._fault
            if self.failure is not None:
                raise EngineAnswerError(self._instance, 500, event=self.failure)
            try:
                chunk = await self._response.readany()
            except OSError as error:
                raise failed_call(self._instance, error, begun=True) from error
            if not chunk:
                raise EngineCallError(self._instance, "died", "ended its stream early")
            if events := self._taken(chunk):
                return events
        # A connection can be used again only if it was read to its end. A failure after the last event is harmless.
        with contextlib.suppress(OSError):
            await self._response.readany()
        return b""

    async def pump(self, passes_on: Callable[[bytes], bool]) -> None:
        """Give events to `passes_on` as they come, until it says False. What is left is for `read` to tell."""

        def sink(chunk: bytes) -> bool:
            events = self._taken(chunk)
            goes_on = passes_on(events) if events else True
            return goes_on and not self._is_over

        if not self._is_over:
            await self._response.pump(sink)

    @property
    def _is_over(self) -> bool:
        return self.ended or self.failure is not None or self._fault is not None

    def _taken(self, chunk: bytes) -> bytes:
        """`take`, whose fault is for `read` to tell."""
        try:
            return self.take(chunk)
        except AnswerTooLongError as error:
            self._fault = failed_call(self._instance, error, begun=True)
        except (ValueError, OverflowError) as error:
            # Not its text, which quotes the answer.
            detail = f"token ids that are none: {type(error).__name__}"
            self._fault = EngineCallError(self._instance, "garbled", detail)
        return b""

    def take(self, chunk: bytes) -> bytes:
        """What may be passed on now that `chunk` has come: events as far as they are whole.

        Raises:
            AnswerTooLongError: an event does not end.
            ValueError, OverflowError: for token ids that are none.
        """
        if self._cut is not None:
            chunk = self._cut.take(chunk)
            if self._cut.done:
                self._cut = None
        if self._partial or not chunk.endswith(END_OF_EVENT):
            chunk = self._whole_events(chunk)
            if not chunk:
                return b""
        if self._error_mark in chunk:
            chunk = self._before_failure(chunk)
        if self._ids is not None:
            chunk = self._ids.take(chunk)
        # Until something is generated another engine may answer in place of this one.
        if self._is_preface is not None:
            is_preface = self._is_preface(chunk) and len(self._held) <= _MOST_PREFACE_BYTES
            self._held += chunk
            if is_preface:
                return b""
            chunk, self._is_preface = bytes(self._held), None
            self._held.clear()
        if chunk and self._ends(chunk):
            self.ended = True
        return self._dialect.cleaned(chunk) if self._dialect.nests_params else chunk

    def _whole_events(self, chunk: bytes) -> bytes:
        """As far as they are whole; what is long comes in many pieces, of which only the new one is looked through."""
        known = max(len(self._partial) - len(END_OF_EVENT) + 1, 0)
        self._partial += chunk
        found = self._partial.rfind(END_OF_EVENT, known)
        if found < 0:
            if len(self._partial) > _MOST_EVENT_BYTES:
                raise AnswerTooLongError(f"an event has more than {_MOST_EVENT_BYTES} bytes")
            return b""
        end = found + len(END_OF_EVENT)
        chunk = bytes(self._partial[:end])
        del self._partial[:end]
        return chunk

    def _before_failure(self, chunk: bytes) -> bytes:
        begin = chunk.find(self._error_mark)
        event = chunk[begin : chunk.find(END_OF_EVENT, begin) + len(END_OF_EVENT)]
        status = self._dialect.status_in(event)
        if status is None or status < 500:
            self.refused_status = status if status is not None and status >= 400 else None
            return chunk
        self.failure = event
        return chunk[:begin]


class ResponseWriter:
    """Writes an answer to the client. Until its first event leaves another engine may answer.

    The headers leave with it, or before, with comments for a client that waits: then errors are events too.
    """

    def __init__(
        self, http: web.Request, record: RequestRecord, metrics: Metrics, dialect: Dialect = OPENAI
    ) -> None:
        self._http = http
        self.dialect = dialect
        self._is_awaited = True
        self._timer: asyncio.TimerHandle | None = None
        self._tick: asyncio.Task[None] | None = None
        self._record = record
        self._metrics = metrics
        self._response: web.StreamResponse | None = None
        self._lines = 0
        self.ids: TakenIds | None = None
        """Token ids of the stream that is being written; None: none were asked for."""
        self.latest = b""
        """The events that were written last."""

    @property
    def begun(self) -> bool:
        """Whether the client has seen anything of the answer."""
        return bool(self.latest)

    @property
    def head_sent(self) -> bool:
        """Whether the client has a status, which was 200."""
        return self._response is not None

    @contextlib.contextmanager
    def keeping_alive(self, every_s: float) -> Iterator[None]:
        """Write a comment every so often while the client waits for the first event."""
        loop = asyncio.get_running_loop()

        def wait_on(_ended: object = None) -> None:
            if self._is_awaited:
                self._timer = loop.call_later(every_s, tick)

        def tick() -> None:
            self._tick = loop.create_task(self._write_comment(), name="prfaas-keep-alive")
            self._tick.add_done_callback(wait_on)

        wait_on()
        try:
            yield
        finally:
            writing = self._stop_waiting()
            if writing is not None:
                writing.cancel()

    def _stop_waiting(self) -> "asyncio.Task[None] | None":
        """No further comment is begun. Returns what is being written."""
        self._is_awaited = False
        if self._timer is not None:
            self._timer.cancel()
        return self._tick

    async def _write_comment(self) -> None:
        # A client that has left is noticed where it is waited for.
        with contextlib.suppress(ConnectionResetError):
            response = await self._with_head(_HEAD_TYPE)
            await self._read_in_time(response.write(_KEEP_ALIVE))

    async def _with_head(self, content_type: str) -> web.StreamResponse:
        """The response, its headers sent."""
        if self._response is None:
            headers = self._record.headers() | {"Content-Type": content_type, "Cache-Control": "no-cache"}
            self._response = web.StreamResponse(headers=headers)
            if self._http.version >= HttpVersion11:
                self._response.enable_chunked_encoding()
            await self._response.prepare(self._http)
        return self._response

    async def write(self, chunk: bytes, content_type: str = _HEAD_TYPE) -> None:
        """Pass on a piece of a stream. Raises ConnectionResetError: the client has left."""
        if not self.begun:
            self._note_first_byte()
            writing = self._stop_waiting()
            if writing is not None:
                # What it writes is whole before anything else is written.
                await asyncio.wait((writing,))
        response = await self._with_head(content_type)
        chunk = self._told(chunk)
        self._note(chunk)
        await self._read_in_time(response.write(chunk))

    async def _read_in_time(self, writing: Awaitable[None]) -> None:
        """Raises ConnectionResetError where the client reads nothing: it is cut off."""
        try:
            async with asyncio.timeout(_UNREAD_S):
                await writing
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError("the client reads nothing of its answer") from None

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End the stream with an error; a client that takes nothing any more is cut off."""
        assert self._response is not None
        if error.status >= 500 or self.begun:
            self._record.broken = True
        else:
            self._record.refused_status = error.status
        event = self.dialect.error_event(error.status, error.message, self.latest)
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                comment = self._stop_waiting()
                if comment is not None:
                    await asyncio.wait((comment,))
                await self._response.write(event)
                await self._response.write_eof()
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
        return self._response

    async def break_off(self, sentence: str, event: bytes | None = None) -> None:
        """Write what ends a stream that no engine can continue: `event`, or an error that says `sentence`."""
        await self.write(event or self.dialect.error_event(502, sentence, self.latest))
        self._record.broken = True

    async def relay(self, stream: EventStream, content_type: str) -> bytes:
        """Pass a whole stream on. Raises EngineCallError and ConnectionResetError.

        Returns:
            The last three pieces, or less of the first two: the reason of the end and the usage stand before the mark.
        """
        earlier = before = b""
        transport = self._http.transport

        def write_now(events: bytes) -> bool:
            nonlocal earlier, before
            events = self._told(events)
            earlier, before = before, self.latest
            self._note(events)
            assert transport is not None
            transport.write(b"%x\r\n%b\r\n" % (len(events), events))
            # A slow client is waited for by `write`.
            return transport.get_write_buffer_size() < _UNSENT_BYTES and not transport.is_closing()

        while events := await stream.read():
            earlier, before = before, self.latest
            await self.write(events, content_type)
            assert self._response is not None
            if self._response.chunked and transport is not None and not transport.is_closing():
                await stream.pump(write_now)
        return earlier[-1024:] + before[-len(self.latest) - 1024 :] + self.latest

    async def end(self) -> web.StreamResponse:
        """End the stream."""
        assert self._response is not None
        await self._read_in_time(self._response.write_eof())
        return self._response

    async def send(self, answer: WholeAnswer) -> web.StreamResponse:
        """The answer in one piece; an event where the client waits for a stream, since this is an error then."""
        if self.head_sent:
            return await self.fail(ApiError(answer.status, _sentence_in(answer.body)))
        self._note_first_byte()
        headers = self._record.headers() | {"Content-Type": answer.content_type}
        return web.Response(status=answer.status, body=self._told(answer.body), headers=headers)

    def _note(self, events: bytes) -> None:
        """These are written next."""
        self.latest = events
        if self.ids is None:
            # An event is a line and an empty one. To count one byte is the cheapest, and this is done for every chunk.
            self._lines += events.count(b"\n")

    def note_tokens(self) -> None:
        """The answer is over: tell the record how many tokens it had, unless its usage has, or how many events."""
        if self.ids is None:
            self._record.answer_events = self._lines // 2
        elif self._record.answer_tokens is None:
            self._record.answer_tokens = len(self.ids.ids)

    def _told(self, answer: bytes) -> bytes:
        """Of an answer or some whole events what the client may know."""
        return answer if self._record.tells_details else without_cached_tokens(answer)

    def _note_first_byte(self) -> None:
        ttft_s = time.perf_counter() - self._record.began_s
        self._record.steps_s["first_byte"] = ttft_s
        self._record.waits_for = None
        self._record.trace.event("first_byte")
        # Without a route nothing was generated.
        if self._record.route_header is not None:
            self._metrics.ttft_seconds.labels(self._record.route).observe(ttft_s)


def _sentence_in(body: bytes) -> str:
    """What an engine's error answer says."""
    try:
        error = orjson.loads(body)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "The decode instance did not answer with a stream."
