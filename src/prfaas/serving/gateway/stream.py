"""A decode engine's answer: whole events of its stream, or all of it in one piece."""

import contextlib
import re
from dataclasses import dataclass

import orjson

from prfaas.serving.gateway.bodies import without_transfer_params
from prfaas.serving.gateway.http_pool import EngineResponse
from prfaas.serving.gateway.request_log import RequestRecord

EVENT_STREAM = "text/event-stream"
END_OF_EVENT = b"\n\n"
LAST_EVENT = b"data: [DONE]\n\n"
DATA = b"data: "
# vLLM ends a stream like this when its engine has died and its HTTP server lives. Quotes inside of generated text
# are escaped, so these bytes can only begin such an event.
_ERROR = b'data: {"error":'
# Events that are longer are passed on in pieces.
_LONGEST_EVENT_BYTES = 1 << 20

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
    """A decode engine did not answer to the end."""

    def __init__(
        self,
        reason: str,
        detail: str,
        *,
        lost: bool,
        answer: WholeAnswer | None = None,
        event: bytes | None = None,
    ) -> None:
        """`reason`: one word. `lost`: the engine is gone, not only this answer.

        `answer`: the engine's error answer, for the client when no other engine can answer. `event`: the same in a
        stream.
        """
        super().__init__(detail)
        self.reason = reason
        self.lost = lost
        self.answer = answer
        self.event = event


class EventStream:
    """Server-sent events of one engine's answer, passed on as the bytes they came in, whole event by whole event.

    Nothing is parsed: a relayed piece costs microseconds. Only an engine's own failure is held back.
    """

    __slots__ = ("_instance", "_partial", "_passes_parts", "_response", "ended", "failure")

    def __init__(self, response: EngineResponse, instance: str) -> None:
        """`instance`: the engine's name, for messages."""
        self._response = response
        self._instance = instance
        self._partial = b""
        self._passes_parts = False
        self.ended = False
        """Whether the mark at the stream's end has come."""
        self.failure: bytes | None = None
        """The event, not passed on, in which the engine says that it failed (a code of 500 or more)."""

    async def read(self) -> bytes:
        """The next events; b"" at the stream's end.

        Raises:
            DecodeFailedError: the engine has failed, or its connection ended early.
        """
        while not self.ended:
            if self.failure is not None:
                detail = f"{self._instance} failed in the stream"
                raise DecodeFailedError("http-500", detail, lost=False, event=self.failure)
            try:
                chunk = await self._response.readany()
            except OSError as error:
                raise _died(self._instance, error) from error
            if not chunk:
                raise DecodeFailedError("died", f"{self._instance} ended its stream early", lost=True)
            events = self.take(chunk)
            if events:
                return events
        # A connection can be used again only if it was read to its end. A failure after the last event is harmless.
        with contextlib.suppress(OSError):
            await self._response.readany()
        return b""

    def take(self, chunk: bytes) -> bytes:
        """What may be passed on now that `chunk` has come: events as far as they are whole."""
        if self._partial or self._passes_parts or not chunk.endswith(END_OF_EVENT):
            chunk = self._whole_events(chunk)
        if _ERROR in chunk:
            chunk = self._before_failure(chunk)
        if chunk:
            self.ended = chunk.endswith(LAST_EVENT)
        return chunk

    def _whole_events(self, chunk: bytes) -> bytes:
        chunk = self._partial + chunk
        found = chunk.rfind(END_OF_EVENT)
        end = 0 if found < 0 else found + len(END_OF_EVENT)
        if len(chunk) - end > _LONGEST_EVENT_BYTES:
            end = len(chunk)
        self._partial = chunk[end:]
        if end:
            self._passes_parts = not chunk.endswith(END_OF_EVENT, 0, end)
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


async def read_whole(response: EngineResponse, instance: str, record: RequestRecord) -> WholeAnswer:
    """All of `response`. Raises DecodeFailedError."""
    try:
        body = await response.read()
    except OSError as error:
        raise _died(instance, error) from error
    note_answer_tokens(record, body)
    return WholeAnswer(response.status, without_transfer_params(body), response.content_type)


def note_answer_tokens(record: RequestRecord, piece: bytes) -> None:
    """Record how many tokens were generated, if the last piece of an answer says so."""
    found = _ANSWER_TOKENS.search(piece, max(len(piece) - _USAGE_BYTES, 0))
    if found is not None:
        record.answer_tokens = int(found.group(1))


def _died(instance: str, error: BaseException) -> DecodeFailedError:
    return DecodeFailedError("died", f"{instance}: {type(error).__name__}: {error}", lost=True)
